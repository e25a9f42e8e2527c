// A button for a serious action: it asks for the reason first, which also serves as confirmation.

import type { JSX } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

interface Props {
  /** The button's text, and its accessible name, which distinguishes it from others in a list. */
  readonly word: string;
  readonly name: string;
  /** The field's label, and the text of the button that does it. */
  readonly question: string;
  readonly doing: string;
  readonly isHarmful?: boolean;
  readonly run: (reason: string) => Promise<unknown>;
}

export function WithReason({ word, name, question, doing, isHarmful = false, run }: Props): JSX.Element {
  const [isAsking, setAsking] = useState(false);
  const [reason, setReason] = useState("");
  const field = useRef<HTMLInputElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const wasAsking = useRef(false);
  useLayoutEffect(() => {
    if (isAsking) field.current?.focus();
    else if (wasAsking.current) button.current?.focus();
    wasAsking.current = isAsking;
  }, [isAsking]);
  if (!isAsking)
    return (
      <button ref={button} type="button" onClick={() => setAsking(true)} aria-label={name}>
        {word}…
      </button>
    );
  return (
    <form
      class="undo"
      onSubmit={(event) => {
        event.preventDefault();
        void run(reason.trim());
      }}
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        setAsking(false);
      }}
    >
      <label>
        <span class="label">{question}</span>
        <input ref={field} required maxLength={1000} value={reason} onInput={({ currentTarget: { value } }) => setReason(value)} />
      </label>
      <button type="submit" class={isHarmful ? "danger" : "primary"}>
        {doing}
      </button>
      <button type="button" onClick={() => setAsking(false)}>
        Leave it
      </button>
    </form>
  );
}
