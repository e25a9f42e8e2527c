/**
 * A reliable channel: `@waku/sds` over a relay.
 *
 * The package decides which messages a message names, which are acknowledged, which are missing, and who repairs them.
 * It has no transport, no clock and no store, and if several messages are missing it delivers messages before those
 * that they follow. This module adds packets over a relay, the waits, what survives a reload, and the order.
 */

import {
  type ContentMessage,
  isContentMessage,
  isSyncMessage,
  type Message,
  MessageChannel,
  MessageChannelEvent,
} from "@waku/sds";

import { build, verify } from "../building.js";
import { fromHex, hex } from "../protocol/bytes.js";
import { Closed, ConnectionFailed, RequestRefused } from "../protocol/errors.js";
import type { JsonObject } from "../protocol/json.js";
import type { Packet } from "../protocol/packets.js";
import type { Delivery, FetchOptions } from "../relays/values.js";
import { Acknowledging } from "./acknowledging.js";
import { asMessage, asNextOwn, beyond, type Entry, inOrder, makeEntry, standing, stored } from "./entry.js";
import { credible, decodeMessage, dismissal, messageContent, readEnvelope, readMessage, repairContent, timeOfSending } from "./envelope.js";
import { Forgotten } from "./forgotten.js";
import { History } from "./history.js";
import { Search, withPlace } from "./search.js";
import { encodeSegment, Reassembly } from "./segments.js";
import { Telling } from "./telling.js";
import { Attempts, clock, isIrrecoverable, isOfWrongTime, pause, until } from "./waiting.js";
import type { Kept, MessageState, StoredMessage } from "./store.js";
import { type ChannelMessage, type ChannelOptions, type ChannelRelay, type ChannelStatus, MAX_PAYLOAD_BYTES } from "./values.js";

const MAX_KEPT_BYTES = 64 << 20;
const MAX_HELD_BACK = 1_000;
const SYNC_EXPIRES_SECONDS = 3_600;
const TICK_MS = 1_000;
const PAUSE_MS = 2_500;
const NAMED = 10; // how many messages each message names; one of them is enough to find the others

/** One participant's part in an open channel, made by `openChannel`. */
export class ReliableChannel {
  /** This participant's sender id. */
  readonly sender: string;
  private readonly sds: MessageChannel;
  private readonly history: History;
  private readonly entries = new Map<string, Entry>();
  private readonly first = new Map<string, Packet>(); // packets of own messages that no relay has yet
  private readonly forgotten: Forgotten;
  private readonly reassembly = new Reassembly();
  private readonly search: Search;
  private readonly looking = new Attempts();
  private readonly closing = new AbortController();
  private readonly counts = { repeated: 0, refused: 0, resent: 0, repaired: 0, refusedOld: 0 };
  private readonly acknowledging: Acknowledging;
  private readonly telling: Telling;
  private places: string[];
  private placesChanged = false;
  private bytes = 0;
  private isTicking = false;
  private lastTick = clock();
  private turn: Promise<unknown> = Promise.resolve();
  private timer: ReturnType<typeof setInterval> | undefined;

