/**
 * The messages of RFC-0004 §3 that a client sends and receives, with their names on the wire.
 *
 * Unknown members are ignored; `null` means the same as absence. A packet inside an EVENT remains the
 * text that arrived: decoding a message neither reads nor checks the packet.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { InvalidMessage } from "./errors.js";
import type { JsonObject } from "./json.js";

/** Which packets a subscription wants (RFC-0004 §3.1). All times are Unix seconds and inclusive. */
export interface Filters {
  authors?: readonly string[];
  types?: readonly string[];
  since?: number;
  until?: number;
  limit?: number;
  cursor?: string;
  order?: "asc" | "desc";
  packet_ids?: readonly string[];
  received_since?: number;
  received_until?: number;
}

/** One packet for one subscription. */
export interface Event {
  readonly type: "EVENT";
  /** The JSON text of the packet, as it arrived. */
  readonly packet: string;
  readonly received_at: number;
  readonly subscription_id?: string;
  readonly cursor?: string;
  readonly relay_annotations?: JsonObject;
}

/** The packet is durably stored. */
export interface Ok {
  readonly type: "OK";
  readonly packet_id: string;
  readonly status: string;
  readonly client_msg_id?: string;
  readonly duplicate?: boolean;
  readonly duplicate_of?: string;
  readonly received_at?: number;
  readonly relay_annotations?: JsonObject;
}

/** A request was refused. */
export interface ErrorMessage {
  readonly type: "ERROR";
  readonly code: string;
  readonly reason: string;
  readonly client_msg_id?: string;
  readonly subscription_id?: string;
  readonly detail?: string;
  readonly retry_after?: number;
  readonly max_bytes?: number;
  readonly cursor?: string;
}

/** The challenge that the relay wants signed. */
export interface AuthChallenge {
  readonly type: "AUTH_CHALLENGE";
  readonly challenge: string;
  readonly server_id: string;
  readonly expires_at: number;
  readonly extensions?: readonly string[];
}

/** The session is authenticated as `author_id`, with exactly these capabilities. */
export interface AuthOk {
  readonly type: "AUTH_OK";
  readonly author_id: string;
  readonly capabilities?: readonly string[];
  readonly client_msg_id?: string;
  readonly extensions?: readonly string[];
}

/** All history has been sent, or, if `complete` is false, as much as `limit` allows. */
export interface EndOfHistory {
  readonly type: "END_OF_HISTORY";
  readonly subscription_id: string;
  readonly complete: boolean;
  readonly cursor?: string;
  readonly client_msg_id?: string;
}

/** The answer to an operator's MODERATE (an extension of this project's relay). */
export interface Moderated {
  readonly type: "MODERATED";
  readonly action: string;
  readonly client_msg_id?: string;
  readonly changed?: boolean;
  readonly entries?: readonly JsonObject[];
  readonly next?: string;
  readonly total?: number;
  readonly silent?: number;
}

/** Any message that a relay sends. */
export type RelayMessage = Event | Ok | ErrorMessage | AuthChallenge | AuthOk | EndOfHistory | Moderated;

type Kind = "text" | "integer" | "number" | "boolean" | "object" | "texts" | "objects" | "raw";
type Shape = Readonly<Record<string, Kind | `${Kind}?`>>;

const SHAPES: Readonly<Record<string, Shape>> = {
  EVENT: {
    packet: "raw",
    received_at: "integer",
    subscription_id: "text?",
    cursor: "text?",
    relay_annotations: "object?",
  },
  OK: {
    packet_id: "text",
    status: "text",
    client_msg_id: "text?",
    duplicate: "boolean?",
    duplicate_of: "text?",
    received_at: "integer?",
    relay_annotations: "object?",
  },
  ERROR: {
    code: "text",
    reason: "text",
    client_msg_id: "text?",
    subscription_id: "text?",
    detail: "text?",
    retry_after: "number?", // RFC-0004 §6.1 does not require an integer
    max_bytes: "integer?",
    cursor: "text?",
  },
  AUTH_CHALLENGE: { challenge: "text", server_id: "text", expires_at: "integer", extensions: "texts?" },
  AUTH_OK: { author_id: "text", capabilities: "texts?", client_msg_id: "text?", extensions: "texts?" },
  END_OF_HISTORY: { subscription_id: "text", complete: "boolean", cursor: "text?", client_msg_id: "text?" },
  MODERATED: {
    action: "text",
    client_msg_id: "text?",
    changed: "boolean?",
    entries: "objects?",
    next: "text?",
    total: "integer?",
    silent: "integer?",
  },
};

/** The frame that publishes a packet given by its canonical text, which is not encoded again. */
export function publishFrame(canonical: string, clientMsgId: string): string {
  return `{"type":"PUBLISH","packet":${canonical},"client_msg_id":${JSON.stringify(clientMsgId)}}`;
}

/** Encode any other message as a frame; undefined members are left out. */
export function encode(message: { readonly type: string } & Readonly<Record<string, unknown>>): string {
  return JSON.stringify(message);
}

