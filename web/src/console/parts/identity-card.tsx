// The identity that this browser signs with, where its key is, and what the relay grants it.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { choose, chosen, identities, keepsKeys } from "../state/keys.js";
import { phase } from "../state/link.js";
import { forget, make, take } from "../state/making.js";
import { acceptRelay, authenticate, authFailed, capabilities, changedRelay, speaksFor } from "../state/session.js";
import { line, shortDid, shown } from "../text.js";
import { Did, Note } from "./bits.js";

export function IdentityCard(): JSX.Element {
  const identity = chosen.value;
  const [failed, fail] = useState("");
  const [isImporting, setImporting] = useState(false);
  const [sure, setSure] = useState(false);
  const run = (act: () => Promise<void>) => async (): Promise<void> => {
    try {
      await act();
      fail("");
    } catch (error) {
      fail(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <section aria-label="Identity" class="card">
      {identities.value.length > 0 && (
        <label>
          <span class="label">Identity</span>
          <select
            value={identity?.did ?? ""}
            onChange={({ currentTarget: { value } }) => choose(identities.value.find(({ did }) => did === value) ?? null)}
          >
            <option value="">none</option>
            {identities.value.map(({ did }) => (
              <option key={did} value={did}>
                {shortDid(did)}
              </option>
            ))}
          </select>
        </label>
      )}
      {identity !== null && (
        <p>
          <Did did={identity.did} whole />
        </p>
      )}
      <p class="hint">
        {keepsKeys && (identity === null || identity.keyPair !== undefined)
          ? "Keys are kept in this browser, and nothing can read them out of it, this page included. But whoever serves this page decides what it signs: use a key here only if you trust this relay with it."
          : "This browser keeps no keys for this page, as over plain http or without Ed25519: one made here is gone when the page is closed."}
      </p>
      <p class="buttons">
        <button type="button" onClick={() => void run(make)()}>
          Make a new identity
        </button>
        <button type="button" aria-expanded={isImporting} onClick={() => setImporting(!isImporting)}>
          Use a key file…
        </button>
        {identity !== null && speaksFor.value !== identity.did && phase.value === "online" && (
          <button type="button" onClick={() => void authenticate(true)}>
            Authenticate
          </button>
        )}
        {identity !== null && (
          <button
            type="button"
            class={sure ? "danger" : ""}
            onClick={() => (sure ? void run(() => forget(identity))().then(() => setSure(false)) : setSure(true))}
            onBlur={() => setSure(false)}
          >
            {sure ? "Delete this key for good" : "Delete…"}
          </button>
        )}
      </p>
      {isImporting && <Import done={() => setImporting(false)} fail={fail} />}
      {failed !== "" && <p role="alert">{line(failed, 300)}</p>}
      <Standing />
    </section>
  );
}

function Import({ done, fail }: { done: () => void; fail: (words: string) => void }): JSX.Element {
  return (
    <label class="whole">
      <span class="label">A key file as `strata keygen` writes it; it is read here and not sent anywhere</span>
      <input
        type="file"
        accept=".json,application/json"
        onChange={({ currentTarget }) => {
          const file = currentTarget.files?.[0];
          if (file === undefined) return;
          if (file.size > 10_000) return fail("That is too large for a key file.");
          file
            .text()
            .then(take)
            .then(
              () => (fail(""), done()),
              (error: unknown) => fail(error instanceof Error ? error.message : String(error)),
            );
        }}
      />
    </label>
  );
}

/** The state of authentication, and what the relay grants. */
function Standing(): JSX.Element | null {
  const changed = changedRelay.value;
  if (changed !== null) {
    return (
      <Note tone="bad" title="This relay calls itself by another name than before">
        <p>
          It was <span class="mono">{shown(changed.known)}</span> and now says <span class="mono">{shown(changed.shown)}</span>. Nothing was
          signed for it. Somebody else may be answering at this address; or its operator has given it a new key.
        </p>
        <button type="button" onClick={() => (acceptRelay(), void authenticate(true))}>
          I know of the change: use the new name
        </button>
      </Note>
    );
  }
  if (authFailed.value !== "") return <p role="alert">The relay did not accept this identity: {line(authFailed.value, 300)}.</p>;
  if (speaksFor.value === null) return null;
  return (
    <p role="status" class="hint">
      <span aria-hidden="true">✓</span> The relay knows this page as {shortDid(speaksFor.value)}
      {capabilities.value.length > 0 && ` (${capabilities.value.map((name) => line(name, 30)).join(", ")})`}.
    </p>
  );
}
