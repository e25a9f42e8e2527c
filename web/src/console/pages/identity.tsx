// Identity: what a DID's keys were and are, computed here from its signed events.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { Note, PacketLink, Time, useWhile } from "../parts/bits.js";
import { PacketList } from "../parts/list.js";
import { RuleOn } from "../parts/rule-on.js";
import { route, to } from "../route.js";
import { historyOf, type KeyHistory, type KeyWindow } from "../state/checking.js";
import { connections, page, relayNow, RequestFailed } from "../state/link.js";
import { type PacketRow, rowOf } from "../state/rows.js";
import { line, moment, shown } from "../text.js";

const DID = /^did:[a-z0-9]+:[A-Za-z0-9._:%-]{1,1000}$/;
const LATEST = 20;

interface Known {
  readonly history: KeyHistory;
  readonly rows: readonly PacketRow[];
}

async function read(did: string, over: AbortSignal): Promise<Known> {
  const [history, latest] = await Promise.all([historyOf(did, over), page({ authors: [did], limit: LATEST }, over)]);
  if (history === undefined) throw new Error("The keys could not be worked out.");
  return { history, rows: latest.events.map(rowOf).filter(({ author }) => author === did) };
}

export function Identity(): JSX.Element {
  const did = route.value.subject;
  const [known, setKnown] = useState<Known | null>(null);
  const [failed, fail] = useState("");
  const times = connections.value;
  useWhile((over) => {
    if (!DID.test(did)) return fail("A DID begins with did:, a method and a colon.");
    if (times === 0) return;
    read(did, over).then(
      (found) => {
        if (over.aborted) return;
        fail("");
        setKnown(found);
      },
      (error: unknown) => over.aborted || fail(error instanceof RequestFailed ? error.reason : String(error)),
    );
  }, [did, times]);
  return (
    <section class="page identity">
      <h1>Identity</h1>
      <p class="mono subject">{shown(did)}</p>
      {failed !== "" && (
        <Note title="Not here">
          <p>{line(failed, 300)}</p>
        </Note>
      )}
      {known === null && failed === "" && <p class="hint">Reading…</p>}
      {known !== null && <Whole did={did} known={known} />}
    </section>
  );
}

function Whole({ did, known: { history, rows } }: { did: string; known: Known }): JSX.Element {
  return (
    <>
      {history.conflict !== null && (
        <Note tone="bad" title="No key of this DID counts">
          <p>{line(history.conflict, 300)}</p>
        </Note>
      )}
      {history.refused > 0 && (
        <Note tone="warn" title={`${history.refused} identity packets are not valid`}>
          <p>The relay serves them, but by the rules of key chains they change nothing.</p>
        </Note>
      )}
      <h2>Keys now</h2>
      <Keys keys={history.keys} />
      <p class="hint">Worked out in this browser from signed packets. Only the times of receipt come from the relay.</p>
      <h2>History</h2>
      {history.events.length === 0 ? (
        <p>
          {history.keys.length === 0
            ? "Nothing has been published about this DID, and a DID of this kind carries no key."
            : "The DID itself is the key: nothing has been published about it."}
        </p>
      ) : (
        <ol class="timeline">
          {history.events.map((event) => (
            <li key={event.id} class={event.pending ? "pending" : ""}>
              <Time seconds={event.receivedAt} />
              <span class="words">
                <b>{line(event.words, 80)}</b>
                {event.pending && " (pending: it takes effect after a delay, unless it is vetoed)"}
              </span>
              <PacketLink id={event.id} />
            </li>
          ))}
        </ol>
      )}
      {history.document !== null && (
        <p class="hint">
          Current document: <span class="mono">{shown(history.document)}</span>
        </p>
      )}
      <RuleOn kind="author" subject={did} />
      <h2>Latest packets</h2>
      {rows.length === 0 ? <p>None is stored here.</p> : <PacketList rows={rows} label="Latest packets of this author" />}
      {rows.length === LATEST && (
        <p>
          <a href={to("search", "", { q: did })}>All packets of this author</a>
        </p>
      )}
    </>
  );
}

/** Whether the key's window has ended, but for the clock skew. */
function isEnding({ standing, validUntil }: KeyWindow): boolean {
  return standing === "valid" && validUntil > 0 && validUntil < relayNow();
}

const MARKS: Readonly<Record<string, string>> = { valid: "✓", revoked: "✗", expired: "–", not_yet_valid: "…", in_conflict: "✗" };

function Keys({ keys }: { keys: readonly KeyWindow[] }): JSX.Element {
  if (keys.length === 0) return <p>No key is known here.</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Keys">
      <table>
        <thead>
          <tr>
            <th scope="col">Key</th>
            <th scope="col">Standing</th>
            <th scope="col">From</th>
            <th scope="col">Until</th>
            <th scope="col">For</th>
          </tr>
        </thead>
        <tbody>
          {keys.map((key) => (
            <tr key={key.keyId + key.publicKey}>
              <td class="mono" title={shown(key.publicKey)}>
                {shown(key.publicKey.slice(0, 14))}…
              </td>
              <td class={key.standing === "valid" ? "good" : "bad"}>
                <span aria-hidden="true">{MARKS[key.standing] ?? "?"}</span> {line(key.standing.replaceAll("_", " "), 40)}
                {isEnding(key) && " a little longer: clocks may differ"}
              </td>
              <td data-label="From">{key.validFrom > 0 ? moment(key.validFrom) : "the beginning"}</td>
              <td data-label="Until">{key.revokedAt !== null ? moment(key.revokedAt) : key.validUntil > 0 ? moment(key.validUntil) : "open"}</td>
              <td data-label="For">{key.recovery ? "recovery" : "signing"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
