// The live tail: the latest packets before the page was opened, and every one since.
//
// The list is drawn only a few times a second, so that ten thousand packets a second cost no more drawing than ten. It
// is bounded in rows and in characters. Nothing is skipped without a row that says so.

import { batch, computed, effect, signal } from "@preact/signals";

import { checked, checkSome, forgetAllKeys, forgetKeys, IDENTITY_TYPES } from "./checking.js";
import { type Event, type Filters, page, phase, refused, relayNow, RequestFailed, subscribe } from "./link.js";
import { type GapRow, type PacketRow, type Row, rowOf } from "./rows.js";

const FIRST = 100;
const MOST_ROWS = 5000;
const MOST_CHARACTERS = 24_000_000;
const INTERVAL = 120;
const TALLY_INTERVAL = 400;
const ANNOUNCE_INTERVAL = 10_000;
const BEHIND_SECONDS = 5;
const AGAIN = 5000;
/** How many of the newest packets are checked each time, even if they are not in view. */
const SAMPLE = 6;

/** Newest first. */
export const rows = signal<readonly Row[]>([]);
export const received = signal(0);
export const skipped = signal(0);
export const paused = signal(false);
/** How many packets arrived while the list was paused. */
export const held = signal(0);
/** How old the newest packet was when it came, in seconds. */
export const behind = signal(0);
export const isBehind = computed(() => behind.value > BEHIND_SECONDS);
/** Whether the packets from before the page was opened have arrived. */
export const ready = signal(false);

/** How many packets the list has, how many of them were checked, and how many of those are not valid. */
export const tally = signal({ packets: 0, done: 0, bad: 0 });
/** How many packets were received, for screen readers: updated seldom. */
export const announced = signal(0);

let close: (() => void) | null = null;
let reading = new AbortController();
let arrived: PacketRow[] = [];
let arrivedCharacters = 0;
let lost = { count: 0, from: 0, to: 0 };
let timer: ReturnType<typeof setTimeout> | undefined;
let gaps = 0;
/**
 * The latest time at which a packet was received, as far as the list has come. One that came here late from another relay
 * keeps the time at which that one had it.
 */
let lastAt = 0;
/** Whether a packet of that time has come since the list was last drawn. */
let isFresh = false;
/** The ids of packets that are here already, while the tail reads stored packets: some of these may arrive again. */
let overlap = new Set<string>();

/** Begin, once; the tail continues while other pages are open. */
export function follow(): void {
  if (close !== null) return;
  lately(() => [rows.value, checked.value], TALLY_INTERVAL, count);
  lately(() => received.value, ANNOUNCE_INTERVAL, () => (announced.value = received.peek()));
  close = effect(() => {
    if (phase.value === "online" && !ready.peek()) void start();
  });
}

/** Run `act` within `interval` after a signal that `seen` reads has changed, at most once per interval. */
function lately(seen: () => unknown, interval: number, act: () => void): void {
  let due: ReturnType<typeof setTimeout> | undefined;
  effect(() => {
    seen();
    due ??= setTimeout(() => {
      due = undefined;
      act();
    }, interval);
  });
}

function count(): void {
  const verdicts = rows.peek().flatMap((row) => (row.kind === "packet" ? [row.verdict.peek()] : []));
  const done = verdicts.filter((verdict) => verdict !== "unchecked" && verdict !== "checking");
  tally.value = { packets: verdicts.length, done: done.length, bad: done.filter((verdict) => verdict !== "valid").length };
}

async function start(): Promise<void> {
  reading.abort();
  reading = new AbortController();
  const { signal: over } = reading;
  try {
    const { events } = await page({ limit: FIRST }, over);
    const first = events.map(rowOf);
    const newest = first[0];
    const cursor = newest && (await placeAfter(newest.id, over));
    if (over.aborted) return;
    refused.value = null;
    lastAt = Math.max(0, ...first.map(({ receivedAt }) => Math.min(receivedAt, relayNow())));
    batch(() => {
      rows.value = [...first, ...rows.value.filter(({ kind }) => kind === "gap")];
      ready.value = true;
    });
    tailFrom(cursor !== undefined ? { cursor } : newest !== undefined ? { received_since: newest.receivedAt } : {});
  } catch (error) {
    if (over.aborted) return;
    if (error instanceof RequestFailed) refused.value = error;
    // Start again after a pause, unless a new connection has done so.
    setTimeout(() => over.aborted || start(), AGAIN);
  }
}

