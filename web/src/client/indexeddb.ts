/** Long-lived use of an IndexedDB database. */

/** Returns a store of a transaction by its name. */
export type Stores = (name: string) => IDBObjectStore;

/**
 * One IndexedDB database, opened when it is needed.
 *
 * A browser may close a connection at any time, or fail to open one. The next transaction opens another connection, so
 * that a failure does not outlast its cause.
 */
export class Database {
  private opened: Promise<IDBDatabase> | undefined;

  constructor(
    private readonly name: string,
    /** Makes the stores of a new database. */
    private readonly make: (database: IDBDatabase) => void,
  ) {}

  /**
   * Run `act` in a transaction; resolves with its result once all of its changes are durable (all or none). `act` must
   * make its requests at once, or in the handlers of its requests. Rejects with the error that `failed` returns.
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
      if (this.opened === opened) this.opened = undefined; // it may have been closed without an event
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

  /** Close the connection; the next transaction opens another one. */
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
          database.close(); // the site's data is being deleted
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
