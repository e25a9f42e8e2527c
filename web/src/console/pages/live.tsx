// Live: the packets that the relay accepts, as it accepts them.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { Copy, Note } from "../parts/bits.js";
import { PacketList } from "../parts/list.js";
import { phase, wantsAuth } from "../state/link.js";
import { matches, type Row } from "../state/rows.js";
import { announced, behind, held, isBehind, jump, pause, paused, ready, received, rows, skipped, tally } from "../state/tail.js";
import { openingUrl } from "../state/messages.js";
import { singleKeys, switchSingleKeys } from "../state/shortcuts.js";
import { to } from "../route.js";
import { count, span } from "../text.js";

export function Live(): JSX.Element {
  const [wanted, want] = useState("");
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const all = rows.value;
  const found: readonly Row[] = words.length === 0 ? all : all.filter((row) => row.kind === "gap" || matches(row, words));
  const isEmpty = ready.value && all.length === 0 && !paused.value;
  return (
    <section class="page live">
      <div class="bar">
        <h1>Live</h1>
        <label class="find">
          <span class="label">Filter</span>
          <input
            data-find
            type="search"
            value={wanted}
            placeholder="words, a type, part of a DID"
            onInput={({ currentTarget }) => want(currentTarget.value)}
          />
        </label>
        <button type="button" class={paused.value ? "primary" : ""} aria-pressed={paused.value} onClick={() => pause()}>
          {paused.value ? "Resume" : "Pause"}
        </button>
        {paused.value && <span class="hint">{count(held.value)} new</span>}
      </div>
      {!isEmpty && <Counters found={words.length > 0 ? found.length : null} />}
      {isBehind.value && (
        <Note tone="warn" title={`${span(behind.value)} behind`}>
          <p>The page is catching up: what it shows arrived a while ago.</p>
          <button type="button" onClick={jump}>
            Jump to now
          </button>
        </Note>
      )}
      {!ready.value && phase.value !== "offline" && !wantsAuth.value && <p class="hint">Reading the last packets…</p>}
      {isEmpty && <Empty />}
      {found.length > 0 && <PacketList rows={found} label="Packets, newest first" />}
      {all.length > 0 && found.length === 0 && <p class="hint">None of the {count(all.length)} packets in the list matches.</p>}
      <p class="keys" aria-label="Keys">
        <span>
          {singleKeys.value && (
            <>
              <kbd>Space</kbd> pause <kbd>/</kbd> filter <kbd>j</kbd> <kbd>k</kbd> next, previous{" "}
            </>
          )}
          <kbd>Enter</kbd> open <kbd>Esc</kbd> back{" "}
        </span>
        <button type="button" onClick={switchSingleKeys}>
          Switch single keys {singleKeys.value ? "off" : "on"}
        </button>
      </p>
    </section>
  );
}

/** The counters of the list. The announced text changes seldom enough for screen readers. */
function Counters({ found }: { found: number | null }): JSX.Element {
  const { packets, done, bad } = tally.value;
  return (
    <p class="counters">
      <span class="hidden" role="status">
        {announced.value > 0 && `${count(announced.value)} packets received`}
      </span>
      <span>
        <b>{count(received.value)}</b> received since this page was opened
      </span>
      <span>
        <b>{count(packets)}</b> in the list{found !== null && <>, <b>{count(found)}</b> match</>}
      </span>
      <span>
        <b>{count(done)}</b> of them checked{bad > 0 && <strong class="bad">, {count(bad)} failed</strong>}
      </span>
      {skipped.value > 0 && (
        <span>
          <b>{count(skipped.value)}</b> skipped
        </span>
      )}
    </p>
  );
}

function Empty(): JSX.Element {
  return (
    <Note title="Nothing has been published here yet">
      <p>
        The first packet appears in this place the moment it is stored. Write one on the page <a href={to("publish")}>Publish</a>, or
        send one from a terminal:
      </p>
      <Copy label="A command that publishes a packet" text={`strata publish --text "hello" --relay ${openingUrl()}`} />
    </Note>
  );
}
