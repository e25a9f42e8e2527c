/**
 * A reliable channel: `@waku/sds` over a relay.
 *
 * The package decides what a message names, what is acknowledged, what is missing, and who repairs what. It has no
 * transport, no clock, no store, and it hands messages on before those that they follow where several are missing.
 * Those four are here: packets over a relay, the waits, what survives a reload, and the order.
 */

import { type ContentMessage, type HistoryEntry, isContentMessage, isSyncMessage, Message, MessageChannel, MessageChannelEvent } from "@waku/sds";

import { build, verify } from "../building.js";
import { fromHex, hex } from "../protocol/bytes.js";
import { Closed, ConnectionFailed, InvalidPacket, RequestRefused } from "../protocol/errors.js";
import type { Signer } from "../protocol/ids.js";
import type { JsonObject } from "../protocol/json.js";
import type { Packet } from "../protocol/packets.js";
import type { Relay } from "../relays/relay.js";
import type { Delivery, FetchOptions } from "../relays/values.js";
import { messageContent, readEnvelope, repairContent } from "./envelope.js";
import { compare, History } from "./history.js";
import { encodeSegment, Reassembly } from "./segments.js";
import { type ChannelStore, memoryChannelStore, type MessageState, type StoredMessage } from "./store.js";

/** The part of a relay that a channel uses. */
export interface ChannelRelay extends Pick<Relay, "publish" | "announced" | "keyChain"> {
  subscribe(options: FetchOptions): Reading;
  fetch(options: FetchOptions): Reading;
}

/** Packets one by one, until `close`. */
export interface Reading extends AsyncIterable<Delivery> {
  close(): void;
}

/** What a channel is told at its opening. Times are seconds. */
export interface ChannelOptions {
  /** The channel's name, the same for all participants. */
  readonly id: string;
  /** The content topic, the same for all participants, and of no other channel. */
  readonly topic: string;
  /** Who signs. The participant's own name is this DID and a device, which the store keeps. */
  readonly identity: Signer;
  /** What survives a reload; memory unless given. */
  readonly store?: ChannelStore;
  /** Called with each message, own ones too, once and never before those that it follows. Not for restored ones. */
  readonly onMessage?: (message: ChannelMessage) => void;
  /** Called when `messages`, a state or `status` may have changed. */
  readonly onChange?: () => void;
  /** After how long an own message that nobody has acknowledged is sent again; doubled each time, up to 16 times that. */
  readonly resendAfter?: number;
  /** The longest wait before what was received is acknowledged. */
  readonly acknowledgeWithin?: number;
  /** About how often somebody in an idle room says what there is. */
  readonly syncEvery?: number;
  /** How long a missing message is looked for, while there is a connection. */
  readonly giveUpAfter?: number;
  /** Most messages kept; the oldest are forgotten, but for their ids. */
  readonly maxMessages?: number;
}

/** A message of the channel. */
export interface ChannelMessage {
  /** The id that all participants have for it. */
  readonly id: string;
  /** What was said. */
  readonly payload: Uint8Array;
  /** The DID that signed it; undefined where somebody repeated it without proof. */
  readonly author: string | undefined;
  /** The participant's name, which only the signature proves. */
  readonly sender: string;
  readonly isOwn: boolean;
  /** By the author's clock, in Unix seconds; undefined as `author` is. */
  readonly sentAt: number | undefined;
  readonly lamport: bigint;
  /** The ids of messages that its sender had handed on before. */
  readonly follows: readonly string[];
  readonly state: MessageState;
}

/** How the channel stands. */
export interface ChannelStatus {
  /** Messages that are known to exist and are not here. */
  readonly missing: number;
  /** Messages that are here and wait for those. */
  readonly heldBack: number;
  /** Own messages that no relay has yet, and those that nobody has acknowledged. */
  readonly sending: number;
  readonly unacknowledged: number;
  /** Messages that were given up, received again after that, refused as malformed, and own ones sent again. */
  readonly lost: number;
  readonly repeated: number;
  readonly refused: number;
  readonly resent: number;
  /** Messages found by reading the relay's history. */
  readonly repaired: number;
}

