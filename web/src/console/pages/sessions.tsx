// Operator: who is connected, in every process of the relay, and how to end a session.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Did, Note } from "../parts/bits.js";
import { WithReason } from "../parts/with-reason.js";
import { relayNow, request } from "../state/link.js";
import { type Book, turn } from "../state/paging.js";
import { bytes, count, line, span } from "../text.js";

interface Session {
  readonly id: string;
  readonly opened_at: number;
  readonly address: string | null;
  readonly identity: string | null;
  readonly subscriptions: number;
  readonly publishes: number;
  readonly events: number;
  readonly held_bytes: number;
  readonly own: boolean;
}

interface Roll {
  readonly book: Book<Session>;
  readonly total: number;
  readonly silent: number;
}

/** Runs an action and shows the page what failed; resolves to whether it succeeded. */
type Attempt = (act: () => Promise<unknown>) => Promise<boolean>;

const PAGE = 50;
/** From how many bytes on the page shows what the relay holds in memory for a session. */
const NOTABLE = 10_000;
const LOOKS = 8;
const BETWEEN = 400;

/** Read sessions of a DID or of a network, or all; the page after `before` is added to it. */
async function ask(subject: string, before?: Roll): Promise<Roll> {
  const of = subject === "" ? {} : { kind: subject.startsWith("did:") ? "author" : "network", subject };
  const { book, answer } = await turn<Session>({ action: "sessions", limit: PAGE, ...of }, before?.book);
  return { book, total: answer.total ?? book.entries.length, silent: answer.silent ?? 0 };
}

export function Sessions({ attempt, say, ruled }: { attempt: Attempt; say: (words: string) => void; ruled: () => Promise<unknown> }): JSX.Element {
  const [roll, setRoll] = useState<Roll | null>(null);
  const [subject, setSubject] = useState("");
  const [isAsking, setAsking] = useState(false);
  const look = async (of = subject.trim(), before?: Roll): Promise<void> => {
    setAsking(true);
    await attempt(async () => setRoll(await ask(of, before)));
    setAsking(false);
  };
  useEffect(() => void look(""), []);
  const close = async (session: Session, reason: string): Promise<void> => {
    const isDone = await attempt(async () => {
      const { changed } = await request({ type: "MODERATE", action: "close", subject: session.id, reason });
      say(changed === true ? `Session ${session.id} is closed. Its client may come back: a ban keeps it out.` : `Session ${session.id} had ended already.`);
      let found = await ask(subject.trim());
      for (let looks = 1; looks < LOOKS && found.book.entries.some((each) => each.id === session.id); looks++) {
        await new Promise((done) => setTimeout(done, BETWEEN));
        found = await ask(subject.trim());
      }
      setRoll(found);
    });
    if (isDone) await ruled();
  };
  return (
    <section aria-labelledby="sessions" aria-busy={isAsking}>
      <h2 id="sessions">Open sessions</h2>
      <form
        role="search"
        aria-label="Open sessions"
        onSubmit={(event) => {
          event.preventDefault();
          void look();
        }}
      >
        <label class="find">
          <span class="label">Of a DID, an address or a network</span>
          <input value={subject} spellcheck={false} placeholder="all" onInput={({ currentTarget: { value } }) => setSubject(value)} />
        </label>
        <button type="submit" disabled={isAsking}>
          {isAsking ? "Asking every process…" : "Look again"}
        </button>
        {roll !== null && (
          <p class="hint">
            {count(roll.book.entries.length)} shown, {count(roll.total)} open in all
          </p>
        )}
      </form>
      {roll !== null && roll.silent > 0 && (
        <Note tone="warn" title="Some sessions are missing">
          <p>{roll.silent === 1 ? "One process has" : `${roll.silent} processes have`} given no answer in time. What they hold is not in this list.</p>
        </Note>
      )}
      {roll?.book.entries.length === 0 && <p class="hint">No such session is open.</p>}
      <ul class="rulings">
        {roll?.book.entries.map((session) => <OpenSession key={session.id} session={session} close={close} />)}
      </ul>
      {roll?.book.next !== undefined && (
        <button type="button" class="more" disabled={isAsking} onClick={() => void look(subject.trim(), roll)}>
          More sessions
        </button>
      )}
    </section>
  );
}

function OpenSession({ session, close }: { session: Session; close: (session: Session, reason: string) => Promise<void> }): JSX.Element {
  const { id, identity, address, own } = session;
  const age = span(Math.max(0, relayNow() - session.opened_at));
  return (
    <li>
      <span class="whose">{identity === null ? <span class="hint">anonymous</span> : <Did did={identity} />}</span>
      <span class="mono place">{address === null ? "—" : line(address, 60)}</span>
      <span class="hint" title={id}>
        open for {age} · {count(session.subscriptions)} {session.subscriptions === 1 ? "subscription" : "subscriptions"} · {count(session.publishes)} in ·{" "}
        {count(session.events)} out{session.held_bytes >= NOTABLE && ` · ${bytes(session.held_bytes)} held in memory for it`}
      </span>
      {own ? (
        <span class="hint own">this page</span>
      ) : (
        <WithReason
          word="Close"
          name={`Close the session ${id}`}
          question="Reason for closing it"
          doing="Close the session"
          isHarmful
          run={(reason) => close(session, reason)}
        />
      )}
    </li>
  );
}
