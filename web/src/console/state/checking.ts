// Verdicts for the packets on view: made in a worker, asked for here.
//
// A packet counts as checked only when the relay was asked for its author's key events: a key that is in the
// author's DID may have been revoked since.

import { signal } from "@preact/signals";

import { page, phase, relayNow } from "./link.js";
import { manifest } from "./relay.js";
import type { PacketRow, Row } from "./rows.js";

export interface Step {
  readonly name: "form" | "id" | "signature" | "key";
  readonly holds: boolean;
  readonly words: string;
}

export type AuthorEvents = readonly (readonly [text: string, receivedAt: number])[];

export interface Rules {
  readonly clockSkewSeconds: number;
  readonly recoveryDelaySeconds: number;
}

export type Ask =
  | { readonly kind: "packet"; readonly number: number; readonly text: string; readonly receivedAt: number }
  | { readonly kind: "keys"; readonly number: number; readonly did: string; readonly events: AuthorEvents; readonly at: number; readonly rules: Rules };

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
  readonly verdict?: string;
  readonly steps?: readonly Step[];
  readonly history?: KeyHistory;
}

export const IDENTITY_TYPES = ["KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"];
export const checked = signal(0);

const AT_ONCE = 48;
const AUTHORS_AT_ONCE = 50;
const MOST_AUTHORS = 2000;
const MOST_WAITING = 200;
const PAGE = 500;
const SOON = 150;
/** Between two questions about keys, so that a page that is full of new authors keeps within a relay's limits. */
const PAUSE = 1500;

let worker: Worker | null = null;
let numbers = 0;
const asked = new Map<number, (answer: Answer) => void>();
/** Authors whose keys the worker has, and the second in which the relay was asked for them. */
const known = new Map<string, number>();
/** Authors who have published something about keys since the relay was last asked: its answer may lack that. */
const outdated = new Set<string>();
let askedRelayAt = 0;
const wanted = new Map<string, (() => void)[]>();
let timer: ReturnType<typeof setTimeout> | undefined;
let rest: ReturnType<typeof setTimeout> | undefined;

declare const trustedTypes: { createPolicy(name: string, rules: object): { createScriptURL(url: string): string } } | undefined;

const SCRIPT = new URL("./@verify.js@", import.meta.url).href;

function start(): Worker {
  const rules = {
    createScriptURL: (url: string): string => {
      if (url !== SCRIPT) throw new TypeError("the console runs no other script");
      return url;
    },
  };
  const policy = typeof trustedTypes === "undefined" ? rules : trustedTypes.createPolicy("strata", rules);
  const made = new Worker(policy.createScriptURL(SCRIPT), { type: "module" });
  made.onmessage = ({ data }: MessageEvent<Answer>) => {
    asked.get(data.number)?.(data);
    asked.delete(data.number);
  };
  return made;
}

type Unnumbered = Ask extends infer One ? (One extends Ask ? Omit<One, "number"> : never) : never;

export function ask(question: Unnumbered): Promise<Answer> {
  worker ??= start();
  const number = ++numbers;
  worker.postMessage({ ...question, number });
  return new Promise((resolve) => asked.set(number, resolve));
}

/** Have the keys of this author asked for, once; resolves when the worker knows them. */
export function keysOf(did: string): Promise<void> {
  if (known.has(did)) return Promise.resolve();
  return new Promise((resolve) => {
    const others = wanted.get(did) ?? [];
    wanted.set(did, [...others, resolve]);
    timer ??= setTimeout(() => void askRelay(), Math.max(SOON, askedRelayAt + PAUSE - Date.now()));
  });
}

/** The author has published something about keys: they are asked for again when they are next needed. */
export function forgetKeys(did: string): void {
  known.delete(did);
  if (wanted.has(did)) outdated.add(did);
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
  try {
    const events = await identityPackets(authors);
    for (const did of authors) {
      if (known.size >= MOST_AUTHORS) known.clear();
      await learn(did, events.get(did) ?? []);
      if (outdated.has(did)) continue;
      known.set(did, askedAt);
      for (const done of wanted.get(did) ?? []) done();
      wanted.delete(did);
    }
  } catch {
    // Asked again with the next packets, or in a while.
  }
  if (wanted.size > 0) timer ??= setTimeout(() => void askRelay(), PAUSE);
}

/** Let the worker know what the relay has of this author's keys. */
export async function learn(did: string, events: AuthorEvents): Promise<KeyHistory | undefined> {
  const said = manifest.peek();
  const rules = {
    clockSkewSeconds: said?.clock_skew_seconds ?? 300,
    recoveryDelaySeconds: said?.recovery_delay_seconds ?? 86_400,
  };
  const { history } = await ask({ kind: "keys", did, events, at: relayNow(), rules });
  return history;
}

/** The packets that decide about these authors' keys, oldest first. */
export async function identityPackets(authors: readonly string[]): Promise<Map<string, [string, number][]>> {
  const found = new Map<string, [string, number][]>();
  let cursor: string | null = null;
  for (let pages = 0; pages < 20; pages++) {
    const part: Awaited<ReturnType<typeof page>> = await page({
      authors,
      types: IDENTITY_TYPES,
      order: "asc",
      limit: PAGE,
      ...(cursor !== null && { cursor }),
    });
    for (const { packet, text, received_at } of part.events) {
      const did = String(packet["author_id"]);
      found.set(did, [...(found.get(did) ?? []), [text, received_at]]);
    }
    cursor = part.cursor;
    if (part.complete || cursor === null) break;
  }
  return found;
}

/**
 * Have one packet checked. A packet that does not verify may be signed by a key that is younger than what is known
 * here, so the verdict against it stands only if the relay was asked after it had received the packet.
 */
export async function examine(text: string, author: string, receivedAt: number): Promise<Answer> {
  await keysOf(author);
  const answer = await ask({ kind: "packet", text, receivedAt });
  if (answer.verdict === "valid" || (known.get(author) ?? 0) > receivedAt) return answer;
  known.delete(author);
  await keysOf(author);
  return ask({ kind: "packet", text, receivedAt });
}

/** Check the rows that are not checked yet, a few at a time: of what was asked for last, the rest has its turn in a while. */
export function check(rows: readonly Row[]): void {
  const room = Math.max(wanted.size, asked.size) > MOST_WAITING ? 0 : AT_ONCE;
  const todo = rows.filter((row): row is PacketRow => row.kind === "packet" && row.verdict.value === "unchecked");
  for (const row of todo.splice(0, room)) void checkOne(row);
  clearTimeout(rest);
  if (todo.length > 0) rest = setTimeout(check, PAUSE, todo);
}

async function checkOne(row: PacketRow): Promise<void> {
  row.verdict.value = "checking";
  row.verdict.value = (await examine(row.event.text, row.author, row.receivedAt)).verdict ?? "not_checked";
  checked.value += 1;
}