/** The largest payload: a packet has to hold it in base64 twice, with a filter and a history beside it. */
export const MAX_PAYLOAD_BYTES = 65_536;

const MAX_MESSAGE_BYTES = 1 << 20;
const MAX_HISTORY_ENTRIES = 1_000;
const MAX_HELD_BACK = 1_000;
const MAX_MISSING = 10_000;
const FAR_AHEAD_MS = 86_400_000n;
const SYNC_EXPIRES_SECONDS = 3_600;
const MAX_PLACES = 32;
const NAMED = 10; // messages that each message names, of which one is enough to find the others
const RETRY_SECONDS = 2;
const MAX_REPAIRS_AT_ONCE = 100;

interface Entry extends StoredMessage {
  readonly message: ContentMessage;
  payload: Uint8Array | undefined;
  isDelivered: boolean;
  isReleased: boolean;
  attempts: number;
  resendAt: number;
}

/** An open channel; `openChannel` makes it. */
export class ReliableChannel {
  /** This participant's name. */
  readonly sender: string;
  private readonly sds: MessageChannel;
  private readonly history: History;
  private readonly entries = new Map<string, Entry>();
  private readonly first = new Map<string, Packet>(); // of own messages that no relay has yet
  private readonly forgotten: Set<string>;
  private readonly reassembly = new Reassembly();
  private readonly missing = new Map<string, { hint: Uint8Array | undefined; waited: number }>();
  private readonly closing = new AbortController();
  private readonly counts = { lost: 0, repeated: 0, refused: 0, resent: 0, repaired: 0 };
  private readonly toAcknowledge = new Set<string>();
  private places: string[];
  private placesChanged = false;
  private syncAt = Infinity;
  private lookAt = 0;
  private looks = 0;
  private isLooking = false;
  private isRestoring = false;
  private lastTick = Date.now();
  private turn: Promise<unknown> = Promise.resolve();
  private timer: ReturnType<typeof setInterval> | undefined;

  /** @internal */
  constructor(
    private readonly relay: ChannelRelay,
    private readonly options: Required<Omit<ChannelOptions, "onMessage" | "onChange">> & ChannelOptions,
    kept: { device: string; places: readonly string[]; forgotten: readonly string[] },
  ) {
    this.sender = `${options.identity.did}#${kept.device}`;
    this.places = [...kept.places];
    this.forgotten = new Set(kept.forgotten);
    this.history = new History(options.maxMessages);
    for (const id of kept.forgotten) this.history.settle(id);
    const tMin = 1000 * options.resendAfter;
    this.sds = new MessageChannel(
      options.id,
      this.sender,
      { causalHistorySize: NAMED, repairConfig: { tMin, tMax: 4 * tMin } },
      this.history,
    );
    this.sds.addEventListener(MessageChannelEvent.InMessageDelivered, ({ detail }) => {
      const entry = this.entries.get(detail);
      if (entry !== undefined) entry.isDelivered = true;
    });
    this.sds.addEventListener(MessageChannelEvent.OutMessageAcknowledged, ({ detail }) => this.stateOf(detail, "acknowledged"));
  }

  /** What was said, in the order that all participants share. */
  get messages(): readonly ChannelMessage[] {
    const released = [...this.entries.values()].filter((each) => each.isReleased && each.payload !== undefined);
    return released.map(asMessage).sort(compare);
  }

  /** How the channel stands. */
  get status(): ChannelStatus {
    const all = [...this.entries.values()];
    const count = (state: MessageState) => all.filter((each) => each.state === state).length;
    return {
      ...this.counts,
      missing: this.missing.size,
      heldBack: all.filter((each) => !each.isReleased).length,
      sending: count("sending"),
      unacknowledged: count("sent") + count("sending"),
    };
  }

