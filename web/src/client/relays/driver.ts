/** The shell around a `Core`: one WebSocket at a time, one timer, the program's promises. It decides nothing. */

import { ConnectionFailed, InvalidMessage, RequestTimeout, StrataError } from "../protocol/errors.js";
import type { Signer } from "../protocol/ids.js";
import type { Packet } from "../protocol/packets.js";
import { decodeRelayMessage, type Moderated } from "../protocol/wire.js";
import { after, type Timer } from "../timers.js";
import { Backoff } from "./backoff.js";
import { Core } from "./core.js";
import { discover } from "./discovery.js";
import type { Options } from "./options.js";
import { addressOf, type Pins } from "./pins.js";
import type { Stream } from "./stream.js";
import type { Announced, Authenticated, Published, Query } from "./values.js";

/** The part of the browser's WebSocket that is used here. Node 22 has it too; for older versions there are packages. */
export interface WebSocketLike {
  onopen: ((event: never) => void) | null;
  onmessage: ((event: never) => void) | null;
  onclose: ((event: never) => void) | null;
  onerror: ((event: never) => void) | null;
  send(data: string): void;
  close(code?: number, reason?: string): void;
}

/** A WebSocket class. */
export type WebSocketConstructor = new (url: string) => WebSocketLike;

/** What a `Driver` needs besides URL and options. */
export interface DriverOptions {
  readonly signer: Signer | undefined;
  readonly pins: Pins | undefined;
  readonly webSocket: WebSocketConstructor | undefined;
  /** Called when a connection is made or lost, and when authentication has been decided. Never throws. */
  readonly changed: () => void;
}

// RFC 6455 §7.4.1. These mean that the two ends disagree about the protocol or that the relay does not admit us:
// another attempt would end the same way.
const FINAL_CLOSE_CODES = [1002, 1003, 1007, 1008, 1009, 1010];
const GOODBYE_CODES = [1001, 1012, 1013];
const CHALLENGE_PATIENCE_SECONDS = 1;
const MAX_EARLY_FRAMES = 64;
const SILENT: Ending = { code: 1006, reason: "the relay has fallen silent" };
const ERROR_SECONDS = 0.02;

interface Waiter<T> {
  resolve(value: T): void;
  reject(error: unknown): void;
}

interface Ending {
  readonly code: number;
  readonly reason: string;
}

/** Keeps one relay connected until `stop`. */
export class Driver {
  readonly core: Core;
  /** Why the connection has ended permanently; undefined while it has not. */
  failure: StrataError | undefined;
  private readonly arrivals = new Map<Stream, () => void>();
  private readonly publishes = new Map<string, Waiter<Published>>();
  private readonly questions = new Map<string, Waiter<Moderated>>();
  private readonly authentications = new Set<Waiter<Authenticated>>();
  private readonly met = new Map<string, string>();
  private socket: WebSocketLike | undefined;
  private timer: Timer;
  private timerAt = Infinity;
  private readonly backoff: Backoff;
  private madeAt = 0;
  private hangUp: ((ending: Ending) => void) | undefined;
  private wakeUp: (() => void) | undefined;
  private lastProblem: ConnectionFailed | undefined;
  private isOpened = false;
  private isPinned = false;

  constructor(
    private readonly url: string,
    private readonly options: Options,
    private readonly more: DriverOptions,
  ) {
    checkUrl(url);
    const random = Math.random;
    this.backoff = new Backoff(options.backoffBase, options.backoffCap, random);
    this.core = new Core({ options, random, did: more.signer?.did, address: addressOf(url), met: this.met });
  }

  /** Seconds on a monotonic clock. */
  now(): number {
    return performance.now() / 1000;
  }

  /** Seconds on a clock that stands still while the program does not look. */
  watched(): number {
    return this.observe((core) => this.now() - core.postponed);
  }

  /** Run `act` on the core, then carry out the results. The only way to call into the core. */
  step<T>(act: (core: Core) => T): T {
    try {
      return act(this.core);
    } finally {
      this.deliver();
    }
  }

  /** Note that the program looks, which it does at each message and timer, and then run `act`. */
  private observe<T>(act: (core: Core) => T): T {
    return this.step((core) => {
      if (core.look(this.now(), Date.now() / 1000)) this.hurry();
      return act(core);
    });
  }

  /** Call `act` once the program has looked for `seconds`: only then has a relay been silent. Returns what calls it off. */
  patience(seconds: number, act: () => void): () => void {
    const end = this.watched() + seconds;
    let timer: Timer;
    const wait = (left: number) => {
      timer = after(left, () => {
        const more = end - this.watched();
        if (more > 0) wait(more);
        else act();
      });
    };
    wait(seconds);
    return () => clearTimeout(timer);
  }

