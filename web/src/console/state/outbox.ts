// Packets that were signed here and that the relay does not have yet. They outlive the page: each is on the disk
// before it is sent, as the very bytes that were signed, and leaves it when the relay has said OK.

import { effect, signal } from "@preact/signals";

import { Packet } from "../../client/protocol/packets.js";
import { retryAdvice } from "../../client/protocol/errors.js";
import { publishFrame } from "../../client/protocol/wire.js";
import { all, drop, keep } from "./cellar.js";
import { chosen, keepsKeys } from "./keys.js";
import { connections, phase, request, RequestFailed } from "./link.js";
import { authenticate } from "./session.js";

export interface Item {
  readonly id: string;
  readonly text: string;
  readonly type: string;
  readonly timestamp: number;
  readonly state: "waiting" | "stored" | "refused" | "stale";
  readonly note: string;
}

const MOST = 200;
const FRESH_SECONDS = 86_400;
const PAUSE = 3000;

/** Newest first; those stored are forgotten with the page. */
export const items = signal<readonly Item[]>([]);

let draining = false;

export async function loadOutbox(): Promise<void> {
  if (keepsKeys) {
    const kept = await all<Item>("outbox");
    items.value = [...items.value, ...kept.sort((a, b) => b.timestamp - a.timestamp)];
  }
  effect(() => {
    if (phase.value === "online" && connections.value > 0) void drain();
  });
}

function change(id: string, to: Partial<Item>): void {
  items.value = items.value.map((item) => (item.id === id ? { ...item, ...to } : item));
}

/** Keep a signed packet and send it. Rejects if it cannot be kept; then it was not sent either. */
export async function put(packet: Packet): Promise<void> {
  if (items.value.filter(({ state }) => state !== "stored").length >= MOST) throw new Error("the outbox is full");
  const item: Item = {
    id: packet.packetId,
    text: packet.canonical,
    type: packet.contentType,
    timestamp: packet.timestamp,
    state: "waiting",
    note: "",
  };
  if (keepsKeys) await keep("outbox", item);
  items.value = [item, ...items.value.filter(({ id }) => id !== item.id)];
  void drain();
}

export async function discard(id: string): Promise<void> {
  if (keepsKeys) await drop("outbox", id);
  items.value = items.value.filter((item) => item.id !== id);
}

/** Send what waits, oldest first; of several tabs, one does it. */
export async function drain(): Promise<void> {
  if (draining || phase.value !== "online") return;
  draining = true;
  try {
    if ("locks" in navigator) await navigator.locks.request("strata-outbox", { ifAvailable: true }, async (lock) => void (lock && (await sendAll())));
    else await sendAll();
  } finally {
    draining = false;
  }
}

async function sendAll(): Promise<void> {
  for (;;) {
    const item = items.value.findLast(({ state }) => state === "waiting");
    if (item === undefined || phase.value !== "online") return;
    if (Date.now() / 1000 - item.timestamp > FRESH_SECONDS) {
      change(item.id, { state: "stale", note: "older than a day: relays refuse it. Nothing is signed anew by itself." });
      continue;
    }
    if (!(await send(item))) return;
  }
}

/** Whether to go on with the next. */
async function send(item: Item): Promise<boolean> {
  try {
    const ok = await request((id) => publishFrame(item.text, id));
    if (keepsKeys) await drop("outbox", item.id);
    change(item.id, { state: "stored", note: ok.duplicate === true ? "The relay had it already." : "" });
    return true;
  } catch (error) {
    if (!(error instanceof RequestFailed)) throw error;
    const advice = ["lost", "timeout", "offline"].includes(error.code) ? "again" : retryAdvice(error.code);
    if (advice === "never") {
      change(item.id, { state: "refused", note: `${error.reason} (${error.detail ?? error.code})` });
      return true;
    }
    change(item.id, { note: error.reason });
    if (advice === "authenticate" && chosen.value !== null && (await authenticate())) return true;
    setTimeout(() => void drain(), PAUSE);
    return false;
  }
}