  /**
   * Say something; resolves with the message's id when it is in the store. From then on it is sent until a relay has
   * it, and again until somebody acknowledges it, after a reload too.
   *
   * Rejects with `RangeError` for an empty payload or one over `MAX_PAYLOAD_BYTES`, `Closed`, and what the store or
   * the signer rejects with; then nothing was said.
   */
  async send(payload: Uint8Array): Promise<string> {
    if (payload.length === 0 || payload.length > MAX_PAYLOAD_BYTES) {
      throw new RangeError(`a payload has 1 to ${MAX_PAYLOAD_BYTES} bytes, not ${payload.length}`);
    }
    this.requireOpen();
    const content = encodeSegment(payload, crypto.getRandomValues(new Uint32Array(4)).join("-"));
    return this.inTurn(async () => {
      this.requireOpen();
      let outcome: string | Error = new Error("@waku/sds made no message");
      this.sds.pushOutgoingMessage(content, async (message) => {
        try {
          const entry = await this.keepOwn(message);
          outcome = entry.id;
          void this.deliver(entry);
          return { success: true, ...(entry.hint === undefined ? {} : { retrievalHint: entry.hint }) };
        } catch (error) {
          outcome = error as Error;
          return { success: false };
        }
      });
      await this.sds.processTasks();
      if (typeof outcome !== "string") throw outcome as Error;
      this.toAcknowledge.clear(); // the message says what was received
      this.putOffSync();
      this.releaseAll();
      return outcome;
    });
  }

  /** Stop: what is not out yet stays in the store. Idempotent. */
  async close(): Promise<void> {
    if (this.closing.signal.aborted) return;
    this.closing.abort();
    clearInterval(this.timer);
    await this.turn;
    await this.savePlaces();
    this.options.store.close();
  }

  /** @internal Take up what the store has, and begin. */
  async start(messages: readonly StoredMessage[]): Promise<void> {
    this.isRestoring = true;
    for (const each of messages) await this.restore(each);
    await this.settleDown();
    this.isRestoring = false;
    this.putOffSync();
    void this.read();
    for (const entry of this.entries.values()) if (entry.state === "sending") void this.deliver(entry);
    // Short enough for every wait that can be set.
    this.timer = setInterval(() => void this.inTurn(() => this.tick()), Math.min(1000, 250 * this.options.acknowledgeWithin));
  }

  // Own messages.

  private async keepOwn(message: ContentMessage): Promise<Entry> {
    const wire = message.encode();
    const packet = await build(this.options.identity, messageContent(this.options.topic, wire));
    const entry = this.entry(message, {
      id: message.messageId,
      wire,
      isOwn: true,
      author: this.options.identity.did,
      sentAt: packet.timestamp,
      hint: fromHex(packet.packetId.slice(2)),
      state: "sending",
    });
    await this.options.store.add(stored(entry));
    this.entries.set(entry.id, entry);
    this.first.set(entry.id, packet);
    entry.isDelivered = true;
    return entry;
  }

  /** Publish an own message until the relay has it, or refuses it for good. */
  private async deliver(entry: Entry): Promise<void> {
    while (!this.closing.signal.aborted) {
      try {
        const content = messageContent(this.options.topic, entry.wire);
        const packet = this.first.get(entry.id) ?? (await build(this.options.identity, content));
        await this.relay.publish(packet, { signal: this.closing.signal });
        this.first.delete(entry.id);
        this.stateOf(entry.id, "sent");
        this.planResend(entry);
        return;
      } catch (error) {
        if (error instanceof Closed || error instanceof ConnectionFailed || this.closing.signal.aborted) return;
        if (error instanceof InvalidPacket || (error instanceof RequestRefused && error.retry === "never")) {
          this.first.delete(entry.id); // a packet that is too old by now; the next one has another time
          if (++entry.attempts > 3) return this.stateOf(entry.id, "failed");
        }
      }
      await pause(RETRY_SECONDS, this.closing.signal);
    }
  }

