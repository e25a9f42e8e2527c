/**
 * What a relay announces in its manifest: one small HTTP GET beside the WebSocket connection.
 *
 * The manifest establishes no trust: it only says which extensions may be used, and every answer is still checked. Any
 * failure means "no manifest", never an error.
 */

import type { Announced } from "./values.js";

const MANIFEST_PATH = "/.well-known/strata-relay.json";
const MAX_LENGTH = 256 * 1024;
const MAX_EXTENSIONS = 256;

/** Fetch the manifest of the relay at a ws or wss URL; undefined if none comes. Never rejects. */
export async function discover(url: string, signal: AbortSignal): Promise<Announced | undefined> {
  const manifest = new URL(MANIFEST_PATH, url.replace(/^ws/, "http"));
  try {
    const options: RequestInit = { signal, redirect: "error", credentials: "omit", referrerPolicy: "no-referrer" };
    const answer = await fetch(manifest, options);
    if (!answer.ok || answer.body === null) return undefined;
    return readManifest(JSON.parse(await readText(answer.body)));
  } catch {
    return undefined;
  }
}

/** The part of a manifest that a client needs; undefined if it is malformed. */
export function readManifest(value: unknown): Announced | undefined {
  if (typeof value !== "object" || value === null) return undefined;
  const { extensions = [], relay_id, max_packet_bytes, limits } = value as Record<string, unknown>;
  if (!Array.isArray(extensions) || !extensions.every((name) => typeof name === "string")) return undefined;
  const limit = max_packet_bytes ?? (limits as Record<string, unknown> | undefined)?.["max_packet_bytes"];
  return {
    extensions: new Set(extensions.slice(0, MAX_EXTENSIONS)),
    maxPacketBytes: Number.isInteger(limit) && (limit as number) > 0 ? (limit as number) : undefined,
    relayId: typeof relay_id === "string" ? relay_id : undefined,
  };
}

async function readText(body: ReadableStream<Uint8Array>): Promise<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text + decoder.decode();
    text += decoder.decode(value, { stream: true });
    if (text.length > MAX_LENGTH) {
      await reader.cancel();
      throw new RangeError("the manifest is too long");
    }
  }
}
