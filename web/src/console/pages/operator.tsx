// Operator: who is connected, what this relay does not serve, who decided so, and how to undo it.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { Did, Note, PacketLink } from "../parts/bits.js";
import { IdentityCard } from "../parts/identity-card.js";
import { WithReason } from "../parts/with-reason.js";
import { route } from "../route.js";
import { chosen } from "../state/keys.js";
import { relayNow, request, RequestFailed } from "../state/link.js";
import { type Book, EMPTY, turn } from "../state/paging.js";
import { manifest } from "../state/relay.js";
import { authFailed, capabilities, speaksFor } from "../state/session.js";
import { line, moment } from "../text.js";
import { Sessions } from "./sessions.js";

const KINDS = { author: "an author", packet: "a packet", media: "a media hash", type: "a type", network: "a network" } as const;
const SPANS = { "": "until it is lifted", "3600": "for an hour", "86400": "for a day", "604800": "for a week", "2592000": "for 30 days" } as const;

type Kind = keyof typeof KINDS;

interface Ban {
  readonly kind: Kind;
  readonly subject: string;
  readonly reason: string;
  readonly actor: string;
  readonly expires_at: number | null;
  readonly created_at: number;
}

interface Ruled extends Omit<Ban, "kind" | "expires_at" | "created_at"> {
  readonly kind: Kind | "session";
  readonly before: { readonly identity?: string | null } | null;
  readonly number: number;
  readonly at: number;
  readonly via: string;
  readonly act: string;
}

const entries = async <T,>(action: "list" | "log", before?: Book<T>): Promise<Book<T>> => (await turn({ action, limit: 50 }, before)).book;

const words = (error: unknown): string =>
  error instanceof RequestFailed ? `${error.reason}${error.detail === undefined ? "" : ` (${error.detail.replaceAll("_", " ")})`}` : String(error);

export function Operator(): JSX.Element {
  const may = capabilities.value.includes("operate");
  const operator = useRef<string | null>(null);
  if (may) operator.current = speaksFor.value;
  // After a lost connection the page authenticates again: meanwhile, what is being written must stay.
  const isReturning = speaksFor.value === null && authFailed.value === "" && operator.current === (chosen.value?.did ?? "");
  const exists = manifest.value?.auth.capabilities.includes("operate") ?? true;
  return (
    <section class="page operator">
      <h1>Operator</h1>
      {!exists && (
        <Note title="This relay has no operators">
          <p>Its setting `operators` names none, so nobody can moderate from here. `relayd ban` on its machine still works.</p>
        </Note>
      )}
      {exists && !may && !isReturning && (
        <>
          <p>To moderate, authenticate as one of this relay's operators.</p>
          <IdentityCard />
          {speaksFor.value !== null && (
            <Note tone="warn" title="This identity is not an operator here">
              <p>The relay knows who you are, but its setting `operators` does not name this DID.</p>
            </Note>
          )}
        </>
      )}
      {(may || isReturning) && <Desk key={operator.current} />}
    </section>
  );
}

function Desk(): JSX.Element {
  const [bans, setBans] = useState<Book<Ban>>(EMPTY);
  const [log, setLog] = useState<Book<Ruled>>(EMPTY);
  const [said, say] = useState("");
  const [failed, fail] = useState("");
  const attempt = async (act: () => Promise<unknown>): Promise<boolean> => {
    try {
      await act();
      fail("");
      return true;
    } catch (error) {
      fail(words(error));
      return false;
    }
  };
  const refresh = (): Promise<boolean> =>
    attempt(async () => {
      setBans(await entries<Ban>("list"));
      setLog(await entries<Ruled>("log"));
    });
  useEffect(() => void refresh(), []);
  const rule = async (action: "ban" | "unban", kind: Kind, subject: string, reason: string, seconds = 0): Promise<boolean> => {
    const until = seconds > 0 ? { expires_at: relayNow() + seconds } : {};
    const done = await attempt(() => request({ type: "MODERATE", action, kind, subject, reason, ...until }));
    if (done) {
      const [off, on] = kind === "packet" ? ["removed", "restored"] : ["banned", "no longer banned"];
      say(`${line(subject, 60)} is ${action === "ban" ? off : on}. Every process follows within two seconds.`);
      await refresh();
    }
    return done;
  };
  return (
    <>
      <Form rule={rule} />
      <p role="status" class="done">
        {said}
      </p>
      {failed !== "" && (
        <Note tone="bad" title="Not done">
          <p role="alert">{line(failed, 300)}</p>
        </Note>
      )}
      <Sessions attempt={attempt} say={say} ruled={refresh} />
      <h2>In force</h2>
      {bans.entries.length === 0 && <p class="hint">Nothing is banned or removed.</p>}
      <ul class="rulings">
        {bans.entries.map((ban) => (
          <InForce key={ban.kind + ban.subject} ban={ban} rule={rule} />
        ))}
      </ul>
      {bans.next !== undefined && (
        <button type="button" onClick={() => void attempt(async () => setBans(await entries("list", bans)))}>
          More
        </button>
      )}
      <h2>Log of rulings</h2>
      <Log log={log} />
      {log.next !== undefined && (
        <button type="button" onClick={() => void attempt(async () => setLog(await entries("log", log)))}>
          Older rulings
        </button>
      )}
      <p class="hint">Erasing for good cannot be undone, so it can only be done on the relay's own machine.</p>
    </>
  );
}