  private planResend(entry: Entry): void {
    entry.resendAt = Date.now() + 1000 * this.options.resendAfter * 2 ** Math.min(entry.attempts, 4) * (0.75 + Math.random() / 2);
  }

  private resend(): void {
    const now = Date.now();
    for (const entry of this.entries.values()) {
      if (!entry.isOwn || entry.state !== "sent" || now < entry.resendAt) continue;
      entry.attempts++;
      this.planResend(entry);
      this.counts.resent++;
      void this.publish(messageContent(this.options.topic, entry.wire));
    }
  }

  // What the relay brings.

  private async read(): Promise<void> {
    while (!this.closing.signal.aborted) {
      try {
        const cursor = this.places.at(-1);
        const found = this.relay.subscribe({ types: this.options.topic, ...(cursor === undefined ? {} : { cursor }) });
        for await (const delivery of this.whileOpen(found)) {
          const before = this.places;
          await this.inTurn(async () => {
            await this.take(delivery, true);
            await this.settleDown();
          }).catch((error: unknown) => {
            this.places = before; // it was not kept: read it again
            throw error;
          });
        }
      } catch (error) {
        if (error instanceof Closed || error instanceof ConnectionFailed) return;
        console.warn("the channel cannot be read", error);
      }
      await pause(RETRY_SECONDS, this.closing.signal);
    }
  }

  /** What a subscription brings until the channel is closed. */
  private async *whileOpen(found: Reading): AsyncGenerator<Delivery> {
    const close = () => found.close();
    this.closing.signal.addEventListener("abort", close, { once: true });
    try {
      if (!this.closing.signal.aborted) yield* found;
    } finally {
      this.closing.signal.removeEventListener("abort", close);
      close();
    }
  }

  /** Take a packet; whether it brought a message that was not here. */
  private async take({ packet, cursor }: Delivery, moves: boolean): Promise<boolean> {
    if (moves && cursor !== undefined) this.moveTo(cursor);
    const envelope = readEnvelope(packet, this.options.topic);
    if (envelope === undefined || envelope.wire.length > MAX_MESSAGE_BYTES) return this.refuse();
    const message = Message.decode(envelope.wire);
    if (message === undefined) return this.refuse();
    if (message.channelId !== this.options.id) return false;
    if (message.causalHistory.length > MAX_HISTORY_ENTRIES || message.repairRequest.length > MAX_HISTORY_ENTRIES) return this.refuse();
    if ((message.lamportTimestamp ?? 0n) > BigInt(Date.now()) + FAR_AHEAD_MS) return this.refuse();
    const hint = fromHex(packet.packetId.slice(2));
    if (!isContentMessage(message)) {
      if (isSyncMessage(message) && message.senderId !== this.sender) {
        this.sds.pushIncomingMessage(message, hint);
        this.heard(message);
        this.putOffSync();
      }
      return false;
    }
    if (this.entries.has(message.messageId) || this.forgotten.has(message.messageId)) {
      if (message.senderId !== this.sender) this.counts.repeated++;
      // A repeat says that its sender has heard no acknowledgement: say it again.
      if (this.entries.get(message.messageId)?.isReleased === true) this.owe(message);
      return false;
    }
    if (this.status.heldBack >= MAX_HELD_BACK && !this.missing.has(message.messageId)) return this.refuse();
    if (envelope.original !== undefined && !(await this.isGenuine(envelope.original))) return this.refuse();
    const entry = this.entry(message, {
      id: message.messageId,
      wire: envelope.wire,
      isOwn: message.senderId === this.sender,
      author: envelope.author,
      sentAt: envelope.sentAt,
      hint,
      state: message.senderId === this.sender ? "sent" : "received",
    });
    await this.options.store.add(stored(entry), this.places);
    this.placesChanged = false;
    await this.learn(entry);
    if (!entry.isOwn) {
      this.heard(message);
      this.owe(message);
    }
    return true;
  }

