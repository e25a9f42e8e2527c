// Verdicts for the packets in view: a worker computes them, this module requests them.
//
// A packet counts as checked only if the relay was asked for its author's key events: the key in the author's DID may
// have been revoked since.

import { signal } from "@preact/signals";

import { connections, type Event, page, phase, relayNow } from "./link.js";
import { manifest } from "./relay.js";
import type { PacketRow, Row } from "./rows.js";

export interface Step {
  readonly name: "form" | "id" | "signature" | "key";
  readonly holds: boolean;
  readonly words: string;
}

/** A packet as the relay served it. Its annotations restore an origin that the relay found unproven and replaced. */
export type Given = Pick<Event, "text" | "received_at" | "relay_annotations">;

/** The relay's packets about an author's keys; null if there are more than any reader of this project accepts. */
export type Known = readonly Given[] | null;

export interface Rules {
  readonly clockSkewSeconds: number;
  readonly recoveryDelaySeconds: number;
}

export type Ask =
  | { readonly kind: "packet"; readonly number: number; readonly given: Given }
  | { readonly kind: "keys"; readonly number: number; readonly did: string; readonly events: Known; readonly at: number; readonly rules: Rules };

/** The state of a key at a time. */
export interface KeyWindow {
  readonly keyId: string;
  readonly publicKey: string;
  readonly standing: string;
  readonly validFrom: number;
  readonly validUntil: number;
  readonly revokedAt: number | null;
  readonly recovery: boolean;
}

/** What the identity packets of an author amount to. */
export interface KeyHistory {
  readonly conflict: string | null;
  readonly document: string | null;
  readonly keys: readonly KeyWindow[];
  /** The valid packets, in the order in which they count. */
  readonly events: readonly { readonly id: string; readonly type: string; readonly receivedAt: number; readonly pending: boolean; readonly words: string }[];
  /** How many packets were served that are not valid. */
  readonly refused: number;
}

export interface Answer {
  readonly number: number;
  /** For a packet; undefined if the worker no longer has the author's keys, although they were passed to it. */
  readonly verdict?: string;
  readonly steps?: readonly Step[];
  /** The packet as its author signed it, if the relay serves it with another origin. */
  readonly signed?: string | undefined;
  readonly history?: KeyHistory;
}

export const IDENTITY_TYPES = ["KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"];
export const checked = signal(0);
/** Whether the checking script could not be fetched, or has failed: nothing is checked until the next connection. */
export const unable = signal(false);

const AT_ONCE = 48;
const AUTHORS_AT_ONCE = 50;
const MOST_AUTHORS = 2000;
const MOST_WAITING = 200;
const PAGE = 100;
/** The most identity packets read of an author: twice what a key chain may hold. */
const MOST_EVENTS = 2048;
/** The most bytes of them. A stranger could publish more than a browser can hold; the clients have the same limit. */
const MOST_BYTES = 8 * 2 ** 20;
const SOON = 150;
/** The pause between two requests for keys, so that a page full of new authors stays within a relay's limits. */
const PAUSE = 1500;

let worker: Worker | null = null;
let numbers = 0;
const asked = new Map<number, { resolve(answer: Answer): void; reject(error: Error): void }>();
/** Authors whose keys the worker has, and the second in which the relay was asked for them. */
const known = new Map<string, number>();
/** Authors who have published something about keys since the relay was last asked: its answer may not include that. */
const outdated = new Set<string>();
let askedRelayAt = 0;
/** Only one request at a time: the answer to an earlier one must not arrive after that to a later one. */
let isAsking = false;
const wanted = new Map<string, ((error?: Error) => void)[]>();
let timer: ReturnType<typeof setTimeout> | undefined;
let rest: ReturnType<typeof setTimeout> | undefined;

declare const trustedTypes: { createPolicy(name: string, rules: object): { createScriptURL(url: string): string } } | undefined;

const SCRIPT = new URL("./@verify.js@", import.meta.url).href;

const rules = {
  createScriptURL: (url: string): string => {
    if (url !== SCRIPT) throw new TypeError("the console runs no other script");
    return url;
  },
};
/** Made once: a page may not make a second policy of this name. */
let policy: { createScriptURL(url: string): string } | undefined;

function start(): Worker {
  policy ??= typeof trustedTypes === "undefined" ? rules : trustedTypes.createPolicy("strata", rules);
  const made = new Worker(policy.createScriptURL(SCRIPT), { type: "module" });
  made.onmessage = ({ data }: MessageEvent<Answer>) => {
    asked.get(data.number)?.resolve(data);
    asked.delete(data.number);
  };
  made.onerror = () => void (worker === made && giveUp());
  return made;
}

const failure = (): Error => new Error("the script that checks packets could not be fetched, or has failed");

/** Stop the worker and fail all requests. The next worker has no keys, so all authors are asked for again. */
function giveUp(): void {
  worker?.terminate();
  worker = null;
  unable.value = true;
  known.clear();
  clearTimeout(timer);
  timer = undefined;
  for (const { reject } of asked.values()) reject(failure());
  asked.clear();
  for (const each of wanted.values()) for (const done of each) done(failure());
  wanted.clear();
}

connections.subscribe(() => void (unable.value = false));

type Unnumbered = Ask extends infer One ? (One extends Ask ? Omit<One, "number"> : never) : never;

export async function ask(question: Unnumbered): Promise<Answer> {
  if (unable.peek()) throw failure();
  try {
    worker ??= start();
  } catch (error) {
    giveUp();
    throw error;
  }
  const number = ++numbers;
  worker.postMessage({ ...question, number });
  return new Promise((resolve, reject) => asked.set(number, { resolve, reject }));
}