/**
 * Decode one text frame that a relay sent.
 *
 * Throws `InvalidMessage`: `detail` is `malformed_json` if the frame is not a JSON object, `unknown_type` if the type
 * is missing or unknown, undefined if the message has the wrong shape.
 */
export function decodeRelayMessage(frame: string): RelayMessage {
  const places = findMembers(frame);
  const type = read(frame, places, "type");
  const shape = typeof type === "string" && Object.hasOwn(SHAPES, type) ? SHAPES[type] : undefined;
  if (shape === undefined) {
    throw new InvalidMessage("the message type is missing or not known here", { detail: "unknown_type" });
  }
  const message: Record<string, unknown> = { type };
  for (const [name, rule] of Object.entries(shape)) {
    const kind = rule.replace("?", "") as Kind;
    const value = kind === "raw" ? slice(frame, places, name) : read(frame, places, name);
    if (value === undefined || value === null) {
      if (!rule.endsWith("?")) throw new InvalidMessage(`${String(type)}: ${name} is missing`);
    } else if (!isOf(kind, value)) {
      throw new InvalidMessage(`${String(type)}: ${name} is of another type than it should be`);
    } else {
      message[name] = value;
    }
  }
  return message as unknown as RelayMessage;
}

function isOf(kind: Kind, value: unknown): boolean {
  switch (kind) {
    case "raw":
      return true;
    case "text":
      return typeof value === "string";
    case "integer":
      return Number.isInteger(value);
    case "number":
      return Number.isFinite(value);
    case "boolean":
      return typeof value === "boolean";
    case "object":
      return typeof value === "object" && !Array.isArray(value);
    case "texts":
      return Array.isArray(value) && value.every((item) => typeof item === "string");
    case "objects":
      return Array.isArray(value) && value.every((item) => typeof item === "object" && item !== null);
  }
}

/** Where the value of each member of a frame is: the start, and the end, exclusive. */
type Places = Map<string, readonly [number, number]>;

function slice(frame: string, places: Places, name: string): string | undefined {
  const place = places.get(name);
  return place && frame.slice(...place);
}

function read(frame: string, places: Places, name: string): unknown {
  const text = slice(frame, places, name);
  if (text === undefined) return undefined;
  try {
    return JSON.parse(text) as unknown;
  } catch {
    malformed();
  }
}

const SPACE = /[ \t\n\r]*/y;
const SCALAR = /[^,{}[\]" \t\n\r]+/y;

/** Find the members of the one object that a frame must be; values are skipped, not checked. */
function findMembers(frame: string): Places {
  const places: Places = new Map();
  let at = skip(SPACE, frame, 0);
  if (frame[at] !== "{") malformed();
  at = skip(SPACE, frame, at + 1);
  if (frame[at] === "}") {
    requireEnd(frame, at + 1);
    return places;
  }
  for (;;) {
    const start = at;
    at = frame[at] === '"' ? endOfString(frame, at) : -1;
    if (at === -1) malformed();
    const name = read(frame, new Map([["name", [start, at]]]), "name") as string;
    at = skip(SPACE, frame, at);
    if (frame[at] !== ":") malformed();
    const first = skip(SPACE, frame, at + 1);
    at = skipValue(frame, first);
    places.set(name, [first, at]);
    at = skip(SPACE, frame, at);
    if (frame[at] === "}") break;
    if (frame[at] !== ",") malformed();
    at = skip(SPACE, frame, at + 1);
  }
  requireEnd(frame, at + 1);
  return places;
}

function requireEnd(frame: string, at: number): void {
  if (skip(SPACE, frame, at) !== frame.length) malformed();
}

function skip(pattern: RegExp, text: string, at: number): number {
  pattern.lastIndex = at;
  return pattern.test(text) ? pattern.lastIndex : at;
}

function skipValue(frame: string, start: number): number {
  let at = start;
  let depth = 0;
  do {
    const next = frame[at];
    if (next === '"') {
      const end = endOfString(frame, at);
      if (end === -1) malformed();
      at = end;
    } else if (next === "{" || next === "[") {
      depth++;
      at++;
    } else if (next === "}" || next === "]") {
      depth--;
      at++;
    } else if (next === undefined) {
      malformed();
    } else if (depth > 0) {
      at++;
    } else {
      const end = skip(SCALAR, frame, at);
      if (end === at) malformed();
      at = end;
    }
  } while (depth > 0);
  if (at === start || depth < 0) malformed();
  return at;
}

/** The position after the string that begins at `at`; -1 if the string does not end. */
function endOfString(frame: string, at: number): number {
  for (let from = at + 1; ; ) {
    const quote = frame.indexOf('"', from);
    if (quote === -1) return -1;
    let escapes = 0;
    while (frame[quote - 1 - escapes] === "\\") escapes++;
    if (escapes % 2 === 0) return quote + 1;
    from = quote + 1;
  }
}

function malformed(): never {
  throw new InvalidMessage("the frame is not one JSON object", { detail: "malformed_json" });
}