  private async isGenuine(original: Packet): Promise<boolean> {
    try {
      await verify(original, { keys: await this.relay.keyChain(original.authorId) });
      return true;
    } catch {
      return false; // whoever lacks the message asks again
    }
  }

  private refuse(): false {
    this.counts.refused++;
    return false;
  }

  private moveTo(cursor: string): void {
    if (this.places.length === MAX_PLACES) this.places = this.places.filter((_, at) => at % 2 === 1);
    this.places = [...this.places, cursor];
    this.placesChanged = true;
  }

  /** Give a message of the store to the package. */
  private async restore(kept: StoredMessage): Promise<void> {
    const message = Message.decode(kept.wire);
    if (message === undefined || !isContentMessage(message)) return;
    await this.learn(this.entry(message, { ...kept }));
  }

  private async learn(entry: Entry): Promise<void> {
    const { message } = entry;
    this.entries.set(entry.id, entry);
    if (entry.hint !== undefined) message.retrievalHint = entry.hint;
    if (!entry.isOwn) {
      this.sds.pushIncomingMessage(message, entry.hint);
    } else {
      entry.isDelivered = true;
      if (entry.state === "acknowledged") {
        this.history.push(message);
      } else {
        // The package makes a message of the content; it is to be the one that was made before.
        const { causalHistory, lamportTimestamp, bloomFilter } = message;
        this.sds.pushOutgoingMessage(message.content, async (made) => {
          Object.assign(made, { causalHistory, lamportTimestamp, bloomFilter, repairRequest: [] });
          return Promise.resolve({ success: true, ...(entry.hint === undefined ? {} : { retrievalHint: entry.hint }) });
        });
      }
    }
    await this.sds.processTasks();
  }

  /** Have the package look again at what waits, and hand on what need not wait. */
  private async settleDown(): Promise<void> {
    await this.sds.processTasks();
    this.noteMissing(this.sds.sweepIncomingBuffer());
    this.releaseAll();
    this.options.onChange?.();
  }

  /** Hand on what waits for nothing, each after those that it follows. */
  private releaseAll(): void {
    let waiting = [...this.entries.values()].filter((each) => each.isDelivered && !each.isReleased);
    waiting.sort((one, other) => compare(keyOf(one), keyOf(other)));
    for (let before = -1; before !== waiting.length; ) {
      before = waiting.length;
      waiting = waiting.filter((entry) => {
        if (!entry.message.causalHistory.every(({ messageId }) => this.history.isSettled(messageId))) return true;
        this.release(entry);
        return false;
      });
    }
    this.prune();
  }

  private release(entry: Entry): void {
    entry.isReleased = true;
    this.history.release(entry.id);
    entry.payload = this.reassembly.take(entry.message.senderId, entry.message.content);
    if (entry.payload !== undefined && !this.isRestoring) this.options.onMessage?.(asMessage(entry));
  }

  private prune(): void {
    const over = this.entries.size - this.options.maxMessages;
    if (over <= this.options.maxMessages / 10) return;
    const ids = [...this.entries.values()].filter((each) => each.isReleased).slice(0, over).map((each) => each.id);
    for (const id of ids) {
      this.entries.delete(id);
      this.forgotten.add(id);
      this.history.settle(id);
    }
    this.keep(this.options.store.forget(ids));
  }

  // What is missing.

  private noteMissing(entries: readonly HistoryEntry[]): void {
    const now = new Map(entries.map((each) => [each.messageId, each.retrievalHint]));
    for (const id of this.missing.keys()) if (!now.has(id)) this.missing.delete(id);
    for (const [id, hint] of now) {
      if (this.missing.has(id) || this.missing.size >= MAX_MISSING) continue;
      this.missing.set(id, { hint, waited: 0 });
      this.looks = 0; // something new: begin with the nearest again
      this.lookAt = Math.min(this.lookAt, Date.now());
    }
  }

