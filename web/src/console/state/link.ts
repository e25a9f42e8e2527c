// The page's only WebSocket: it stays connected, and its subscriptions resume where they stopped.
//
// A gapless subscription is requested again with the cursor of the last event that its page has taken, so no packet is
// lost if a relay is killed and comes back.

import { batch, signal } from "@preact/signals";

import { Refusals } from "../../client/relays/backoff.js";
import { type Message, openingUrl, readMessage } from "./messages.js";
import { manifest } from "./relay.js";

/** The state of the connection. `draining`: the relay said that it is going away. */
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
  /** The packet as the relay sent it; `packet` is the same, decoded. */
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
  /** All stored packets that were requested have arrived. */
  end?(complete: boolean, cursor: string | null): void;
  refused?(refusal: Refusal): void;
  /** The connection was lost, and all events will come again. Not called if the subscription resumes by cursor. */
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
  /** The refusals since the last message for this subscription. */
  readonly refusals: Refusals;
  due?: ReturnType<typeof setTimeout>;
  /** Whether `limitedUntil` is about this subscription. */
  isLimited?: boolean;
}

interface Asked {
  resolve(message: Message): void;
  reject(error: Error): void;
}

const SHORTEST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;
/** A connection that lasted this long resets the pauses. */
const STABLE = 10_000;
/** How long an attempt to connect may take; browsers wait for minutes, during which there is no other attempt. */
const HANDSHAKE = 10_000;
const GOODBYES = [1001, 1012];
const ANSWER_TIMEOUT = 15_000;
/** How long a relay may be silent before it is probed, and how long the answer may take. */
const SILENCE = 30_000;
const PATIENCE = 15_000;
const BEAT = 20_000;

export const phase = signal<Phase>("connecting");
/** When the relay was last heard, in Unix milliseconds; 0 for never. */
export const heardAt = signal(0);
/** Until when the relay accepts no SUBSCRIBE, in Unix milliseconds. */
export const limitedUntil = signal(0);
/** Why the relay refuses the live feed; it is requested again. */
export const refused = signal<Pick<Refusal, "code" | "reason"> | null>(null);
/** Whether the relay requires this session to authenticate before it reads. */
export const wantsAuth = signal(false);
/** The relay's latest challenge. */
export const challenge = signal<Message | null>(null);
/** How many connections there have been; pages that must start again on a new one watch it. */
export const connections = signal(0);

let socket: WebSocket | null = null;
let pause = SHORTEST_PAUSE;
let openedAt = NaN;
/** The timer that begins the next attempt to connect, or ends one that takes too long. */
let retry: ReturnType<typeof setTimeout> | undefined;
let numbers = 0;
let challengedAt: { at: number; expiresAt: number } | null = null;
const subscriptions = new Map<string, Open>();
const requests = new Map<string, Asked>();
const waiting = new Set<string>();

/**
 * The current time by the relay's clock, which dates packets, in Unix seconds. It follows from a challenge, which
 * expires one lifetime after it was made. Until there is a challenge, the browser's clock is used.
 */
export function relayNow(): number {
  const lifetime = Math.min(manifest.peek()?.auth.challenge_lifetime_seconds ?? 0, 600);
  if (challengedAt === null || lifetime === 0) return Math.floor(Date.now() / 1000);
  // By a steady clock: if the browser's wall clock was set, the relay's clock did not jump with it.
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

/** Probe a silent relay, and reconnect if it does not answer: a browser does not report a peer that has disappeared. */
function listen(): void {
  const last = heardAt.value;
  // If the clock was set, there may have been no silence, but a probe is harmless. A session that may not read is
  // waiting for nothing.
  if (phase.value !== "online" || wantsAuth.value || Math.abs(Date.now() - last) < SILENCE) return;
  const over = new AbortController();
  page({ types: ["-"], limit: 1 }, over.signal).catch(() => undefined);
  setTimeout(() => {
    over.abort();
    if (phase.value === "online" && heardAt.value === last) reconnect();
  }, PATIENCE);
}

/** Try to connect now rather than later. */
export function hurry(): void {
  if (socket !== null && socket.readyState <= WebSocket.OPEN) return;
  pause = SHORTEST_PAUSE;
  open();
}

/** Start again on a new connection: a session has only one identity. */
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

/** The filters to resume with: without `received_since`, because the cursor says where to continue. */
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

/** Note that the relay serves this subscription: earlier refusals no longer count. */
function granted(subscription: Open): void {
  if (subscription.gapless) refused.value = null;
  if (subscription.isLimited === true) limitedUntil.value = 0;
  subscription.isLimited = false;
  subscription.refusals.over();
}

function refusedSubscription(subscription: Open, error: Message): void {
  const isLimit = error.code === "rate_limited";
  if (error.code === "unauthenticated") {
    waiting.add(subscription.id);
    wantsAuth.value = true;
    return;
  }
  // Nothing else would request a gapless subscription again, whatever the code is. But after `invalid_cursor`, only its
  // taker knows where to start again.
  if (isLimit || (subscription.gapless && error.code !== "invalid_cursor")) {
    const wait = 1000 * subscription.refusals.another(error.retry_after);
    subscription.isLimited = isLimit;
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

/** Note that the session is authenticated: request again what was refused. */
export function authenticated(): void {
  wantsAuth.value = false;
  for (const id of [...waiting]) {
    const each = subscriptions.get(id);
    if (each !== undefined) ask(each);
  }
}

/** Open a subscription; the returned function ends it. */
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

/** Send a message that has one answer. Rejects with `RequestFailed` for ERROR, a lost connection, and silence. */
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

/** Read one page of stored packets, by default newest first. Rejects once `over` has aborted; then nothing is asked. */
export function page(filters: Filters, over?: AbortSignal): Promise<{ events: Event[]; complete: boolean; cursor: string | null }> {
  const events: Event[] = [];
  return new Promise((resolve, reject) => {
    if (over?.aborted) return reject(over.reason);
    const leave = (): void => {
      over?.removeEventListener("abort", leave);
      close();
      if (over?.aborted) reject(over.reason);
    };
    const close = subscribe({ order: "desc", ...filters }, {
      event: (event) => events.push(event),
      again: () => events.splice(0),
      end: (complete, cursor) => {
        leave();
        resolve({ events, complete, cursor });
      },
      refused: ({ code, reason, detail }) => {
        leave();
        reject(new RequestFailed(code, reason, detail));
      },
    });
    over?.addEventListener("abort", leave);
  });
}

/** The packet with this id; undefined if the relay does not have it, or sends another one in its place. */
export async function packetById(id: string, over?: AbortSignal): Promise<Event | undefined> {
  const { events } = await page({ packet_ids: [id], limit: 1 }, over);
  return events.find(({ packet }) => packet["packet_id"] === id);
}
