/** A database of the browser's, as those use it who keep it for long. */

/** Gives the stores of a transaction by their names. */
export type Stores = (name: string) => IDBObjectStore;

/**
 * One IndexedDB database, opened when it is needed.
 *
 * A browser may close a connection at any time, and may fail to open one: the next transaction opens another one, so
 * no failure outlasts its cause.
 */
export class Database {
  private opened: Promise<IDBDatabase> | undefined;

  constructor(
    private readonly name: string,
    /** Makes the stores of a new database. */
    private readonly make: (database: IDBDatabase) => void,
  ) {}

  /**
   * What `act` returns, once all that it asks for is durable: all or nothing. `act` must ask at once, or in the handlers
   * of its requests. Rejects with what `failed` makes of the reason.
   */
  async within<T>(
    names: readonly string[],
    options: IDBTransactionOptions & { readonly mode: IDBTransactionMode; readonly failed: (reason: string) => Error },
    act: (store: Stores, transaction: IDBTransaction) => T,
  ): Promise<T> {
    const { mode, failed, ...more } = options;
    const opened = (this.opened ??= this.open());
    let transaction: IDBTransaction;
    try {
      transaction = (await opened).transaction([...names], mode, more);
    } catch (error) {
      if (this.opened === opened) this.opened = undefined; // it may be closed though nothing has said so
      throw failed(text(error));
    }
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(result);
      transaction.onabort = () => reject(failed(text(transaction.error)));
      let result: T;
      try {
        result = act((name) => transaction.objectStore(name), transaction);
      } catch (error) {
        transaction.abort();
        reject(failed(text(error)));
      }
    });
  }

  /** Let go of the connection; the next transaction opens another one. */
  close(): void {
    void this.opened?.then((database) => database.close()).catch(() => undefined);
    this.opened = undefined;
  }

  private open(): Promise<IDBDatabase> {
    const opened = new Promise<IDBDatabase>((resolve, reject) => {
      const request = indexedDB.open(this.name, 1);
      request.onupgradeneeded = () => this.make(request.result);
      request.onerror = () => reject(request.error ?? new Error("it cannot be opened"));
      request.onsuccess = () => {
        const database = request.result;
        const gone = () => {
          if (this.opened === opened) this.opened = undefined;
        };
        database.onclose = gone;
        database.onversionchange = () => {
          database.close(); // somebody deletes the site's data
          gone();
        };
        resolve(database);
      };
    });
    return opened;
  }
}

function text(error: unknown): string {
  return error instanceof Error || error instanceof DOMException ? error.message : String(error);
}