  /** Look for missing messages at the relay: by packet id where it can, then twice as far back each time. */
  private async look(): Promise<void> {
    const { topic } = this.options;
    const hints = [...this.missing.values()].flatMap(({ hint }) => (hint?.length === 32 ? [`0x${hex(hint)}`] : []));
    const byId = this.looks === 0 && hints.length > 0 && this.relay.announced?.extensions.has("packet_ids") === true;
    const cursor = this.places.at(-(2 ** (this.looks + 1)));
    const query: FetchOptions = byId
      ? { types: topic, packetIds: hints.slice(0, MAX_REPAIRS_AT_ONCE) }
      : { types: topic, ...(cursor === undefined ? {} : { cursor }) };
    this.looks = cursor === undefined && !byId ? 0 : this.looks + 1;
    const found = this.relay.fetch(query);
    for await (const delivery of this.whileOpen(found)) {
      await this.inTurn(async () => {
        if (await this.take(delivery, false)) this.counts.repaired++;
        await this.settleDown();
      });
      if (this.missing.size === 0) break;
    }
  }

  private startLooking(now: number): void {
    if (this.missing.size === 0 || this.isLooking || now < this.lookAt || this.relay.announced === undefined) return;
    this.isLooking = true;
    this.look()
      .catch((error: unknown) => console.warn("the relay's history cannot be read", error))
      .finally(() => {
        this.isLooking = false;
        this.lookAt = Date.now() + 500 * this.options.acknowledgeWithin * 2 ** this.looks;
      });
  }

  private giveUp(seconds: number): void {
    if (this.relay.announced === undefined) return; // waiting counts while one can look
    for (const [id, each] of this.missing) {
      each.waited += seconds;
      if (each.waited < this.options.giveUpAfter) continue;
      this.missing.delete(id);
      this.history.settle(id);
      this.counts.lost++;
    }
  }

  // Acknowledging, syncs and repairs.

  /** Somebody says what they have: what they have acknowledged need not be acknowledged by us. */
  private heard(message: Message): void {
    for (const { messageId } of message.causalHistory) this.toAcknowledge.delete(messageId);
  }

  private owe(message: ContentMessage): void {
    if (message.senderId === this.sender || this.isRestoring) return;
    if (this.toAcknowledge.size === 0) {
      this.syncAt = Math.min(this.syncAt, Date.now() + 1000 * this.options.acknowledgeWithin * (0.25 + 0.75 * Math.random()));
    }
    this.toAcknowledge.add(message.messageId);
  }

  private putOffSync(): void {
    if (this.toAcknowledge.size > 0) return;
    this.syncAt = Date.now() + 1000 * this.options.syncEvery * (0.5 + Math.random());
  }

  private async tick(): Promise<void> {
    const now = Date.now();
    const seconds = Math.min(60, (now - this.lastTick) / 1000); // a machine that slept has not looked
    this.lastTick = now;
    this.giveUp(seconds);
    await this.settleDown();
    this.startLooking(now);
    if (this.relay.announced === undefined) return;
    this.resend();
    await this.sds.sweepRepairIncomingBuffer((message) => this.repair(message));
    if (now >= this.syncAt) {
      this.toAcknowledge.clear();
      this.putOffSync();
      await this.sds.pushOutgoingSyncMessage(async (message) => {
        const expiresAt = Math.floor(now / 1000) + SYNC_EXPIRES_SECONDS;
        void this.publish(messageContent(this.options.topic, message.encode()), expiresAt);
        return Promise.resolve(true);
      });
    }
    await this.savePlaces();
  }

