// The client library's outbox, over this page's connection: packets that were signed here wait in the browser, exactly
// as they were signed, until the relay has said OK.

import { effect, signal } from "@preact/signals";

import { indexedDbOutbox } from "../../client/outbox/indexeddb.js";
import { memoryOutbox } from "../../client/outbox/memory.js";
import { Outbox } from "../../client/outbox/outbox.js";
import { RequestRefused } from "../../client/protocol/errors.js";
import type { Packet } from "../../client/protocol/packets.js";
import { publishFrame } from "../../client/protocol/wire.js";
import type { Published } from "../../client/relays/values.js";
import { chosen, keepsKeys } from "./keys.js";
import { phase, request, RequestFailed } from "./link.js";
import { authenticate, speaksFor } from "./session.js";

export interface Item {
  readonly id: string;
  readonly type: string;
  readonly state: "waiting" | "stored" | "refused";
  readonly note: string;
}

/** Newest first; stored ones are forgotten when the page is closed. */
export const items = signal<readonly Item[]>([]);

const MOST_STORED = 20;
const INTERVAL = 2000;
let timer: ReturnType<typeof setTimeout> | undefined;
const stored: Item[] = [];
const outbox = new Outbox(keepsKeys ? indexedDbOutbox("console") : memoryOutbox(), send);

/** Send packets that wait from earlier visits, and those that are put in. */
export function beginOutbox(): void {
  outbox.start();
  effect(() => {
    const [isOnline] = [phase.value === "online", speaksFor.value, chosen.value]; // any of them may have been missing
    if (isOnline) outbox.wake();
  });
  void look();
}

/** Update `items`; they stay as they are if the browser's store cannot be read. Never rejects. */
async function look(): Promise<void> {
  const waiting = (await outbox.list().catch(() => undefined))?.map(({ packet, state, refusal, isStale }): Item => {
    const stale = isStale ? "More than a day old: relays refuse it unless they already have it. It is never signed again. " : "";
    const why = refusal === undefined ? "" : `${refusal.reason} (${refusal.code})`;
    return { id: packet.packetId, type: packet.contentType, state, note: stale + why };
  });
  if (waiting) items.value = [...waiting.reverse(), ...stored];
  // Another tab may be sending.
  clearTimeout(timer);
  if (waiting?.length !== 0) timer = setTimeout(() => void look(), INTERVAL);
}

/** Keep a signed packet and send it. Rejects if it cannot be kept; then it was not sent either. */
export async function put(packet: Packet): Promise<void> {
  const { sent } = await outbox.add(packet);
  // Another tab may be sending: the relay's answer is reported here too.
  sent.then((published) => remember(packet, published)).then(look, look);
  await look();
}

function remember({ packetId, contentType }: Packet, { duplicate, queued }: Published): void {
  if (stored.some(({ id }) => id === packetId)) return;
  const had = duplicate ? "The relay had it already. " : "";
  const waits = queued ? "It takes effect after a delay and its approvals, unless it is vetoed." : "";
  stored.unshift({ id: packetId, type: contentType, state: "stored", note: (had + waits).trim() });
  stored.splice(MOST_STORED);
}

export async function discard(id: string): Promise<void> {
  await outbox.remove(id);
  await look();
}

async function send(packet: Packet): Promise<Published> {
  try {
    const ok = await request((id) => publishFrame(packet.canonical, id));
    // Accepting an OK for another packet would be taking silence for success.
    if (ok.type !== "OK" || ok.packet_id !== packet.packetId) throw new RequestFailed("other", "no answer");
    const [duplicate, queued] = [ok.duplicate === true, ok.status === "QUEUED"];
    const published = { packetId: packet.packetId, receivedAt: ok.received_at, duplicate, queued, downgradedTo: undefined };
    remember(packet, published);
    setTimeout(() => void look());
    return published;
  } catch (error) {
    // If there was no answer, the outbox sends the packet again.
    if (!(error instanceof RequestFailed) || ["lost", "timeout", "offline", "other"].includes(error.code)) throw error;
    if (error.code === "unauthenticated") await authenticate();
    setTimeout(() => void look());
    throw new RequestRefused(error.code, error.reason, error);
  }
}
