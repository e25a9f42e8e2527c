// Small parts that every page uses.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { to } from "../route.js";
import type { Verdict } from "../state/rows.js";
import { moment, shortDid, shortId, shown } from "../text.js";

/** Call `ask` whenever `inputs` change; `over` aborts when they change again, or the component goes. */
export function useWhile(ask: (over: AbortSignal) => void, inputs: readonly unknown[]): void {
  useEffect(() => {
    const over = new AbortController();
    ask(over.signal);
    return () => over.abort();
  }, inputs);
}

export function Did({ did, whole = false }: { did: string; whole?: boolean }): JSX.Element {
  return (
    <a class="did" href={to("identity", did)} title={shown(did)}>
      {whole ? shown(did) : shortDid(did)}
    </a>
  );
}

export function PacketLink({ id }: { id: string }): JSX.Element {
  return (
    <a class="mono" href={to("packet", id)} title={shown(id)}>
      {shortId(id)}
    </a>
  );
}

export function Time({ seconds }: { seconds: number }): JSX.Element {
  return <span class="time">{moment(seconds)}</span>;
}

const VERDICTS: Record<string, [mark: string, word: string, tone: string]> = {
  unchecked: ["·", "not checked yet", "quiet"],
  checking: ["…", "being checked", "quiet"],
  valid: ["✓", "id, signature and key hold", "good"],
};

/** A verdict as a mark and a word, never by colour alone. */
export function Badge({ verdict, long = false }: { verdict: Verdict; long?: boolean }): JSX.Element {
  const [mark, word, tone] = VERDICTS[verdict] ?? ["✗", verdict.replaceAll("_", " "), "bad"];
  const short = verdict === "valid" && !long ? "checked" : word;
  return (
    <span class={`badge ${tone}`} title={word}>
      <span aria-hidden="true">{mark}</span> <span class={long ? "" : "badge-word"}>{short}</span>
    </span>
  );
}

export function Note({ tone = "quiet", title, children }: { tone?: string; title?: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class={`note ${tone}`}>
      {title !== undefined && <p class="note-title">{title}</p>}
      {children}
    </div>
  );
}

/** A note that a part of the console could not be fetched. */
export function Unfetched({ title }: { title: string }): JSX.Element {
  return (
    <Note tone="warn" title={title}>
      <p>
        The relay did not answer, or it has been renewed since this page was opened.{" "}
        <button type="button" onClick={() => location.reload()}>
          Load the console again
        </button>
      </p>
    </Note>
  );
}

/** A text with a button that copies it; if copying is not allowed, the text can be selected. */
export function Copy({ text, label }: { text: string; label: string }): JSX.Element {
  const [said, say] = useState("");
  const copy = async (): Promise<void> => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied");
    } catch {
      say("This browser does not let the page copy here: mark the text instead");
    }
    setTimeout(() => say(""), 3000);
  };
  return (
    <div class="copy">
      <pre class="code" tabIndex={0} role="group" aria-label={label}>
        {shown(text)}
      </pre>
      <button type="button" onClick={() => void copy()}>
        Copy
      </button>
      <span role="status" class="hint">
        {said}
      </span>
    </div>
  );
}