  /**
   * Connect. Rejects with `ConnectionFailed` (at once if retrying cannot help, else after `connectTimeout`), and with
   * whatever loading the pins rejects with.
   */
  async open(): Promise<void> {
    if (this.isOpened) throw new TypeError("a relay connection can be opened once");
    this.isOpened = true;
    if (this.more.pins !== undefined) {
      const pins = await this.more.pins.load();
      for (const [address, did] of pins) if (!this.met.has(did)) this.met.set(did, address);
      this.core.expect(pins.get(addressOf(this.url)));
    }
    if (this.failure !== undefined) throw this.failure;
    let opened!: () => void;
    const first = new Promise<void>((resolve) => (opened = resolve));
    void this.keepConnected(opened);
    const stopWaiting = this.patience(this.options.connectTimeout, opened);
    await first;
    stopWaiting();
    if (this.failure !== undefined) throw this.failure;
    if (this.core.announced === undefined && this.core.statistics.connections === 0) {
      throw this.lastProblem ?? new ConnectionFailed(`no connection to ${shown(this.url)}: it did not answer in time`);
    }
  }

  /** End every publish and subscription with `reason`, and close the socket. Idempotent. */
  stop(reason: StrataError): void {
    this.failure ??= reason;
    this.step((core) => core.fail(this.failure as StrataError));
    this.socket?.close(1000);
    this.hangUp?.({ code: 1000, reason: "" });
    this.wakeUp?.();
    clearTimeout(this.timer);
    this.timerAt = Infinity;
    this.more.changed();
  }

  /** Throw the failure, if there is one, or `TypeError` if not open. */
  checkOpen(): void {
    if (this.failure !== undefined) throw this.failure;
    if (!this.isOpened) throw new TypeError("the relay connection is not open: call open() or use connect()");
  }

  // What a program asks for.

  /** Authenticate the session. Rejects with the error that authentication ended in, or `RequestTimeout`. */
  authenticate(timeout: number): Promise<Authenticated> {
    const { session } = this.core;
    if (session !== undefined) return Promise.resolve(session);
    const undecided = this.step((core) => core.authenticate(this.now()));
    if (this.core.session !== undefined) return Promise.resolve(this.core.session);
    const error = this.core.authenticationError;
    if (!undecided && error !== undefined) return Promise.reject(error);
    return new Promise((resolve, reject) => {
      const stopWaiting = this.patience(timeout, () => settle(() => reject(new RequestTimeout("AUTH", timeout))));
      const settle = (act: () => void) => {
        stopWaiting();
        this.authentications.delete(waiter);
        act();
      };
      const waiter: Waiter<Authenticated> = {
        resolve: (session_) => settle(() => resolve(session_)),
        reject: (why) => settle(() => reject(why)),
      };
      this.authentications.add(waiter);
    });
  }

  /**
   * Publish a packet in the seconds that are `left` of the caller's `timeout`. Rejects with the error if that fails.
   * Aborting forgets the publish; the relay may still store the packet.
   */
  publish(packet: Packet, how: { timeout: number; left: number; signal: AbortSignal | undefined }): Promise<Published> {
    const { timeout, left, signal } = how;
    signal?.throwIfAborted();
    return new Promise((resolve, reject) => {
      this.step((core) => {
        const handle = core.publish(packet.packetId, packet.canonical, left, this.now(), timeout);
        const abort = () => {
          if (!this.publishes.delete(handle)) return;
          this.step((inner) => inner.cancelPublish(handle));
          reject(signal?.reason);
        };
        signal?.addEventListener("abort", abort, { once: true });
        const done = () => signal?.removeEventListener("abort", abort);
        this.publishes.set(handle, {
          resolve: (published) => (done(), resolve(published)),
          reject: (why) => (done(), reject(why)),
        });
      });
    });
  }

  /** Send an operator's request. Rejects with `RequestRefused`, `RequestTimeout`, `ConnectionFailed`. */
  ask(message: { readonly type: string } & Readonly<Record<string, unknown>>, timeout: number): Promise<Moderated> {
    return new Promise((resolve, reject) => {
      const request = this.step((core) => core.ask(message));
      if (request === undefined) {
        reject(new ConnectionFailed("the relay is not connected"));
        return;
      }
      const stopWaiting = this.patience(timeout, () => {
        if (!this.questions.delete(request)) return;
        this.core.cancelAsk(request);
        reject(new RequestTimeout(message.type, timeout));
      });
      this.questions.set(request, {
        resolve: (answer) => (stopWaiting(), resolve(answer)),
        reject: (why) => (stopWaiting(), reject(why)),
      });
    });
  }

  /** Open a subscription; `arrived` is called when its stream has something to take or has ended. */
  subscribe(query: Query, arrived: () => void): Stream {
    return this.step((core) => {
      const stream = core.subscribe(query, this.now());
      this.arrivals.set(stream, arrived);
      return stream;
    });
  }

