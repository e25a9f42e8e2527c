// Verdicts for the packets on view: made in a worker, asked for here.
//
// A packet counts as checked only when the relay was asked for its author's key events: a key that is in the
// author's DID may have been revoked since.

import { signal } from "@preact/signals";

import { connections, type Event, page, phase, relayNow } from "./link.js";
import { manifest } from "./relay.js";
import type { PacketRow, Row } from "./rows.js";

export interface Step {
  readonly name: "form" | "id" | "signature" | "key";
  readonly holds: boolean;
  readonly words: string;
}

/** A packet as the relay gave it: its annotations say what it has put into the place of an origin that it found unproven. */
export type Given = Pick<Event, "text" | "received_at" | "relay_annotations">;

/** What the relay has of an author's keys; null where that is more than any reader of this project judges by. */
export type Known = readonly Given[] | null;

export interface Rules {
  readonly clockSkewSeconds: number;
  readonly recoveryDelaySeconds: number;
}

export type Ask =
  | { readonly kind: "packet"; readonly number: number; readonly given: Given }
  | { readonly kind: "keys"; readonly number: number; readonly did: string; readonly events: Known; readonly at: number; readonly rules: Rules };

/** A key as it stands at a time. */
export interface KeyWindow {
  readonly keyId: string;
  readonly publicKey: string;
  readonly standing: string;
  readonly validFrom: number;
  readonly validUntil: number;
  readonly revokedAt: number | null;
  readonly recovery: boolean;
}

/** What the identity packets of an author come to. */
export interface KeyHistory {
  readonly conflict: string | null;
  readonly document: string | null;
  readonly keys: readonly KeyWindow[];
  /** Those that hold, in the order in which they count. */
  readonly events: readonly { readonly id: string; readonly type: string; readonly receivedAt: number; readonly pending: boolean; readonly words: string }[];
  /** How many were served and do not hold. */
  readonly refused: number;
}

export interface Answer {
  readonly number: number;
  /** Of a packet: undefined where the worker does not have its author's keys any more, though it was given them. */
  readonly verdict?: string;
  readonly steps?: readonly Step[];
  /** The packet as its author signed it, where the relay serves it with another origin. */
  readonly signed?: string | undefined;
  readonly history?: KeyHistory;
}

export const IDENTITY_TYPES = ["KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"];
export const checked = signal(0);
/** The script that checks could not be fetched, or has failed: nothing is checked before there is another connection. */
export const unable = signal(false);

const AT_ONCE = 48;
const AUTHORS_AT_ONCE = 50;
const MOST_AUTHORS = 2000;
const MOST_WAITING = 200;
const PAGE = 100;
/** Identity packets of an author, twice what a key chain may hold. */
const MOST_EVENTS = 2048;
/** And their bytes. A stranger may publish so much that a browser could not hold it; the clients draw the line here too. */
const MOST_BYTES = 8 * 2 ** 20;
const SOON = 150;
/** Between two questions about keys, so that a page that is full of new authors keeps within a relay's limits. */
const PAUSE = 1500;

let worker: Worker | null = null;
let numbers = 0;
const asked = new Map<number, { resolve(answer: Answer): void; reject(error: Error): void }>();
/** Authors whose keys the worker has, and the second in which the relay was asked for them. */
const known = new Map<string, number>();
/** Authors who have published something about keys since the relay was last asked: its answer may lack that. */
const outdated = new Set<string>();
let askedRelayAt = 0;
/** One question at a time: the answer to an earlier one must not come behind that to a later one. */
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
/** Made once: a page may make no second one of this name. */
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

/** Nobody waits for what does not come; and the next worker knows no keys, so their authors are asked for again. */
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

/** Have the keys of this author asked for, once; resolves when the worker knows them, and rejects where there is none. */
export async function keysOf(did: string): Promise<void> {
  if (known.has(did)) return;
  if (unable.peek()) throw failure();
  await new Promise<void>((resolve, reject) => {
    const others = wanted.get(did) ?? [];
    wanted.set(did, [...others, (error) => (error === undefined ? resolve() : reject(error))]);
    if (isAsking) return; // they have their turn behind this one
    // The clock may have been put back since.
    timer ??= setTimeout(() => void askRelay(), Math.max(SOON, Math.min(PAUSE, askedRelayAt + PAUSE - Date.now())));
  });
}

/** The author has published something about keys: they are asked for again when they are next needed. */
export function forgetKeys(did: string): void {
  known.delete(did);
  if (wanted.has(did)) outdated.add(did);
}

/** Packets may have been passed over in which any author has published something about keys. */
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
    // Asked again with the next packets, or in a while.
  }
  isAsking = false;
  if (wanted.size > 0) timer ??= setTimeout(() => void askRelay(), PAUSE);
}

/** Let the worker know what the relay has of this author's keys. */
async function learn(did: string, events: Known): Promise<KeyHistory | undefined> {
  const said = manifest.peek();
  const rules = {
    clockSkewSeconds: said?.clock_skew_seconds ?? 300,
    recoveryDelaySeconds: said?.recovery_delay_seconds ?? 86_400,
  };
  const { history } = await ask({ kind: "keys", did, events, at: relayNow(), rules });
  return history;
}

/** What the relay has of an author's keys, for people. It may be older than what packets are judged by, which is asked for again. */
export async function historyOf(did: string, over?: AbortSignal): Promise<KeyHistory | undefined> {
  const events = await identityPackets([did], over);
  forgetKeys(did);
  return learn(did, events.get(did) as Known);
}

/** The packets that decide about these authors' keys, oldest first. */
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
    // What would be left out may be a revocation.
    if (left < 0 || cursor === null || places.has(cursor)) throw new Error("the relay comes to no end about keys");
    places.add(cursor);
  }
}

/**
 * Have one packet checked. A packet that does not verify may be signed by a key that is younger than what is known
 * here, so the verdict against it stands only if the relay was asked after it had received the packet.
 *
 * Rejects where nothing can be checked (`unable`).
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

/** Check the rows in view that are not checked yet, a few at a time: of the view of now, the rest has its turn in a while. */
export function check(rows: readonly Row[]): void {
  clearTimeout(rest);
  const left = checkSome(rows);
  if (left.length > 0) rest = setTimeout(check, PAUSE, left);
}

/** Check as many of these rows as there is room for now; those that are left. */
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
    row.verdict.value = "unchecked"; // of which `unable` tells
  }
}
