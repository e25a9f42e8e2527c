// The relay's own figures: /metrics, read every few seconds while the page is visible; ten minutes of it are kept.

import { signal } from "@preact/signals";

const INTERVAL = 2000;
const PATIENCE = 10_000;
const KEPT = 300;

/** One reading: every sample by its name and labels, in the Prometheus text format. */
export type Reading = ReadonlyMap<string, number>;

export interface Point {
  /** In Unix milliseconds. */
  readonly at: number;
  readonly values: Readonly<Record<Figure, number>>;
}

export type Figure = "connections" | "subscriptions" | "behind" | "publishes" | "events" | "bytes" | "p50" | "p99" | "refused";

export const points = signal<readonly Point[]>([]);
export const latest = signal<Reading | null>(null);
/** Why there are no figures: another port has them, or the relay did not answer. */
export const missing = signal<"" | "elsewhere" | "unreachable">("");

const SAMPLE = /^([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\})?) (\S+)/;

export function parse(text: string): Reading {
  const found = new Map<string, number>();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (match?.[1] !== undefined) found.set(match[1], Number(match[2]));
  }
  return found;
}

/** The sum of all samples of this name, or of those whose labels contain `label`. */
export function sum(reading: Reading, name: string, label = ""): number {
  let total = 0;
  for (const [sample, value] of reading) {
    if ((sample === name || sample.startsWith(`${name}{`)) && sample.includes(label)) total += value;
  }
  return total;
}

/** The time within which this share of what was measured between two readings stayed, by the histogram's buckets. */
export function quantile(share: number, name: string, now: Reading, before: Reading): number {
  const steps: [number, number][] = [];
  for (const [sample, value] of now) {
    const bound = sample.startsWith(`${name}_bucket{`) ? /le="([^"]+)"/.exec(sample)?.[1] : undefined;
    if (bound !== undefined) steps.push([bound === "+Inf" ? Infinity : Number(bound), value - (before.get(sample) ?? 0)]);
  }
  steps.sort(([a], [b]) => a - b);
  const all = steps.at(-1)?.[1] ?? 0;
  if (all <= 0) return NaN;
  return steps.find(([, count]) => count >= share * all)?.[0] ?? NaN;
}

let previous: { at: number; reading: Reading } | null = null;
let isReading = false;

async function read(): Promise<void> {
  if (isReading) return;
  isReading = true;
  try {
    const answer = await fetch("metrics", { signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) {
      missing.value = answer.status === 404 ? "elsewhere" : "unreachable";
      return;
    }
    const at = Date.now();
    const reading = parse(await answer.text());
    missing.value = "";
    latest.value = reading;
    if (previous !== null && at - previous.at < 5 * INTERVAL) points.value = [...points.value, point(at, reading, previous)].slice(-KEPT);
    previous = { at, reading };
  } catch {
    missing.value = "unreachable";
  } finally {
    isReading = false;
  }
}

function point(at: number, now: Reading, before: { at: number; reading: Reading }): Point {
  const seconds = (at - before.at) / 1000;
  // A counter that has decreased belongs to a relay that was restarted.
  const rate = (name: string, label = ""): number => Math.max(0, (sum(now, name, label) - sum(before.reading, name, label)) / seconds);
  const all = rate("relayd_publishes_total");
  const accepted = rate("relayd_publishes_total", '"accepted"');
  return {
    at,
    values: {
      connections: sum(now, "relayd_connections"),
      subscriptions: sum(now, "relayd_subscriptions"),
      behind: sum(now, "relayd_subscriptions_behind"),
      publishes: accepted,
      refused: Math.max(0, all - accepted - rate("relayd_publishes_total", '"duplicate"')),
      events: rate("relayd_events_sent_total"),
      bytes: rate("relayd_sent_bytes_total"),
      p50: quantile(0.5, "relayd_publish_seconds", now, before.reading),
      p99: quantile(0.99, "relayd_publish_seconds", now, before.reading),
    },
  };
}

/** Read while the page is visible; the returned function ends it. */
export function watch(): () => void {
  let timer: ReturnType<typeof setInterval> | undefined;
  const settle = (): void => {
    clearInterval(timer);
    timer = undefined;
    if (document.hidden) return;
    void read();
    timer = setInterval(() => void read(), INTERVAL);
  };
  document.addEventListener("visibilitychange", settle);
  settle();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", settle);
  };
}
