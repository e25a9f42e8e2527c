// A chat over a relay: a reliable channel in the browser. Messages survive reloads, lost connections and lost packets.
// ?relay=wss://…&room=lobby. For tests, &loss=0.2&seed=7 loses packets, and &pace=0.1 divides all waits by ten.
import { browserIdentity, Identity, Relay } from "strata-client";
import { type ChannelMessage, indexedDbChannelStore, memoryChannelStore, openChannel, type ReliableChannel } from "strata-client/channels";

import { type Losses, lossy } from "./lossy.js";

const STATES = { received: "", sending: "sending…", sent: "sent", acknowledged: "delivered", failed: "refused by the relay" };
const MARKS = { received: "", sending: "◌", sent: "✓", acknowledged: "✓✓", failed: "✗" };
const TITLES = {
  received: "",
  sending: "On its way to the relay",
  sent: "The relay has it; nobody has confirmed it yet",
  acknowledged: "Another participant has it",
  failed: "The relay will not take it",
};

const parameters = new URLSearchParams(location.search);
const find = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const [list, scroll, text] = [find("messages"), find("scroll"), find<HTMLTextAreaElement>("text")];

// A reader at the end stays at the end when messages arrive or the page is resized; a reader further up stays there.
let isAtEnd = true;
scroll.addEventListener("scroll", () => (isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40));
new ResizeObserver(() => {
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
}).observe(scroll);

/** An element with this text. */
function make(name: string, words = "", classes = ""): HTMLElement {
  const element = document.createElement(name);
  element.textContent = words;
  element.className = classes;
  return element;
}

/** A short form of a DID: its end, where keys differ. */
function short(did: string): string {
  return `…${did.slice(-8)}`;
}

function read(payload: Uint8Array): string {
  return new TextDecoder().decode(payload);
}

async function open(address: string, room: string): Promise<void> {
  const pace = Number(parameters.get("pace") ?? 1);
  const losses: Losses = { out: 0, in: 0 };
  const handed: string[] = [];
  let relay: Relay | undefined;
  let channel: ReliableChannel | undefined;
  let isPlanned = false;
  // At most once a frame, however many messages arrive.
  const changed = () => {
    if (isPlanned) return;
    isPlanned = true;
    setTimeout(() => {
      isPlanned = false;
      if (relay !== undefined) show(relay, channel, { address, room, me: me.did, isKept, losses });
    }, 16);
  };

  find("chat").hidden = false;
  find("room").textContent = room;
  document.title = `${room} – chat`;
  const isKept = globalThis.crypto?.subtle !== undefined && globalThis.isSecureContext;
  const me = isKept ? await browserIdentity("chat") : await Identity.generate();
  relay = new Relay(address, { identity: me, connectTimeout: Infinity, backoffCap: 10 * Math.min(1, pace), onChange: changed });
  relay.open().catch(changed); // not awaited: kept messages are shown without a relay, and new ones wait
  const share = Number(parameters.get("loss") ?? 0);
  const waiting = setTimeout(() => (find("link").textContent = "This room is open in another tab: close it there to go on here"), 1500);
  channel = await openChannel(share > 0 ? lossy(relay, share, Number(parameters.get("seed") ?? 1), losses) : relay, {
    id: room,
    topic: `/chat/1/${room}/proto`,
    identity: me,
    store: isKept ? indexedDbChannelStore(`${address} ${room}`) : memoryChannelStore(),
    onMessage: (message) => handed.push(message.id),
    onChange: changed,
    resendAfter: 10 * pace,
    acknowledgeWithin: 2 * pace,
    syncEvery: 30 * pace,
  });
  clearTimeout(waiting);
  Object.assign(globalThis, { chat: { channel, relay, losses, handed } }); // for inspection in the browser's console

  const say = async () => {
    const words = text.value.trim();
    if (words === "") return;
    text.value = "";
    text.style.height = "";
    try {
      await (channel as ReliableChannel).send(new TextEncoder().encode(words));
      isAtEnd = true;
    } catch (error) {
      text.value = words;
      find("standing").textContent = `Not sent: ${(error as Error).message}`;
    }
  };
  find("say").addEventListener("submit", (event) => {
    event.preventDefault();
    void say();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    void say();
  });
  changed();
  text.focus();
}

interface About {
  address: string;
  room: string;
  me: string;
  isKept: boolean;
  losses: Losses;
}

