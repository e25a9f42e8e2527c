// Reading the text of the search box as a filter.

import type { Filters } from "./link.js";

export interface Understood {
  readonly filters: Filters;
  /** What was understood, one description for each part. */
  readonly parts: readonly string[];
  /** The words that were not understood. */
  readonly unknown: readonly string[];
  /** The packet id, if the text is one and nothing else. */
  readonly packet: string | null;
}

const ID = /^0x[0-9a-f]{64}$/;
const DID = /^did:[a-z0-9]+:\S+$/;
const DAY = /^(\d{4}-\d{2}-\d{2})?(\.\.)?(\d{4}-\d{2}-\d{2})?$/;
const RECEIVED = /^received:(\d{1,12})\.\.(\d{1,12})$/;
const TYPE = /^type:|^[A-Za-z0-9_./-]{1,120}$/;
const MOST_PARTS = 50;

/** The first second of a local day, or of the day `after` days later; null for a date that does not exist. */
function midnight(day: string, after = 0): number | null {
  const [year = 0, month = 1, date = 1] = day.split("-").map(Number);
  const that = new Date(year, month - 1, date);
  if (that.getFullYear() !== year || that.getMonth() !== month - 1 || that.getDate() !== date) return null;
  return Math.floor(new Date(year, month - 1, date + after).getTime() / 1000);
}

/** A type as a word for the search box; a type may be any text. */
export function quotedType(type: string): string {
  return `type:${type.replace(/[\s%]/g, encodeURIComponent)}`;
}

function unquoted(type: string): string {
  try {
    return decodeURIComponent(type);
  } catch {
    return type; // as a person typed it
  }
}

export function understand(text: string): Understood {
  const authors: string[] = [];
  const types: string[] = [];
  const packets: string[] = [];
  const parts: string[] = [];
  const unknown: string[] = [];
  const times: { since?: number; until?: number; received_since?: number; received_until?: number } = {};
  for (const word of text.split(/\s+/).filter(Boolean).slice(0, MOST_PARTS)) {
    const received = RECEIVED.exec(word);
    const days = DAY.exec(word);
    const [from, to] = [days?.[1], days?.[2] === undefined ? days?.[1] : days[3]];
    const since = from === undefined ? undefined : midnight(from);
    const until = to === undefined ? undefined : midnight(to, 1);
    if (ID.test(word.toLowerCase())) {
      packets.push(word.toLowerCase());
      parts.push("one packet id");
    } else if (DID.test(word)) {
      authors.push(word);
      parts.push(`author ${word}`);
    } else if (received !== null) {
      times.received_since = Number(received[1]);
      times.received_until = Number(received[2]);
      parts.push("a time of receipt");
    } else if (since === null || until === null) {
      unknown.push(word);
    } else if (since !== undefined || until !== undefined) {
      if (since !== undefined) times.since = since;
      if (until !== undefined) times.until = until - 1;
      parts.push(from === to ? `on ${from}` : `${from === undefined ? "" : `from ${from} `}${to === undefined ? "" : `to ${to}`}`.trim());
    } else if (TYPE.test(word)) {
      const type = unquoted(word.replace(/^type:/, ""));
      types.push(type);
      parts.push(type === "" ? "the empty type" : `type ${type}`);
    } else {
      unknown.push(word);
    }
  }
  const filters: Filters = {
    ...(authors.length > 0 && { authors }),
    ...(types.length > 0 && { types }),
    ...(packets.length > 0 && { packet_ids: packets }),
    ...times,
  };
  const isOne = packets.length === 1 && parts.length === 1 && unknown.length === 0;
  return { filters, parts, unknown, packet: isOne ? (packets[0] ?? null) : null };
}
