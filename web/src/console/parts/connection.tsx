// The state of the connection, in words: always in the corner, and above the page if something is wrong.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { to } from "../route.js";
import { unable } from "../state/checking.js";
import { heardAt, hurry, limitedUntil, phase, refused, wantsAuth } from "../state/link.js";
import { clock, line, span } from "../text.js";
import { Note, Unfetched } from "./bits.js";

const WORDS = { connecting: "Connecting…", online: "Connected", offline: "Offline", draining: "Relay restarting" } as const;
const MARKS = { connecting: "○", online: "●", offline: "✕", draining: "◐" } as const;

export function ConnectionState(): JSX.Element {
  return (
    <span class={`state ${phase.value}`} role="status">
      <span aria-hidden="true">{MARKS[phase.value]}</span> {WORDS[phase.value]}
    </span>
  );
}

/** Render the component again each second, for texts about elapsed or remaining time. */
function useSeconds(isRunning: boolean): void {
  const [, tick] = useState(0);
  useEffect(() => {
    if (!isRunning) return;
    const timer = setInterval(() => tick((ticks) => ticks + 1), 1000);
    return () => clearInterval(timer);
  }, [isRunning]);
}

export function Notices(): JSX.Element {
  const wait = Math.max(0, Math.ceil((limitedUntil.value - Date.now()) / 1000));
  useSeconds(wait > 0 || phase.value === "offline");
  return (
    <>
      {phase.value === "offline" && (
        <Note tone="warn" title="No connection to the relay">
          <p>
            {heardAt.value > 0 ? `Last heard ${span((Date.now() - heardAt.value) / 1000)} ago, at ${clock(heardAt.value / 1000)}. ` : ""}
            The page keeps trying, and will go on where it was cut off.{" "}
            {heardAt.value === 0 && "If this lasts, the relay may not take connections from this page (allowed_origins, public_url). "}
          </p>
          <button type="button" onClick={hurry}>
            Try now
          </button>
        </Note>
      )}
      {phase.value === "draining" && (
        <Note tone="warn" title="The relay is going away for a moment">
          <p>It announced this, as it does before a restart. The page will reconnect, and misses nothing.</p>
        </Note>
      )}
      {wait > 0 && (
        <Note tone="warn" title={`Rate limited: ${wait} s`}>
          <p>The relay asks for fewer requests from this address. The page asks again when the time is up.</p>
        </Note>
      )}
      {refused.value !== null && phase.value === "online" && (
        <Note tone="warn" title="The relay sends no new packets">
          <p>
            It says: {line(refused.value.reason, 300)} ({line(refused.value.code, 60)}). The page asks again.
          </p>
        </Note>
      )}
      {unable.value && <Unfetched title="Packets are not checked: a part of the console is missing" />}
      {wantsAuth.value && (
        <Note tone="warn" title="This relay shows packets to authenticated readers only">
          <p>
            <a href={to("publish")}>Choose or make an identity</a>, and the page authenticates with it.
          </p>
        </Note>
      )}
      {!isSecureContext && (
        <Note title="This page came over plain http">
          <p>
            Without https, browsers switch off their built-in cryptography: packets are checked more slowly, and keys are not
            kept. Open the page over https or at localhost to have both.
          </p>
        </Note>
      )}
    </>
  );
}
