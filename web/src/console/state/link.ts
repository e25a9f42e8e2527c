// The one WebSocket of the page: it stays connected, and its subscriptions go on where they stood.
//
// A gapless subscription is asked for again by the cursor of the last event that its page has taken, so a relay
// that is killed and comes back costs a moment and no packet.

import { batch, signal } from "@preact/signals";

import { Refusals } from "../../client/relays/backoff.js";
import { type Message, openingUrl, readMessage } from "./messages.js";
import { manifest } from "./relay.js";

/** What the connection is doing. `draining`: the relay said that it goes away. */
export type Phase = "connecting" | "online" | "offline" | "draining";

export interface Filters {
  readonly authors?: readonly string[];
  readonly types?: readonly string[];
  readonly packet_ids?: readonly string[];
  readonly since?: number;
  readonly until?: number;
  readonly received_since?: number;
  readonly received_until?: number;
  readonly limit?: number;
  readonly order?: "asc" | "desc";
  readonly cursor?: string;
}

export interface Event {
  /** The packet as the relay sent it, and decoded. */
  readonly text: string;
  readonly packet: Readonly<Record<string, unknown>>;
  readonly received_at: number;
  readonly cursor?: string | undefined;
  readonly relay_annotations?: Readonly<Record<string, unknown>> | undefined;
}

export interface Refusal {
  readonly code: string;
  readonly reason: string;
  readonly detail?: string | undefined;
  readonly cursor?: string | undefined;
}

export interface Taker {
  event(event: Event): void;
  /** All stored packets that were asked for have come. */
  end?(complete: boolean, cursor: string | null): void;
  refused?(refusal: Refusal): void;
  /** The connection was lost: what has come comes again, but for what goes on by cursor. */
  again?(): void;
}

export class RequestFailed extends Error {
  constructor(
    readonly code: string,
    readonly reason: string,
    readonly detail?: string,
    readonly retryAfter?: number,
  ) {
    super(reason);
  }
}

interface Open {
  readonly id: string;
  filters: Filters;
  readonly gapless: boolean;
  readonly taker: Taker;
  /** That it was refused since anything came for it, and when it is asked for again. */
  readonly refusals: Refusals;
  due?: ReturnType<typeof setTimeout>;
}

interface Asked {
  resolve(message: Message): void;
  reject(error: Error): void;
}

const SHORTEST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;
/** A connection that lived this long has earned a fresh start of the pauses. */
const STABLE = 10_000;
/** How long a relay may take for the first word; browsers wait for minutes, and nobody else has a turn meanwhile. */
const HANDSHAKE = 10_000;
const GOODBYES = [1001, 1012];
const ANSWER_TIMEOUT = 15_000;
/** How long a relay may be silent before it is asked something, and how long that answer may take. */
const SILENCE = 30_000;
const PATIENCE = 15_000;
const BEAT = 20_000;

export const phase = signal<Phase>("connecting");
/** When the relay was last heard, in milliseconds; 0 for never. */
export const heardAt = signal(0);
/** Until when the relay wants to hear no SUBSCRIBE, in milliseconds. */
export const limitedUntil = signal(0);
/** Why the relay does not send what is read on and on; it is asked again. */
export const refused = signal<Pick<Refusal, "code" | "reason"> | null>(null);
/** The relay wants this session to authenticate before it reads. */
export const wantsAuth = signal(false);
/** What the relay last sent to be signed. */
export const challenge = signal<Message | null>(null);
/** How often there was a connection; pages that must begin anew look at it. */
export const connections = signal(0);

let socket: WebSocket | null = null;
let pause = SHORTEST_PAUSE;
let openedAt = NaN;
/** When the next attempt begins, or the one that is made has taken too long. */
let retry: ReturnType<typeof setTimeout> | undefined;
let numbers = 0;
let challengedAt: { at: number; expiresAt: number } | null = null;
const subscriptions = new Map<string, Open>();
const requests = new Map<string, Asked>();
const waiting = new Set<string>();

/**
 * The second that it is by the relay's clock, which is the one that packets are dated by. A challenge says it: it
 * expires its lifetime after it was made. Until there was one, the browser's clock has to do.
 */
export function relayNow(): number {
  const lifetime = Math.min(manifest.peek()?.auth.challenge_lifetime_seconds ?? 0, 600);
  if (challengedAt === null || lifetime === 0) return Math.floor(Date.now() / 1000);
  // By the clock that nobody sets: the relay's has not jumped with the one on the wall.
  return Math.floor(challengedAt.expiresAt - lifetime + performance.now() / 1000 - challengedAt.at);
}

