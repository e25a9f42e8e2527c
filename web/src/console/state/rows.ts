// A packet as a row of a list.

import { type Signal, signal } from "@preact/signals";

import { start } from "../text.js";
import type { Event } from "./link.js";

/** The verdict on id, signature and key: "valid", or why it is not. */
export type Verdict = "unchecked" | "checking" | "valid" | (string & {});

export interface PacketRow {
  readonly kind: "packet";
  readonly id: string;
  readonly author: string;
  readonly type: string;
  readonly receivedAt: number;
  readonly size: number;
  readonly event: Event;
  readonly verdict: Signal<Verdict>;
}

/** A stretch of the log that was skipped here, on purpose or because it could not be kept. */
export interface GapRow {
  readonly kind: "gap";
  readonly id: string;
  readonly from: number;
  readonly to: number;
  readonly packets: number | null;
  readonly why: string;
}

export type Row = PacketRow | GapRow;

const text = (value: unknown): string => (typeof value === "string" ? value : "");

export function rowOf(event: Event): PacketRow {
  const { packet } = event;
  const content = packet["content"];
  const type = typeof content === "object" && content !== null ? (content as Record<string, unknown>)["type"] : "";
  return {
    kind: "packet",
    id: text(packet["packet_id"]),
    author: text(packet["author_id"]),
    type: text(type),
    receivedAt: event.received_at,
    size: event.text.length,
    event,
    verdict: signal<Verdict>("unchecked"),
  };
}

/** A few words of the content: its text if there is one, else its other members. */
export function preview(event: Event, length = 200): string {
  const content = event.packet["content"];
  if (typeof content !== "object" || content === null) return "";
  const members = content as Record<string, unknown>;
  for (const name of ["text", "body", "title", "name", "summary"]) {
    if (typeof members[name] === "string" && members[name] !== "") return start(members[name], length);
  }
  const parts: string[] = [];
  let size = 0;
  for (const name of Object.keys(members)) {
    if (name === "type") continue;
    const value = members[name];
    if (value === "") continue;
    const short = typeof value === "object" && value !== null ? (Array.isArray(value) ? "[…]" : "{…}") : start(String(value), 60);
    parts.push(`${start(name, 40)}: ${short}`);
    size += short.length + name.length;
    if (size > length) break;
  }
  return parts.join(", ");
}

/** Whether a row contains all the words, in its author, type, id or preview, in any letter case. */
export function matches(row: PacketRow, words: readonly string[]): boolean {
  if (words.length === 0) return true;
  const all = `${row.author}\n${row.type}\n${row.id}\n${preview(row.event, 500)}`.toLowerCase();
  return words.every((word) => all.includes(word));
}