  /** Check at once whether the relay is still there: the network may be another one. */
  readonly wake = (): void => {
    this.hurry();
    this.core.liveness.check(this.now());
    this.observe(() => undefined);
  };

  /** Connect at once, if there is no connection, and try often again: what failed before says nothing of now. */
  private hurry(): void {
    this.backoff.reset();
    this.wakeUp?.();
  }

  // Connecting.

  private async keepConnected(opened: () => void): Promise<void> {
    const { backoffBase, stableAfter } = this.options;
    this.observe(() => undefined);
    globalThis.addEventListener?.("online", this.wake);
    globalThis.document?.addEventListener("visibilitychange", this.wake);
    while (this.failure === undefined) {
      const { statistics } = this.core;
      const before = statistics.connections;
      const ending = await this.serve(opened);
      if (this.failure !== undefined) break;
      const isMade = statistics.connections > before;
      if (!isMade) statistics.connectionsFailed++;
      const isFinal = FINAL_CLOSE_CODES.includes(ending.code);
      const problem = describe(ending, this.url);
      if (isFinal) {
        this.stop(problem);
        break;
      }
      this.lastProblem = problem;
      // A relay that says goodbye has not failed: it makes way for another one, or restarts.
      const worth = GOODBYE_CODES.includes(ending.code) ? backoffBase : stableAfter;
      if (isMade && this.now() - this.madeAt >= worth) this.backoff.reset();
      if (ending !== SILENT) await this.sleep(this.backoff.nextDelay()); // the network may be there again
    }
    globalThis.removeEventListener?.("online", this.wake);
    globalThis.document?.removeEventListener("visibilitychange", this.wake);
    opened();
  }

  private sleep(seconds: number): Promise<void> {
    return new Promise<void>((resolve) => {
      const timer = after(seconds, resolve);
      this.wakeUp = () => (clearTimeout(timer), resolve());
    }).then(() => void (this.wakeUp = undefined));
  }

  /** Run one connection until it ends; return how it ended. */
  private async serve(opened: () => void): Promise<Ending> {
    const early: string[] = [];
    const waits = new Set<() => void>();
    const discovery = new AbortController();
    let socket: WebSocketLike;
    try {
      socket = new (this.more.webSocket ?? globalWebSocket())(this.url);
    } catch (error) {
      return { code: 1002, reason: error instanceof Error ? error.message : String(error) };
    }
    let ready!: () => void;
    const isReady = new Promise<undefined>((resolve) => (ready = () => resolve(undefined)));
    let isServing = false;
    const ended = new Promise<Ending>((resolve) => {
      this.hangUp = resolve;
      socket.onclose = ({ code, reason }: CloseEvent) => resolve({ code, reason });
    });
    // In browsers `close` follows at once, and may say more. In Node nothing follows if nothing listens there.
    socket.onerror = () => waits.add(this.patience(ERROR_SECONDS, () => this.hangUp?.({ code: 1006, reason: "" })));
    socket.onopen = () => ready();
    socket.onmessage = ({ data }: MessageEvent<unknown>) => {
      if (typeof data !== "string" || data.length > this.options.maxMessageLength) {
        this.core.statistics.messagesInvalid++;
      } else if (isServing) {
        this.observe((core) => core.receiveMessage(data, this.now()));
      } else if (early.length < MAX_EARLY_FRAMES) {
        early.push(data);
      }
    };
    const patience = <T>(seconds: number, value: T) =>
      new Promise<T>((resolve) => waits.add(this.patience(seconds, () => resolve(value))));
    const manifest = discover(this.url, discovery.signal);
    try {
      const slow = patience(this.options.handshakeTimeout, "slow" as const);
      const first = await Promise.race([isReady, ended, slow]);
      if (first === "slow") return { code: 1006, reason: "it did not answer in time" };
      if (first !== undefined) return first;
      let announced = await Promise.race([manifest, patience(this.options.manifestTimeout, undefined), ended]);
      if (announced !== undefined && "code" in announced) return announced;
      if (announced === undefined) announced = await this.announcedBy(early, ended, patience);
      if (this.failure !== undefined) return await ended;
      this.socket = socket;
      this.madeAt = this.now();
      isServing = true;
      this.step((core) => {
        core.connectionMade(announced ?? { extensions: new Set() }, this.now(), Date.now() / 1000);
        for (const frame of early) core.receiveMessage(frame, this.now());
      });
      opened();
      this.more.changed();
      return await ended;
    } finally {
      for (const stopWaiting of waits) stopWaiting();
      discovery.abort();
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.onerror = () => undefined; // some WebSockets throw errors for which there is no handler
      socket.close();
      this.socket = this.hangUp = undefined;
      this.step((core) => core.connectionLost());
      this.more.changed();
    }
  }