/**
 * The cursor after this packet; undefined if it was removed meanwhile. The cursors of the first page lead the other way,
 * and the packet's time is no place in the log: a packet from another relay keeps the time at which that one had it.
 */
async function placeAfter(id: string, over: AbortSignal): Promise<string | undefined> {
  const { events } = await page({ packet_ids: [id], order: "asc", limit: 1 }, over);
  return events[0]?.cursor;
}

function tailFrom(filters: Filters): void {
  close?.();
  overlap = new Set([...arrived, ...rows.peek()].map(({ id }) => id));
  forgetAllKeys(); // the tail may skip what authors have published about their keys since the relay was asked
  close = subscribe(
    filters,
    {
      event: take,
      end: () => overlap.clear(),
      // The relay does not know the cursor; after any other refusal `link` requests the subscription again unchanged.
      refused: ({ detail, cursor }) => {
        addGap({ from: lastAt, to: relayNow(), packets: null, why: detail === "log_reset" ? "the relay's log was put back to an older copy" : "the relay no longer knows this place" });
        if (cursor === undefined) jump();
        else tailFrom({ cursor });
      },
    },
    { gapless: true },
  );
}

function take(event: Event): void {
  const row = rowOf(event);
  if (overlap.delete(row.id)) return;
  const now = relayNow();
  const at = Math.min(row.receivedAt, now); // the other relay's clock may be ahead
  if (at >= Math.min(lastAt, now)) {
    lastAt = at;
    isFresh = true;
  }
  if (IDENTITY_TYPES.includes(row.type)) forgetKeys(row.author);
  const isFull = arrived.length >= MOST_ROWS || arrivedCharacters > MOST_CHARACTERS;
  if (isFull && paused.peek()) {
    lost = { count: lost.count + 1, from: lost.from || row.receivedAt, to: row.receivedAt };
  } else {
    if (isFull) show(); // browsers delay the timers of a page in the background
    arrived.push(row);
    arrivedCharacters += row.size;
  }
  timer ??= setTimeout(show, INTERVAL);
}

function show(): void {
  clearTimeout(timer);
  timer = undefined;
  batch(() => {
    if (isFresh) behind.value = Math.max(0, relayNow() - lastAt);
    else if (arrived.length === 0) behind.value = 0;
    isFresh = false;
    if (paused.value) {
      held.value = arrived.length + lost.count;
      return;
    }
    const fresh: Row[] = arrived.reverse();
    checkSome(fresh.slice(0, SAMPLE));
    received.value += fresh.length + lost.count;
    if (lost.count > 0) {
      skipped.value += lost.count;
      fresh.unshift(gap({ from: lost.from, to: lost.to, packets: lost.count, why: "more came during the pause than is kept" }));
      lost = { count: 0, from: 0, to: 0 };
    }
    arrived = [];
    arrivedCharacters = 0;
    held.value = 0;
    rows.value = bounded([...fresh, ...rows.value]);
  });
}

function bounded(all: Row[]): Row[] {
  let characters = 0;
  for (let at = 0; at < all.length; at++) {
    const row = all[at];
    if (row?.kind === "packet") characters += row.size;
    if (at >= MOST_ROWS || characters > MOST_CHARACTERS) return all.slice(0, at);
  }
  return all;
}

function gap(about: Omit<GapRow, "kind" | "id">): GapRow {
  return { kind: "gap", id: `gap-${++gaps}`, ...about };
}

function addGap(about: Omit<GapRow, "kind" | "id">): void {
  rows.value = bounded([gap(about), ...rows.value]);
}

export function pause(stop = !paused.value): void {
  paused.value = stop;
  if (!stop) show();
}

/** Skip what has not arrived yet, and continue with what is published from now on. */
export function jump(): void {
  close?.();
  reading.abort();
  const now = relayNow();
  const from = lastAt || now;
  batch(() => {
    paused.value = false;
    show();
    behind.value = 0;
    addGap({ from, to: now, packets: null, why: "jumped to now" });
  });
  tailFrom({ received_since: now });
}
