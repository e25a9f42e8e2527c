// Packet: one packet in every detail, checked step by step.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Badge, Copy, Did, Note, PacketLink, Time, useWhile } from "../parts/bits.js";
import { RuleOn } from "../parts/rule-on.js";
import { route } from "../route.js";
import { type Answer, examine, type Step, unable } from "../state/checking.js";
import { connections, type Event, packetById, RequestFailed } from "../state/link.js";
import { openingUrl } from "../state/messages.js";
import { rowOf } from "../state/rows.js";
import { bytes, count, line, shown, start } from "../text.js";

const SHOWN_AT_FIRST = 20_000;
const ID = /^0x[0-9a-f]{64}$/;

type Found = { event: Event } | { failed: string } | null;

export function PacketPage(): JSX.Element {
  const id = route.value.subject;
  const [found, setFound] = useState<Found>(null);
  const times = connections.value;
  useWhile((over) => {
    if (!ID.test(id)) return setFound({ failed: "A packet id is 0x and 64 lowercase hex digits." });
    if (times === 0) return;
    packetById(id, over).then(
      (event) => over.aborted || setFound(event === undefined ? { failed: "The relay serves no packet with this id." } : { event }),
      (error: unknown) => over.aborted || setFound({ failed: error instanceof RequestFailed ? error.reason : String(error) }),
    );
  }, [id, times]);
  return (
    <section class="page packet">
      <h1>Packet</h1>
      <p class="mono subject">{shown(id)}</p>
      {found === null && <p class="hint">Reading…</p>}
      {found !== null && "failed" in found && (
        <Note title="Not here">
          <p>{line(found.failed, 300)}</p>
        </Note>
      )}
      {found !== null && "event" in found && <Whole key={id} event={found.event} />}
    </section>
  );
}

function Whole({ event }: { event: Event }): JSX.Element {
  const row = rowOf(event);
  const { packet } = event;
  const [answer, setAnswer] = useState<Answer | null>(null);
  useEffect(() => {
    let isOver = false;
    examine(row).then(
      (got) => isOver || setAnswer(got),
      () => undefined, // `unable` says why
    );
    return () => void (isOver = true);
  }, [event, unable.value]);
  const http = new URL(`packets/${row.id}`, new URL(".", location.href)).href;
  const signed = answer?.signed;
  const content = packet["content"] as Readonly<Record<string, unknown>>;
  const thread = content["thread_ref"];
  const said = typeof content["text"] === "string" ? content["text"] : "";
  return (
    <>
      <dl class="facts">
        <Fact name="Author">
          <Did did={row.author} whole />
        </Fact>
        <Fact name="Type">{line(row.type, 200)}</Fact>
        <Fact name="Received">
          <Time seconds={event.received_at} />
        </Fact>
        <Fact name="Written">
          <Time seconds={Number(packet["timestamp"])} /> <span class="hint">by the author's clock</span>
        </Fact>
        {typeof packet["expires_at"] === "number" && (
          <Fact name="Expires">
            <Time seconds={packet["expires_at"]} />
          </Fact>
        )}
        {typeof thread === "string" && (
          <Fact name="Answers">{ID.test(thread) ? <PacketLink id={thread} /> : line(thread, 80)}</Fact>
        )}
        <Fact name="Size">{bytes(new TextEncoder().encode(event.text).length)}</Fact>
      </dl>
      <Steps answer={answer} />
      {event.relay_annotations !== undefined && (
        <Note tone="warn" title="The relay's finding">
          <p>The relay could not prove what the packet says about its origin, and serves it with this note:</p>
          <Long text={JSON.stringify(event.relay_annotations, null, 2)} label="The relay's annotation" />
        </Note>
      )}
      <RuleOn kind="packet" subject={row.id} />
      <h2>Content</h2>
      {said !== "" && <blockquote class="said">{shown(start(said, SHOWN_AT_FIRST))}</blockquote>}
      <Long text={JSON.stringify(content, null, 2)} label="Content" />
      <h2>Bytes</h2>
      <p class="hint">
        {signed === undefined ? "The packet as the relay sent it." : "The packet as its author signed it: the relay sent it with another origin."} The
        id and the signature cover these bytes, without those two members.
      </p>
      <Long text={signed ?? event.text} label="The packet's bytes" />
      <h2>Fetch it elsewhere</h2>
      <Copy label="A command that prints this packet, verified" text={`strata get ${row.id} --relay ${openingUrl()}`} />
      <Copy label="The same by plain HTTP" text={`curl ${http}`} />
    </>
  );
}

function Fact({ name, children }: { name: string; children: ComponentChildren }): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

const STEPS: readonly Step["name"][] = ["form", "id", "signature", "key"];
const NAMES = { form: "Form", id: "Id", signature: "Signature", key: "Key" } as const;

function Steps({ answer }: { answer: Answer | null }): JSX.Element {
  return (
    <>
      <h2>
        Checked in this browser <Badge verdict={answer === null ? (unable.value ? "unchecked" : "checking") : (answer.verdict ?? "not_checked")} long />
      </h2>
      <ol class="steps">
        {STEPS.map((name) => {
          const step = answer?.steps?.find((each) => each.name === name);
          const mark = step === undefined ? "–" : step.holds ? "✓" : "✗";
          const words = step?.words ?? (answer === null ? "…" : "Not reached.");
          return (
            <li key={name} class={step === undefined ? "quiet" : step.holds ? "good" : "bad"}>
              <span class="mark" aria-hidden="true">
                {mark}
              </span>
              <b>{NAMES[name]}</b> <span class="words">{line(words, 300)}</span>
            </li>
          );
        })}
      </ol>
    </>
  );
}

/** A long text, of which only the first part is shown at first: a large packet must not freeze the page. */
function Long({ text, label }: { text: string; label: string }): JSX.Element {
  const [isWhole, show] = useState(false);
  const isCut = !isWhole && text.length > SHOWN_AT_FIRST;
  return (
    <>
      <pre class="code long" tabIndex={0} role="group" aria-label={label}>
        {shown(isCut ? start(text, SHOWN_AT_FIRST) : text)}
      </pre>
      {isCut && (
        <button type="button" onClick={() => show(true)}>
          Show all {count(text.length)} characters
        </button>
      )}
    </>
  );
}