/** Connect, and stay connected. */
export function begin(): void {
  open();
  addEventListener("online", () => void (phase.value !== "online" && hurry()));
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && phase.value !== "online") hurry();
  });
  setInterval(listen, BEAT);
}

/** A browser says nothing when its relay is gone without a word: after a silence, ask; without an answer, connect anew. */
function listen(): void {
  const last = heardAt.value;
  // A clock that was set is no silence, but worth a question. Who may not read awaits nothing.
  if (phase.value !== "online" || wantsAuth.value || Math.abs(Date.now() - last) < SILENCE) return;
  const over = new AbortController();
  page({ types: ["-"], limit: 1 }, over.signal).catch(() => undefined);
  setTimeout(() => {
    over.abort();
    if (phase.value === "online" && heardAt.value === last) reconnect();
  }, PATIENCE);
}

/** Try now rather than later. */
export function hurry(): void {
  if (socket !== null && socket.readyState <= WebSocket.OPEN) return;
  pause = SHORTEST_PAUSE;
  open();
}

/** Begin anew on another connection: a session speaks for one identity. */
export function reconnect(): void {
  socket?.close();
  socket = null;
  forgetRequests();
  hurry();
}

function open(): void {
  clearTimeout(retry);
  const opened = new WebSocket(openingUrl());
  socket = opened;
  retry = setTimeout(() => {
    if (socket !== opened) return;
    opened.close();
    ended(1006);
  }, HANDSHAKE);
  openedAt = NaN;
  challenge.value = null;
  if (phase.value !== "draining") phase.value = heardAt.value ? "offline" : "connecting";
  opened.onopen = () => {
    if (socket !== opened) return;
    clearTimeout(retry);
    openedAt = performance.now();
    batch(() => {
      phase.value = "online";
      heardAt.value = Date.now();
      connections.value += 1;
      wantsAuth.value = false;
    });
    for (const each of subscriptions.values()) ask(each);
  };
  opened.onmessage = ({ data }) => typeof data === "string" && socket === opened && received(data);
  opened.onclose = ({ code }) => {
    if (socket === opened) ended(code);
  };
}

function ended(code: number): void {
  clearTimeout(retry);
  socket = null;
  const isGoodbye = GOODBYES.includes(code);
  if (performance.now() - openedAt >= (isGoodbye ? SHORTEST_PAUSE : STABLE)) pause = SHORTEST_PAUSE;
  batch(() => {
    phase.value = isGoodbye ? "draining" : heardAt.value ? "offline" : "connecting";
    challenge.value = null;
  });
  forgetRequests();
  retry = setTimeout(open, pause * (0.5 + Math.random()));
  pause = Math.min(2 * pause, LONGEST_PAUSE);
  if (phase.value === "connecting" && pause > 2 * SHORTEST_PAUSE) phase.value = "offline";
}

function forgetRequests(): void {
  for (const each of requests.values()) each.reject(new RequestFailed("lost", "the connection was lost before the answer came"));
  requests.clear();
  for (const { gapless, filters, taker } of subscriptions.values()) if (!gapless || !filters.cursor) taker.again?.();
}

function received(text: string): void {
  const message = readMessage(text);
  if (message === null) return;
  const now = Date.now();
  if (Math.abs(now - heardAt.peek()) > 1000) heardAt.value = now;
  const subscription = subscriptions.get(message.subscription_id ?? "");
  if (subscription !== undefined && message.type !== "ERROR") granted(subscription);
  switch (message.type) {
    case "EVENT":
      if (subscription === undefined || message.packet === undefined) return;
      if (subscription.gapless && message.cursor) subscription.filters = { ...onward(subscription), cursor: message.cursor };
      subscription.taker.event(message as Event);
      return;
    case "END_OF_HISTORY":
      subscription?.taker.end?.(message.complete ?? true, message.cursor ?? null);
      return;
    case "AUTH_CHALLENGE":
      challenge.value = message;
      if (message.expires_at !== undefined) challengedAt = { at: performance.now() / 1000, expiresAt: message.expires_at };
      return;
    case "ERROR":
      if (subscription !== undefined) refusedSubscription(subscription, message);
      settle(message);
      return;
    default:
      settle(message);
  }
}

/** A cursor says where to go on; the times of receipt that the first request began with say nothing more. */
function onward({ filters }: Open): Filters {
  const { received_since: _, ...rest } = filters;
  return rest;
}