  /** What the relay's first challenge announces, if there is no manifest (another origin's may not be readable). */
  private async announcedBy(
    early: readonly string[],
    ended: Promise<Ending>,
    patience: (seconds: number, value: undefined) => Promise<undefined>,
  ): Promise<Announced | undefined> {
    let over = false;
    void Promise.race([patience(CHALLENGE_PATIENCE_SECONDS, undefined), ended]).then(() => (over = true));
    for (let seen = 0; !over; ) {
      for (; seen < early.length; seen++) {
        const extensions = extensionsIn(early[seen] as string);
        if (extensions !== undefined) return { extensions: new Set(extensions) };
      }
      await patience(0.01, undefined);
    }
    return undefined;
  }

  // After every step.

  private deliver(): void {
    let isDecided = false;
    for (const change of this.core.changes()) {
      switch (change.kind) {
        case "signature":
          void this.sign(change.request, change.message);
          break;
        case "authenticated":
          for (const waiter of [...this.authentications]) settle(waiter, change.outcome);
          if (!(change.outcome instanceof Error)) this.pin();
          isDecided = true;
          break;
        case "published": {
          const waiter = this.publishes.get(change.handle);
          this.publishes.delete(change.handle);
          if (waiter !== undefined) settle(waiter, change.outcome);
          break;
        }
        case "answered": {
          const waiter = this.questions.get(change.request);
          this.questions.delete(change.request);
          if (waiter !== undefined) settle(waiter, change.outcome);
          break;
        }
        case "stream": {
          const arrived = this.arrivals.get(change.stream);
          if (change.stream.phase === "ended") this.arrivals.delete(change.stream);
          arrived?.();
        }
      }
    }
    for (const frame of this.core.dataToSend()) this.socket?.send(frame);
    // A browser's WebSocket reports nothing when its peer disappears without closing.
    if (this.core.liveness.isGone) {
      this.hurry();
      this.hangUp?.(SILENT);
    }
    this.arm();
    if (isDecided) this.more.changed();
  }

  private async sign(request: string, message: Uint8Array): Promise<void> {
    let outcome: Uint8Array | Error;
    try {
      outcome = await (this.more.signer as Signer).sign(message);
    } catch (error) {
      outcome = error instanceof Error ? error : new Error(String(error));
    }
    this.step((core) => core.signed(request, outcome, this.now()));
  }

  /** Store the relay's pin in the background: a store that fails harms no message. */
  private pin(): void {
    const relayId = this.core.serverId;
    if (this.more.pins === undefined || this.isPinned || relayId === undefined) return;
    this.isPinned = true;
    this.more.pins.add(addressOf(this.url), relayId).catch((error: unknown) => {
      console.warn("the relay could not be pinned", error);
    });
  }

  private arm(): void {
    const wakeAt = this.core.timer;
    if (wakeAt === this.timerAt) return;
    clearTimeout(this.timer);
    this.timerAt = wakeAt;
    if (wakeAt === Infinity) return;
    this.timer = after(Math.max(wakeAt - this.now(), 0), () => {
      this.timerAt = Infinity;
      this.observe((core) => core.handleTimer(this.now()));
    });
  }
}

function settle<T>(waiter: Waiter<T>, outcome: T | StrataError): void {
  if (outcome instanceof StrataError) waiter.reject(outcome);
  else waiter.resolve(outcome);
}

function extensionsIn(frame: string): readonly string[] | undefined {
  try {
    const message = decodeRelayMessage(frame);
    return message.type === "AUTH_CHALLENGE" ? message.extensions : undefined;
  } catch (error) {
    if (error instanceof InvalidMessage) return undefined;
    throw error;
  }
}

function globalWebSocket(): WebSocketConstructor {
  const found = (globalThis as { WebSocket?: WebSocketConstructor }).WebSocket;
  if (found !== undefined) return found;
  throw new TypeError("this program has no WebSocket: use Node 22 or newer, or pass webSocket");
}

function checkUrl(url: string): void {
  let parts: URL | undefined;
  try {
    parts = new URL(url);
  } catch {
    parts = undefined;
  }
  if (parts === undefined || !["ws:", "wss:"].includes(parts.protocol) || parts.hash !== "") {
    throw new ConnectionFailed("not a relay URL; one looks like ws://127.0.0.1:7447/strata");
  }
}

function describe({ code, reason }: Ending, url: string): ConnectionFailed {
  const why =
    code === 1006 && reason === ""
      ? "nothing answers there, or it is no relay, or it does not let this page in; browsers do not say which"
      : reason || `it closed the connection with code ${code}`;
  return new ConnectionFailed(`no connection to ${shown(url)}: ${why}`);
}

/** The URL without the user name, password and query that it may contain, for logs and errors. */
function shown(url: string): string {
  const { protocol, host, pathname } = new URL(url);
  return `${protocol}//${host}${pathname}`;
}
