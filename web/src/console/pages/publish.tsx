// Publish: an identity, a packet, its exact bytes, and its outcome.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { byteHash, buildAt, type Packet } from "../../client/protocol/packets.js";
import { utf8 } from "../../client/protocol/bytes.js";
import { parseStrictly, isObject, type JsonObject } from "../../client/protocol/json.js";
import { Note, PacketLink } from "../parts/bits.js";
import { IdentityCard } from "../parts/identity-card.js";
import { keepText, kept } from "../state/drawer.js";
import { chosen } from "../state/keys.js";
import { discard, items, put } from "../state/outbox.js";
import { bytes, line, shown } from "../text.js";

const DRAFT = "strata-draft";

interface Draft {
  readonly type: string;
  readonly text: string;
  readonly isJson: boolean;
}

function draft(): Draft {
  try {
    const { type, text, isJson } = JSON.parse(kept(DRAFT) ?? "") as Draft;
    return { type: String(type), text: String(text), isJson: isJson === true };
  } catch {
    return { type: "POST", text: "", isJson: false };
  }
}

/** The content that was written. Throws an error that says what is wrong with it. */
function contentOf({ type, text, isJson }: Draft): JsonObject {
  if (type.trim() === "") throw new Error("A packet needs a type.");
  if (!isJson) {
    if (text === "") throw new Error("There is no text yet.");
    return { type: type.trim(), text };
  }
  const content = parseStrictly(text);
  if (!isObject(content)) throw new Error("The content has to be a JSON object.");
  if ("type" in content && content["type"] !== type.trim()) throw new Error("The type in the JSON differs from the one above.");
  return Object.assign(Object.create(null) as object, content, { type: type.trim() }) as JsonObject;
}

export function Publish(): JSX.Element {
  const [written, write] = useState(draft);
  const [ready, setReady] = useState<Packet | null>(null);
  const [wrong, setWrong] = useState("");
  const identity = chosen.value;
  const drafts = useRef(0);

  useEffect(() => {
    drafts.current++;
    setReady(null);
    keepText(DRAFT, JSON.stringify(written));
  }, [written, identity]);

  const prepare = async (): Promise<void> => {
    if (identity === null) return setWrong("Choose an identity first.");
    const signed = drafts.current;
    try {
      const timestamp = Math.floor(Date.now() / 1000);
      const nonce = crypto.getRandomValues(new Uint32Array(2)).join("-");
      const packet = await buildAt(identity, contentOf(written), { timestamp, nonce });
      if (signed !== drafts.current) return; // it was changed while this was signed
      setReady(packet);
      setWrong("");
    } catch (error) {
      setReady(null);
      setWrong(error instanceof Error ? error.message : String(error));
    }
  };
  const publish = async (): Promise<void> => {
    if (ready === null) return;
    try {
      await put(ready);
      setWrong("");
      write((now) => (now === written ? { ...now, text: "" } : now)); // unless it was changed meanwhile
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
    }
  };

  return (
    <section class="page publish">
      <h1>Publish</h1>
      <IdentityCard />
      <h2>Packet</h2>
      <form
        class="fields"
        onSubmit={(event) => {
          event.preventDefault();
          void prepare();
        }}
      >
        <label>
          <span class="label">Type</span>
          <input value={written.type} spellcheck={false} onInput={({ currentTarget: { value } }) => write({ ...written, type: value })} />
        </label>
        <fieldset class="choice">
          <legend class="label">Content</legend>
          <label>
            <input type="radio" name="form" checked={!written.isJson} onChange={() => write({ ...written, isJson: false })} /> text
          </label>
          <label>
            <input type="radio" name="form" checked={written.isJson} onChange={() => write({ ...written, isJson: true })} /> JSON
          </label>
        </fieldset>
        <label class="whole">
          <span class="label">{written.isJson ? "A JSON object; its type is the one above" : "Text"}</span>
          <textarea value={written.text} onInput={({ currentTarget: { value } }) => write({ ...written, text: value })} />
        </label>
        <p class="hint whole">
          The draft is kept in this browser until it is sent.{identity === null && " To send it, make or choose an identity first."}
        </p>
        <button type="submit" class={ready === null ? "primary" : ""} disabled={identity === null}>
          Show what will be sent
        </button>
      </form>
      {wrong !== "" && (
        <Note tone="bad" title="Not yet">
          <p role="alert">{line(wrong, 300)}</p>
        </Note>
      )}
      {ready !== null && <Preview packet={ready} publish={publish} />}
      <Outbox />
    </section>
  );
}

function Preview({ packet, publish }: { packet: Packet; publish: () => Promise<void> }): JSX.Element {
  return (
    <>
      <h2>What will be sent</h2>
      <p class="hint">
        {bytes(packet.sizeBytes)}, exactly these bytes. Whoever gets the packet can keep it and pass it on: it cannot be recalled.
      </p>
      <pre class="code long" tabIndex={0} role="group" aria-label="The packet's bytes">
        {shown(packet.canonical)}
      </pre>
      <p class="hint">
        Id <span class="mono">{byteHash(utf8(packet.signedText))}</span>
      </p>
      <button type="button" class="primary" onClick={() => void publish()}>
        Publish
      </button>
    </>
  );
}

const STATES = { waiting: ["…", "waits"], stored: ["✓", "stored"], refused: ["✗", "refused"] } as const;

function Outbox(): JSX.Element {
  return (
    <>
      <h2>Outbox</h2>
      {items.value.length === 0 ? (
        <p class="hint">Nothing is waiting. What you publish stays here until the relay has stored it, even if you close this page.</p>
      ) : (
        <ul class="outbox" aria-live="polite">
          {items.value.map((item) => (
            <li key={item.id} class={item.state}>
              <span class="badge">
                <span aria-hidden="true">{STATES[item.state][0]}</span> {STATES[item.state][1]}
              </span>
              <span class="type">{line(item.type, 60)}</span>
              {item.state === "stored" ? <PacketLink id={item.id} /> : <span class="mono">{item.id.slice(0, 18)}…</span>}
              <span class="hint">{line(item.note, 200)}</span>
              {item.state !== "stored" && (
                <button type="button" onClick={() => void discard(item.id)}>
                  Discard
                </button>
              )}
            </li>
          ))}
        </ul>
      )}
    </>
  );
}