  /** Say again what somebody else has said and a third lacks: their packet where it can be had, for its signature. */
  private async repair(message: Message): Promise<boolean> {
    void (async () => {
      const entry = this.entries.get(message.messageId);
      if (entry === undefined) return;
      const again = messageContent(this.options.topic, entry.wire, !entry.isOwn);
      if (entry.isOwn || entry.hint === undefined) return this.publish(again);
      const found = this.relay.fetch({ types: this.options.topic, packetIds: `0x${hex(entry.hint)}`, limit: 1 });
      for await (const { packet } of found) {
        const isOriginal = readEnvelope(packet, this.options.topic)?.original === undefined && packet.content["again"] !== true;
        return this.publish(isOriginal ? repairContent(packet) : again);
      }
      return this.publish(again);
    })().catch((error: unknown) => console.warn("a message could not be repeated", error));
    return Promise.resolve(true);
  }

  // Small things.

  /** Publish what may be lost: who needs it asks again. */
  private async publish(content: JsonObject, expiresAt?: number): Promise<void> {
    try {
      const packet = await build(this.options.identity, content, expiresAt === undefined ? {} : { expiresAt });
      await this.relay.publish(packet, { timeout: 10, signal: this.closing.signal });
    } catch (error) {
      if (!this.closing.signal.aborted) console.debug("not sent", error);
    }
  }

  private entry(message: ContentMessage, kept: StoredMessage): Entry {
    return { ...kept, message, payload: undefined, isDelivered: false, isReleased: false, attempts: 0, resendAt: 0 };
  }

  private stateOf(id: string, state: MessageState): void {
    const entry = this.entries.get(id);
    if (entry === undefined || entry.state === state || entry.state === "acknowledged") return;
    entry.state = state;
    this.keep(this.options.store.setState(id, state));
    this.options.onChange?.();
  }

  private async savePlaces(): Promise<void> {
    if (!this.placesChanged) return;
    this.placesChanged = false;
    await this.options.store.setPlaces(this.places);
  }

  /** A change that is made again after a reload if it is lost: a state, a forgotten message. */
  private keep(change: Promise<void>): void {
    change.catch((error: unknown) => console.warn("the channel's store cannot be written", error));
  }

  private inTurn<T>(act: () => Promise<T>): Promise<T> {
    const done = this.turn.then(act);
    this.turn = done.catch(() => undefined);
    return done;
  }

  private requireOpen(): void {
    if (this.closing.signal.aborted) throw new Closed("the channel was closed");
  }
}

/**
 * Open a channel over a relay, and read what was said.
 *
 * Resolves once what the store has is back in `messages`; with a store that another page uses it waits for that page,
 * until `signal` aborts. Rejects with what the store rejects with, and `RangeError` for options that cannot work.
 */
export async function openChannel(relay: ChannelRelay, options: ChannelOptions, signal?: AbortSignal): Promise<ReliableChannel> {
  const whole = {
    store: memoryChannelStore(),
    resendAfter: 10,
    acknowledgeWithin: 2,
    syncEvery: 30,
    giveUpAfter: 600,
    maxMessages: 2_000,
    ...options,
  };
  for (const name of ["resendAfter", "acknowledgeWithin", "syncEvery", "giveUpAfter", "maxMessages"] as const) {
    if (!(whole[name] > 0)) throw new RangeError(`${name} must be above 0`);
  }
  const kept = await whole.store.open(signal ?? new AbortController().signal);
  const channel = new ReliableChannel(relay, whole, kept);
  await channel.start(kept.messages);
  return channel;
}

function keyOf({ id, message }: Entry): { lamport: bigint; id: string } {
  return { lamport: message.lamportTimestamp, id };
}

function asMessage(entry: Entry): ChannelMessage {
  const { id, author, sentAt, isOwn, state, message, payload } = entry;
  const follows = message.causalHistory.map(({ messageId }) => messageId);
  const said = { id, author, sentAt, isOwn, state, follows, sender: message.senderId, lamport: message.lamportTimestamp };
  return { ...said, payload: payload ?? new Uint8Array() };
}

function stored({ id, wire, isOwn, author, sentAt, hint, state }: Entry): StoredMessage {
  return { id, wire, isOwn, author, sentAt, hint, state };
}

function pause(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