function settle(message: Message): void {
  const id = message.client_msg_id ?? "";
  const asked = requests.get(id);
  if (asked === undefined) return;
  requests.delete(id);
  if (message.type === "ERROR") asked.reject(new RequestFailed(message.code ?? "", message.reason ?? "", message.detail, message.retry_after));
  else asked.resolve(message);
}

/** The relay sends it: whatever it said against that is over. */
function granted(subscription: Open): void {
  if (subscription.gapless) refused.value = null;
  subscription.refusals.over();
}

function refusedSubscription(subscription: Open, error: Message): void {
  const isLimit = error.code === "rate_limited";
  if (error.code === "unauthenticated") {
    waiting.add(subscription.id);
    wantsAuth.value = true;
    return;
  }
  // For what goes on nobody else would ask again, whatever the code is; only its taker knows another place to begin.
  if (isLimit || (subscription.gapless && error.code !== "invalid_cursor")) {
    const wait = 1000 * subscription.refusals.another(error.retry_after);
    if (isLimit) limitedUntil.value = Date.now() + wait;
    else refused.value = { code: error.code ?? "", reason: error.reason ?? "" };
    waiting.add(subscription.id);
    clearTimeout(subscription.due);
    subscription.due = setTimeout(ask, wait, subscription);
    return;
  }
  subscriptions.delete(subscription.id);
  subscription.taker.refused?.({
    code: error.code ?? "",
    reason: error.reason ?? "",
    detail: error.detail,
    cursor: error.cursor,
  });
}

function send(message: object | string): boolean {
  if (socket?.readyState !== WebSocket.OPEN) return false;
  socket.send(typeof message === "string" ? message : JSON.stringify(message));
  return true;
}

function ask({ id, filters, gapless, due }: Open): void {
  clearTimeout(due);
  waiting.delete(id);
  send({ type: "SUBSCRIBE", subscription_id: id, filters, history_marker: true, ...(gapless && { gapless }) });
}

/** The session has authenticated: ask again for what it was refused. */
export function authenticated(): void {
  wantsAuth.value = false;
  for (const id of [...waiting]) {
    const each = subscriptions.get(id);
    if (each !== undefined) ask(each);
  }
}

/** Ask for packets; the returned function ends it. */
export function subscribe(filters: Filters, taker: Taker, { gapless = false } = {}): () => void {
  const subscription: Open = { id: `console-${++numbers}`, filters, gapless, taker, refusals: new Refusals(Math.random) };
  subscriptions.set(subscription.id, subscription);
  ask(subscription);
  return () => {
    waiting.delete(subscription.id);
    clearTimeout(subscription.due);
    granted(subscription);
    if (subscriptions.delete(subscription.id)) send({ type: "UNSUBSCRIBE", subscription_id: subscription.id });
  };
}

/** Send a message that has one answer. Throws `RequestFailed` for ERROR, a lost connection, and silence. */
export function request(message: object | ((id: string) => string)): Promise<Message> {
  const id = `console-${++numbers}`;
  return new Promise((resolve, reject) => {
    requests.set(id, { resolve, reject });
    setTimeout(() => {
      if (requests.delete(id)) reject(new RequestFailed("timeout", "the relay did not answer in time"));
    }, ANSWER_TIMEOUT);
    const isSent = send(typeof message === "function" ? message(id) : { ...message, client_msg_id: id });
    if (!isSent && requests.delete(id)) reject(new RequestFailed("offline", "there is no connection to the relay"));
  });
}

/** Stored packets, one page of them, newest first unless asked otherwise. Nobody waits for them once `over` has aborted. */
export function page(filters: Filters, over?: AbortSignal): Promise<{ events: Event[]; complete: boolean; cursor: string | null }> {
  const events: Event[] = [];
  return new Promise((resolve, reject) => {
    const close = subscribe({ order: "desc", ...filters }, {
      event: (event) => events.push(event),
      again: () => events.splice(0),
      end: (complete, cursor) => {
        close();
        resolve({ events, complete, cursor });
      },
      refused: ({ code, reason, detail }) => reject(new RequestFailed(code, reason, detail)),
    });
    over?.addEventListener("abort", () => {
      close();
      reject(over.reason);
    });
  });
}

/** The packet with this id, and none that a relay may give in its place. */
export async function packetById(id: string, over?: AbortSignal): Promise<Event | undefined> {
  const { events } = await page({ packet_ids: [id], limit: 1 }, over);
  return events.find(({ packet }) => packet["packet_id"] === id);
}