  /** @internal */
  constructor(
    private readonly relay: ChannelRelay,
    private readonly options: Required<Omit<ChannelOptions, "onMessage" | "onChange">> & ChannelOptions,
    kept: Omit<Kept, "messages">,
  ) {
    this.sender = `${options.identity.did}#${kept.device}`;
    this.places = [...kept.places];
    this.forgotten = new Forgotten(kept);
    this.history = new History(options.maxMessages);
    this.search = new Search(options.topic, options.giveUpAfter, 500 * options.acknowledgeWithin);
    for (const id of [...kept.forgotten, ...kept.givenUp]) this.history.settle(id);
    this.telling = new Telling(options);
    this.acknowledging = new Acknowledging(1000 * options.acknowledgeWithin, 1000 * options.syncEvery, Math.random);
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

  /** The messages of the channel, in the order that all participants share. */
  get messages(): readonly ChannelMessage[] {
    const released = [...this.entries.values()].filter((each) => each.isReleased && each.payload !== undefined);
    return released.sort(inOrder).map(asMessage);
  }

  /** Counts that describe the state of the channel. */
  get status(): ChannelStatus {
    return { ...this.counts, ...standing(this.entries.values()), lost: this.search.lost, missing: this.search.size };
  }

  /**
   * Give a message to the channel; resolves with its id once it is stored. From then on it is sent until a relay has
   * it, and sent again until another participant acknowledges it, even after a reload.
   *
   * Rejects with `RangeError` for an empty payload or one over `MAX_PAYLOAD_BYTES`, `Closed`, and what the store or the
   * signer rejects with; nothing is sent then.
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
          this.history.settle(message.messageId);
          this.sds.pushIncomingMessage(dismissal(message), undefined);
          return { success: false };
        }
      });
      await this.sds.processTasks();
      if (typeof outcome !== "string") throw outcome as Error;
      this.acknowledging.said(clock()); // the message acknowledges, as a sync would
      this.releaseAll();
      return outcome;
    });
  }

  /** Close the channel. Messages that are not out yet stay in the store. Idempotent. */
  async close(): Promise<void> {
    if (this.closing.signal.aborted) return;
    this.closing.abort();
    clearInterval(this.timer);
    await this.turn;
    try {
      await this.savePlaces();
    } finally {
      this.options.store.close();
    }
  }

  /** @internal Restore the stored messages, and begin. */
  async start(messages: readonly StoredMessage[]): Promise<void> {
    for (const each of messages) await this.restore(each);
    await this.settleDown();
    this.telling.isOn = true;
    this.acknowledging.said(clock());
    void this.read();
    for (const entry of this.entries.values()) if (entry.state === "sending") void this.deliver(entry);
    // Short enough for every wait that can be configured.
    const everyMs = Math.min(TICK_MS, 250 * this.options.acknowledgeWithin);
    this.timer = setInterval(() => {
      if (this.isTicking) return;
      this.isTicking = true;
      this.keep(this.inTurn(() => this.tick()).finally(() => (this.isTicking = false)));
    }, everyMs);
  }

  // Own messages.

  private async keepOwn(message: ContentMessage): Promise<Entry> {
    asNextOwn(message, this.entries, Date.now());
    const wire = message.encode();
    const packet = await build(this.options.identity, messageContent(this.options.topic, wire));
    const entry = makeEntry(message, {
      id: message.messageId,
      wire,
      isOwn: true,
      author: this.options.identity.did,
      sentAt: packet.timestamp,
      hint: fromHex(packet.packetId.slice(2)),
      state: "sending",
    });
    await this.options.store.add(stored(entry));
    this.remember(entry);
    this.first.set(entry.id, packet);
    entry.isDelivered = true;
    return entry;
  }

  /** Publish an own message until the relay has it, or refuses it permanently. */
  private async deliver(entry: Entry): Promise<void> {
    const attempts = new Attempts();
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
        const isFinal = isIrrecoverable(error);
        if (isFinal || isOfWrongTime(error)) this.first.delete(entry.id); // the next packet gets a new timestamp
        if (isFinal) return this.stateOf(entry.id, "failed");
        await pause(attempts.retryIn(error), this.closing.signal);
      }
    }
  }

  private planResend(entry: Entry): void {
    entry.resendAt = clock() + 1000 * this.options.resendAfter * 2 ** Math.min(entry.attempts, 4) * (0.75 + Math.random() / 2);
  }

  private resend(now: number): void {
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
    const attempts = new Attempts();
    while (!this.closing.signal.aborted) {
      let failure: unknown;
      const place = this.places.at(-1);
      try {
        const found = this.relay.subscribe({ types: this.options.topic, cursor: place });
        for await (const delivery of until(this.closing.signal, found)) {
          const before = this.places;
          await this.inTurn(async () => {
            await this.take(delivery, true, place !== undefined || delivery.live === true);
            await this.settleDown();
          }).catch((error: unknown) => {
            this.places = before; // the message was not stored: read it again
            throw error;
          });
          attempts.granted();
        }
      } catch (error) {
        if (error instanceof Closed || error instanceof ConnectionFailed) return;
        // The places belong to a log that the relay no longer has. Messages that are here are known by their ids.
        if (error instanceof RequestRefused && error.code === "invalid_cursor") this.places = [];
        console.warn("the channel cannot be read", error);
        failure = error;
      }
      await pause(attempts.retryIn(failure), this.closing.signal);
    }
  }

  /** Take a packet, which is `isNew` unless it may have been read before; true if it brought a message that was not here. */
  private async take({ packet, cursor }: Delivery, moves: boolean, isNew: boolean): Promise<boolean> {
    if (moves && cursor !== undefined) {
      this.places = withPlace(this.places, cursor);
      this.placesChanged = true;
    }
    const now = clock();
    const envelope = readEnvelope(packet, this.options.topic);
    const message = envelope === undefined ? undefined : readMessage(envelope.wire);
    if (envelope === undefined || message === undefined) return this.refuse();
    if (message.channelId !== this.options.id) return false;
    const hint = fromHex(packet.packetId.slice(2));
    if (!isContentMessage(message)) {
      if (isSyncMessage(message) && message.senderId !== this.sender) {
        this.sds.pushIncomingMessage(message, hint);
        this.acknowledging.heard(message, now);
      }
      return false;
    }
    const known = this.entries.get(message.messageId);
    if (known !== undefined || this.forgotten.has(message)) {
      if (known === undefined) this.history.settle(message.messageId); // so that nothing waits for it
      if (message.senderId === this.sender) return false;
      const isAwaited = isNew || this.search.wants(message.messageId);
      if (known === undefined && isAwaited && this.forgotten.noteDoubtful(message)) this.counts.refusedOld++;
      else this.counts.repeated++;
      // Its sender has not heard an acknowledgement: acknowledge again.
      if (known?.isReleased === true) this.acknowledging.owe(message, now);
      return false;
    }
    if (this.status.heldBack >= MAX_HELD_BACK && !this.search.wants(message.messageId)) return this.refuse();
    if (envelope.original !== undefined && !(await this.isGenuine(envelope.original))) return this.refuse();
    const isOwn = message.senderId === this.sender;
    if (isOwn && envelope.author !== this.options.identity.did) return this.refuse(); // another author used our name
    const entry = makeEntry(message, {
      id: message.messageId,
      wire: envelope.wire,
      isOwn,
      author: envelope.author,
      sentAt: timeOfSending(envelope.sentAt, Date.now()),
      hint,
      state: isOwn ? "sent" : "received",
    });
    await this.options.store.add(stored(entry), this.places);
    this.placesChanged = false;
    await this.learn(entry);
    if (!entry.isOwn) {
      this.acknowledging.heard(message, now);
      this.acknowledging.owe(message, now);
    }
    return true;
  }

  private async isGenuine(original: Packet): Promise<boolean> {
    try {
      await verify(original, { keys: await this.relay.keyChain(original.authorId) });
      return true;
    } catch {
      return false; // participants that lack the message will request it again
    }
  }

  private refuse(): false {
    this.counts.refused++;
    return false;
  }

  /** Read the relay's history for missing messages. */
  private async look(query: FetchOptions): Promise<void> {
    let wait = 0;
    try {
      for await (const delivery of until(this.closing.signal, this.relay.fetch(query))) {
        await this.inTurn(async () => {
          if (await this.take(delivery, false, false)) this.counts.repaired++;
          await this.settleDown();
        });
        if (this.search.size === 0) break;
      }
      this.looking.granted();
    } catch (error) {
      wait = 1000 * this.looking.retryIn(error);
      if (!this.closing.signal.aborted) console.warn("the relay's history cannot be read", error);
    }
    this.search.ended(clock(), wait);
  }

  /** Pass a stored message to the package. */
  private async restore(kept: StoredMessage): Promise<void> {
    const message = decodeMessage(kept.wire);
    if (message === undefined || !isContentMessage(message)) return;
    await this.learn(makeEntry(message, { ...kept }));
  }

  private async learn(entry: Entry): Promise<void> {
    const message = credible(entry.message, Date.now());
    this.remember(entry);
    if (entry.hint !== undefined) message.retrievalHint = entry.hint;
    if (!entry.isOwn) {
      this.sds.pushIncomingMessage(message, entry.hint);
    } else {
      entry.isDelivered = true;
      if (entry.state === "acknowledged") {
        this.history.push(message);
      } else {
        // The package makes a message from the content; it must equal the one that was made before.
        const { causalHistory, lamportTimestamp, bloomFilter } = message;
        this.sds.pushOutgoingMessage(message.content, async (made) => {
          Object.assign(made, { causalHistory, lamportTimestamp, bloomFilter, repairRequest: [] });
          return Promise.resolve({ success: true, ...(entry.hint === undefined ? {} : { retrievalHint: entry.hint }) });
        });
      }
    }
    await this.sds.processTasks();
  }

  /** Have the package look again at the messages that wait, and release those that need not wait. */
  private async settleDown(): Promise<void> {
    await this.sds.processTasks();
    this.search.note(this.sds.sweepIncomingBuffer(), clock());
    this.releaseAll();
    this.telling.changed();
  }

  /** Release the messages that wait for nothing, each after those that it follows. */
  private releaseAll(): void {
    let waiting = [...this.entries.values()].filter((each) => each.isDelivered && !each.isReleased);
    waiting.sort(inOrder);
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
    if (entry.state === "failed") this.history.withdraw(entry.id);
    else this.history.release(entry.id);
    entry.payload = this.reassembly.take(entry.message.senderId, entry.message.content);
    if (entry.payload !== undefined) this.telling.message(asMessage(entry));
  }

  /** Forget the oldest messages, once there are too many or they are too large. */
  private prune(): void {
    const { maxMessages } = this.options;
    if (this.entries.size <= 1.1 * maxMessages && this.bytes <= MAX_KEPT_BYTES) return;
    const oldest = beyond(this.entries.values(), maxMessages, MAX_KEPT_BYTES);
    if (oldest.length === 0) return;
    this.forgotten.add(oldest.map(({ message }) => message), Date.now());
    for (const { id, wire } of oldest) {
      this.bytes -= wire.length;
      this.entries.delete(id);
      this.history.settle(id);
    }
    this.keep(this.options.store.forget(oldest.map(({ id }) => id), this.forgotten.horizon));
  }

  // Acknowledging, syncs and repairs.

  private async tick(): Promise<void> {
    if (this.closing.signal.aborted) return;
    const now = clock();
    const passed = now - this.lastTick;
    const seconds = Math.min(60, passed / 1000); // a machine that slept did not search meanwhile
    // Nor did it hear acknowledgements: they may be waiting. In a hidden tab all ticks may come late.
    if (passed > PAUSE_MS) for (const entry of this.entries.values()) entry.resendAt += passed - TICK_MS;
    this.lastTick = now;
    // Only time in which the channel could search counts.
    const gone = this.relay.announced === undefined ? [] : this.search.givenUp(seconds);
    for (const id of gone) this.history.settle(id);
    if (gone.length > 0) await this.options.store.giveUp(gone);
    await this.settleDown();
    const query = this.search.begin(now, this.places, this.relay.announced);
    if (query !== undefined) void this.look(query);
    if (this.relay.announced === undefined) return;
    this.resend(now);
    await this.sds.sweepRepairIncomingBuffer((message) => this.repair(message));
    if (now >= this.acknowledging.syncAt) {
      this.acknowledging.said(now);
      await this.sds.pushOutgoingSyncMessage(async (message) => {
        const expiresAt = Math.floor(Date.now() / 1000) + SYNC_EXPIRES_SECONDS;
        void this.publish(messageContent(this.options.topic, message.encode()), expiresAt);
        return Promise.resolve(true);
      });
    }
    await this.savePlaces();
  }

  /** Send a message again that another participant lacks: if possible in its author's packet, for the signature. */
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

  /** Publish a packet that may be lost: a participant that needs it asks again. */
  private async publish(content: JsonObject, expiresAt?: number): Promise<void> {
    try {
      const packet = await build(this.options.identity, content, expiresAt === undefined ? {} : { expiresAt });
      await this.relay.publish(packet, { timeout: 10, signal: this.closing.signal });
    } catch (error) {
      if (!this.closing.signal.aborted) console.debug("not sent", error);
    }
  }

  private remember(entry: Entry): void {
    this.entries.set(entry.id, entry);
    this.bytes += entry.wire.length;
  }

  private stateOf(id: string, state: MessageState): void {
    const entry = this.entries.get(id);
    if (entry === undefined || entry.state === state || entry.state === "acknowledged") return;
    entry.state = state;
    if (state === "failed") this.history.withdraw(id);
    this.keep(this.options.store.setState(id, state));
    this.telling.changed();
  }

  private async savePlaces(): Promise<void> {
    if (!this.placesChanged) return;
    this.placesChanged = false;
    await this.options.store.setPlaces(this.places);
  }

  /** Store a change that may be lost, because it is made again after a reload: a state, a forgotten message. */
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