function show(relay: Relay, channel: ReliableChannel | undefined, about: About): void {
  find("link").textContent = relay.isConnected
    ? "Connected"
    : relay.failure === undefined
      ? "Offline: what you write is sent later"
      : `The relay refuses: ${relay.failure.message}`;
  find("link").className = relay.isConnected ? "good" : "warn";
  if (channel === undefined) return;
  const { messages, status } = channel;
  showMessages(messages, about.me);
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  find("empty").hidden = messages.length > 0;
  const standing = [
    status.missing > 0 ? `${count(status.missing, "message")} missing: looking in the relay’s history and asking around` : "",
    status.heldBack > 0 ? `${count(status.heldBack, "message")} waiting for ${status.heldBack === 1 ? "its" : "their"} turn` : "",
  ];
  find("standing").textContent = standing.filter((each) => each !== "").join(" · ");
  facts({
    "You are": about.me,
    Relay: about.address,
    "Found in the relay’s history": String(status.repaired),
    "Sent again": String(status.resent),
    "Given up": String(status.lost),
    ...(parameters.has("loss") ? { "Lost on purpose": `${about.losses.out} sent, ${about.losses.in} received` } : {}),
    Privacy: "Everybody who can read the relay can read this room.",
    Keeping: about.isKept
      ? "Your key and the room are kept in this browser."
      : "This page is not secure (https): the key and the room are forgotten when you leave.",
  });
}

/** Show one row for each message, by its id; a late message is inserted at its place. */
function showMessages(messages: readonly ChannelMessage[], me: string): void {
  let before: ChannelMessage | undefined;
  messages.forEach((message, at) => {
    let row = list.children[at] as HTMLElement | undefined;
    if (row?.dataset["id"] !== message.id) {
      const known = [...list.children].find((each) => (each as HTMLElement).dataset["id"] === message.id) as HTMLElement;
      row = known ?? makeRow(message, me);
      list.insertBefore(row, list.children[at] ?? null);
    }
    const follows = before?.author === message.author && (message.sentAt ?? 0) - (before?.sentAt ?? 0) < 300;
    row.classList.toggle("same", follows);
    if (message.isOwn && row.dataset["state"] !== message.state) {
      row.dataset["state"] = message.state;
      const state = row.querySelector(".state") as HTMLElement;
      state.textContent = `${MARKS[message.state]} ${STATES[message.state]}`;
      state.title = TITLES[message.state];
    }
    before = message;
  });
  while (list.children.length > messages.length) list.lastElementChild?.remove();
}

function makeRow(message: ChannelMessage, me: string): HTMLElement {
  const row = make("li", "", message.isOwn ? "own" : "");
  row.dataset["id"] = message.id;
  const who = make("span", message.author === undefined ? "unproven author" : short(message.author), "who");
  if (message.author === me) who.textContent = message.isOwn ? "You" : "You, on another device";
  who.title = message.author ?? "Somebody repeated this message without its author’s signature";
  const head = make("p", "", "head");
  head.append(who);
  const foot = make("p", "", "foot");
  if (message.sentAt !== undefined) {
    const at = new Date(message.sentAt * 1000);
    const isToday = at.toDateString() === new Date().toDateString();
    const day = isToday ? {} : ({ day: "numeric", month: "short" } as const);
    const time = make("time", at.toLocaleString([], { ...day, hour: "2-digit", minute: "2-digit" })) as HTMLTimeElement;
    time.dateTime = at.toISOString();
    time.title = at.toLocaleString();
    foot.append(time);
  }
  if (message.isOwn) foot.append(make("span", "", "state"));
  const bubble = make("div", "", "bubble");
  const said = make("p", read(message.payload), "said");
  said.dir = "auto";
  bubble.append(said, foot);
  row.append(head, bubble);
  return row;
}

function facts(all: Record<string, string>): void {
  const rows = Object.entries(all).flatMap(([name, value]) => [make("dt", name), make("dd", value)]);
  if (find("facts").textContent !== rows.map((row) => row.textContent).join("")) find("facts").replaceChildren(...rows);
}

function count(number: number, noun: string): string {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

const [address, room] = [parameters.get("relay"), parameters.get("room")];
if (address === null || room === null) {
  find("join").hidden = false;
  find("link").textContent = "";
  find("join").addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = new FormData(find<HTMLFormElement>("join"));
    location.search = new URLSearchParams({ relay: String(chosen.get("relay")), room: String(chosen.get("room")) }).toString();
  });
} else {
  open(address, room).catch((error: unknown) => {
    find("link").textContent = `The room cannot be opened: ${(error as Error).message}`;
    find("link").className = "bad";
  });
}
