// The identity that this page has authenticated as on its connection, and the relay DID that it expects.

import { effect, signal } from "@preact/signals";

import { checkChallenge, signingInput } from "../../client/protocol/auth.js";
import { hex } from "../../client/protocol/bytes.js";
import { InvalidMessage } from "../../client/protocol/errors.js";
import type { AuthChallenge } from "../../client/protocol/wire.js";
import { keepText, kept } from "./drawer.js";
import { chosen, identities } from "./keys.js";
import { authenticated, challenge, connections, reconnect, request, RequestFailed, wantsAuth } from "./link.js";

const PIN = "strata-relay-id";
/** Failures on one connection after which only a person may retry; after five a relay closes permanently. */
const MOST_FAILURES = 3;

export const speaksFor = signal<string | null>(null);
export const capabilities = signal<readonly string[]>([]);
/** Why the last attempt failed, in words; empty if it succeeded. */
export const authFailed = signal("");
/** The DID that this relay had, and the one that it shows now, for which nothing is signed. */
export const changedRelay = signal<{ known: string; shown: string } | null>(null);

let wanted = false;
let trying: Promise<boolean> | null = null;
/** The identity whose authentication has failed on this connection, and how often. */
let failures = { did: "", count: 0 };

function pin(): string | undefined {
  return kept(PIN) ?? undefined;
}

/** Accept the relay's new DID from now on; called when a person has decided so. */
export function acceptRelay(): void {
  keepText(PIN, null);
  changedRelay.value = null;
}

/**
 * Prove the chosen identity, now and after each reconnect. Resolves to whether the relay accepted it. After several
 * failures nothing is tried, unless `byHand` says that a person asked for it.
 */
export function authenticate(byHand = false): Promise<boolean> {
  // A challenge can be answered only once, and several callers may want the session authenticated.
  return (trying ??= attempt(byHand).finally(() => (trying = null)));
}

async function attempt(byHand: boolean): Promise<boolean> {
  const identity = chosen.value;
  if (identity === null) return false;
  if (failures.did !== identity.did) failures = { did: identity.did, count: 0 };
  if (failures.count >= MOST_FAILURES && !byHand) return false;
  wanted = true;
  const spoken = speaksFor.value;
  if (spoken !== null) {
    if (spoken !== identity.did) reconnect(); // and then authenticate as the identity chosen now
    return spoken === identity.did; // no challenge follows a success; a further refusal concerns this identity
  }
  try {
    const asked = await nextChallenge();
    const known = pin();
    checkChallenge(asked, known);
    const signature = await identity.sign(signingInput(asked.challenge, asked.server_id));
    keepText(PIN, asked.server_id);
    const ok = await request({
      type: "AUTH",
      author_id: identity.did,
      challenge: asked.challenge,
      signature: `0x${hex(signature)}`,
    });
    speaksFor.value = identity.did;
    capabilities.value = ok.capabilities ?? [];
    authFailed.value = "";
    authenticated();
    return true;
  } catch (error) {
    fail(error);
    return false;
  }
}

function fail(error: unknown): void {
  failures.count++;
  speaksFor.value = null;
  capabilities.value = [];
  if (error instanceof InvalidMessage && error.detail === "server_id_unexpected") {
    changedRelay.value = { known: pin() ?? "", shown: challenge.value?.server_id ?? "" };
    wanted = false;
  }
  const detail = error instanceof RequestFailed && error.detail !== undefined ? ` (${error.detail.replaceAll("_", " ")})` : "";
  authFailed.value = (error instanceof Error ? error.message : String(error)) + detail;
}

/** The challenge of this connection. Rejects if the relay sends none within ten seconds: it requires no AUTH. */
function nextChallenge(): Promise<AuthChallenge> {
  return new Promise((resolve, reject) => {
    const stop = effect(() => {
      if (challenge.value !== null) resolve(challenge.value as unknown as AuthChallenge);
    });
    setTimeout(() => {
      stop();
      reject(new Error("the relay has sent nothing to sign")); // has no effect if it has sent a challenge
    }, 10_000);
  });
}

/** Authenticate if the relay requires it, and again on each new connection; end the session of a deleted identity. */
export function keepAuthenticated(): void {
  effect(() => {
    const isGone = identities.value.every(({ did }) => did !== speaksFor.peek());
    if (isGone && speaksFor.peek() !== null) reconnect();
  });
  effect(() => {
    const isConnected = connections.value > 0;
    speaksFor.value = null;
    capabilities.value = [];
    failures.count = 0;
    if (wanted && isConnected) queueMicrotask(() => void authenticate());
  });
  effect(() => {
    if (wantsAuth.value && chosen.value !== null && changedRelay.peek() === null) queueMicrotask(() => void authenticate());
  });
}