/** Request the keys of this author, once; resolves when the worker has them, and rejects if there is no worker. */
export async function keysOf(did: string): Promise<void> {
  if (known.has(did)) return;
  if (unable.peek()) throw failure();
  await new Promise<void>((resolve, reject) => {
    const others = wanted.get(did) ?? [];
    wanted.set(did, [...others, (error) => (error === undefined ? resolve() : reject(error))]);
    if (isAsking) return; // the author's turn comes after the current request
    // The clock may have been set back since.
    timer ??= setTimeout(() => void askRelay(), Math.max(SOON, Math.min(PAUSE, askedRelayAt + PAUSE - Date.now())));
  });
}

/** Note that the author has published something about keys: they are requested again when they are next needed. */
export function forgetKeys(did: string): void {
  known.delete(did);
  if (wanted.has(did)) outdated.add(did);
}

/** Note that packets may have been skipped in which any author has published something about keys. */
export function forgetAllKeys(): void {
  known.clear();
  for (const did of wanted.keys()) outdated.add(did);
}

async function askRelay(): Promise<void> {
  timer = undefined;
  if (phase.value !== "online") {
    timer = setTimeout(() => void askRelay(), PAUSE);
    return;
  }
  const authors = [...wanted.keys()].slice(0, AUTHORS_AT_ONCE);
  const askedAt = relayNow();
  askedRelayAt = Date.now();
  outdated.clear();
  isAsking = true;
  try {
    const events = await identityPackets(authors);
    for (const did of authors) {
      if (known.size >= MOST_AUTHORS) known.clear();
      await learn(did, events.get(did) as Known);
      if (outdated.has(did)) continue;
      known.set(did, askedAt);
      for (const done of wanted.get(did) ?? []) done();
      wanted.delete(did);
    }
  } catch {
    // The keys are requested again with the next packets, or after a pause.
  }
  isAsking = false;
  if (wanted.size > 0) timer ??= setTimeout(() => void askRelay(), PAUSE);
}

/** Pass the relay's packets about this author's keys to the worker. */
async function learn(did: string, events: Known): Promise<KeyHistory | undefined> {
  const said = manifest.peek();
  const rules = {
    clockSkewSeconds: said?.clock_skew_seconds ?? 300,
    recoveryDelaySeconds: said?.recovery_delay_seconds ?? 86_400,
  };
  const { history } = await ask({ kind: "keys", did, events, at: relayNow(), rules });
  return history;
}

/**
 * The history of an author's keys, for people. The relay's answer may be older than the one by which packets are
 * judged, which is therefore requested again.
 */
export async function historyOf(did: string, over?: AbortSignal): Promise<KeyHistory | undefined> {
  const events = await identityPackets([did], over);
  forgetKeys(did);
  return learn(did, events.get(did) as Known);
}

/** The packets that determine these authors' keys, oldest first. */
export async function identityPackets(authors: readonly string[], over?: AbortSignal): Promise<Map<string, Known>> {
  const found = new Map<string, Known>(authors.map((did) => [did, []]));
  const sizes = new Map<string, number>();
  const places = new Set<string>();
  let cursor: string | null = null;
  for (let left = authors.length * MOST_EVENTS; ; ) {
    const filters = { authors, types: IDENTITY_TYPES, order: "asc", limit: PAGE, ...(cursor !== null && { cursor }) } as const;
    const part: Awaited<ReturnType<typeof page>> = await page(filters, over);
    for (const { packet, text, received_at, relay_annotations } of part.events) {
      const did = String(packet["author_id"]);
      const size = (sizes.get(did) ?? 0) + new TextEncoder().encode(text).length;
      sizes.set(did, size);
      found.set(did, size > MOST_BYTES ? null : [...(found.get(did) ?? []), { text, received_at, relay_annotations }]);
    }
    cursor = part.cursor;
    if (part.complete) return found;
    left -= Math.max(part.events.length, 1);
    // The packets left out might include a revocation.
    if (left < 0 || cursor === null || places.has(cursor)) throw new Error("the relay comes to no end about keys");
    places.add(cursor);
  }
}

/**
 * Check one packet. A packet that does not verify may be signed by a key that is newer than what is known here, so it
 * is rejected only if the relay was asked after it had received the packet.
 *
 * Rejects if nothing can be checked (`unable`).
 */
export async function examine({ event, author }: PacketRow): Promise<Answer> {
  const { text, received_at, relay_annotations } = event;
  const question = { kind: "packet", given: { text, received_at, relay_annotations } } as const;
  await keysOf(author);
  const answer = await ask(question);
  const isSure = answer.verdict !== undefined && (known.get(author) ?? 0) > received_at;
  if (answer.verdict === "valid" || isSure) return answer;
  known.delete(author);
  await keysOf(author);
  return ask(question);
}

/** Check the rows in view that are not checked yet, a few at a time; the rest follow unless the view changes first. */
export function check(rows: readonly Row[]): void {
  clearTimeout(rest);
  const left = checkSome(rows);
  if (left.length > 0) rest = setTimeout(check, PAUSE, left);
}

/** Check as many of these rows as there is room for now; return the rest. */
export function checkSome(rows: readonly Row[]): readonly Row[] {
  if (unable.peek()) return [];
  const room = Math.max(wanted.size, asked.size) > MOST_WAITING ? 0 : AT_ONCE;
  const todo = rows.filter((row): row is PacketRow => row.kind === "packet" && row.verdict.value === "unchecked");
  for (const row of todo.splice(0, room)) void checkOne(row);
  return todo;
}

async function checkOne(row: PacketRow): Promise<void> {
  row.verdict.value = "checking";
  try {
    row.verdict.value = (await examine(row)).verdict ?? "not_checked";
    checked.value += 1;
  } catch {
    row.verdict.value = "unchecked"; // `unable` says why
  }
}