type Rule = (action: "ban" | "unban", kind: Kind, subject: string, reason: string, seconds?: number) => Promise<boolean>;

function Form({ rule }: { rule: Rule }): JSX.Element {
  const asked = route.value.query;
  const [kind, setKind] = useState<Kind>(() => (Object.hasOwn(KINDS, asked.get("kind") ?? "") ? (asked.get("kind") as Kind) : "author"));
  const [subject, setSubject] = useState(asked.get("subject") ?? "");
  const [reason, setReason] = useState("");
  const [seconds, setSeconds] = useState("");
  return (
    <form
      class="fields card"
      aria-label="A new ruling"
      onSubmit={(event) => {
        event.preventDefault();
        void rule("ban", kind, subject.trim(), reason.trim(), Number(seconds)).then((done) => {
          if (!done) return;
          setSubject("");
          setReason("");
        });
      }}
    >
      <label>
        <span class="label">Ban or remove</span>
        <select value={kind} onChange={({ currentTarget: { value } }) => setKind(value as Kind)}>
          {Object.entries(KINDS).map(([name, text]) => (
            <option key={name} value={name}>
              {text}
            </option>
          ))}
        </select>
      </label>
      <label class="grow">
        <span class="label">{kind === "author" ? "DID" : kind === "packet" ? "Packet id" : kind === "network" ? "Address or network" : "Which"}</span>
        <input required value={subject} spellcheck={false} onInput={({ currentTarget: { value } }) => setSubject(value)} />
      </label>
      <label>
        <span class="label">For how long</span>
        <select value={seconds} onChange={({ currentTarget: { value } }) => setSeconds(value)}>
          {Object.entries(SPANS).map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      </label>
      <label class="grow">
        <span class="label">Reason, as you would tell the author</span>
        <input required maxLength={1000} value={reason} onInput={({ currentTarget: { value } }) => setReason(value)} />
      </label>
      <button type="submit" class="danger">
        {kind === "packet" ? "Remove" : "Ban"}
      </button>
    </form>
  );
}

function Subject({ kind, subject }: { kind: Kind | "session"; subject: string }): JSX.Element {
  if (kind === "author") return <Did did={subject} />;
  if (kind === "packet") return <PacketLink id={subject} />;
  return <span class="mono">{line(subject, 100)}</span>;
}

function InForce({ ban, rule }: { ban: Ban; rule: Rule }): JSX.Element {
  return (
    <li>
      <span class="type">{KINDS[ban.kind] ?? line(ban.kind, 20)}</span>
      <Subject kind={ban.kind} subject={ban.subject} />
      <span class="hint">
        {line(ban.reason, 200)} · {ban.expires_at === null ? "until it is lifted" : `until ${moment(ban.expires_at)}`}
      </span>
      <WithReason
        word="Undo"
        name={`Undo: ${KINDS[ban.kind]} ${line(ban.subject, 40)}`}
        question="Reason for undoing it"
        doing={ban.kind === "packet" ? "Restore" : "Lift the ban"}
        run={(reason) => rule("unban", ban.kind, ban.subject, reason)}
      />
    </li>
  );
}

const ACTS: Readonly<Record<string, string>> = { ban: "banned", unban: "lifted", expire: "ended by itself", erase: "erased", close: "session closed" };
const OF_PACKETS: Readonly<Record<string, string>> = { ban: "removed", unban: "restored" };

function Log({ log }: { log: Book<Ruled> }): JSX.Element {
  if (log.entries.length === 0) return <p class="hint">No ruling has been made here.</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Log of rulings">
      <table>
        <thead>
          <tr>
            <th scope="col">When</th>
            <th scope="col">Ruling</th>
            <th scope="col">Whom or what</th>
            <th scope="col">Reason</th>
            <th scope="col">By</th>
          </tr>
        </thead>
        <tbody>
          {log.entries.map((entry) => (
            <tr key={entry.number}>
              <td>{moment(entry.at)}</td>
              <td>{(entry.kind === "packet" ? OF_PACKETS[entry.act] : undefined) ?? ACTS[entry.act] ?? line(entry.act, 20)}</td>
              <td>
                {entry.kind === "session" && entry.before?.identity ? <Did did={entry.before.identity} /> : <Subject kind={entry.kind} subject={entry.subject} />}
              </td>
              <td data-label="Reason">{line(entry.reason, 300)}</td>
              <td data-label="By">
                {entry.actor.startsWith("did:") ? <Did did={entry.actor} /> : line(entry.actor, 60)} ({line(entry.via, 20)})
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
