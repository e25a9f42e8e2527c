// Search: a search box, and the stored packets that match, newest first.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { Note } from "../parts/bits.js";
import { PacketList } from "../parts/list.js";
import { go, route, to } from "../route.js";
import { page, RequestFailed } from "../state/link.js";
import { type PacketRow, rowOf } from "../state/rows.js";
import { understand } from "../state/searching.js";
import { count, line } from "../text.js";

const PAGE = 50;

interface Found {
  readonly rows: readonly PacketRow[];
  readonly cursor: string | null;
  readonly busy: boolean;
  readonly failed: string | null;
}

const NOTHING: Found = { rows: [], cursor: null, busy: true, failed: null };

export function Search(): JSX.Element {
  const query = route.value.query.get("q") ?? "";
  const [text, setText] = useState(query);
  const [found, setFound] = useState<Found>(NOTHING);
  const asked = useRef(new AbortController());
  const understood = understand(query);

  const read = async (before: Found, cursor: string | null): Promise<void> => {
    asked.current.abort(); // its result is no longer needed
    const { signal: over } = (asked.current = new AbortController());
    setFound({ ...before, busy: true, failed: null });
    try {
      const part = await page({ ...understood.filters, limit: PAGE, ...(cursor !== null && { cursor }) }, over);
      if (over.aborted) return;
      setFound({
        rows: [...before.rows, ...part.events.map(rowOf)],
        cursor: part.complete ? null : part.cursor,
        busy: false,
        failed: null,
      });
    } catch (error) {
      if (over.aborted) return;
      const failed = error instanceof RequestFailed ? `${error.reason} (${error.detail ?? error.code})` : String(error);
      setFound({ ...before, busy: false, failed });
    }
  };

  useEffect(() => {
    setText(query);
    if (understood.packet !== null) location.replace(to("packet", understood.packet)); // so that going back works
    else void read(NOTHING, null);
    return () => asked.current.abort();
  }, [query]);

  return (
    <section class="page search">
      <h1>Search</h1>
      <form
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          go("search", "", text.trim() ? { q: text.trim() } : {});
        }}
      >
        <label class="find wide">
          <span class="label">DID, packet id, type or day</span>
          <input
            data-find
            type="search"
            value={text}
            placeholder="did:strata:z6Mk… POST 2026-11-01..2026-11-22"
            onInput={({ currentTarget }) => setText(currentTarget.value)}
          />
        </label>
        <button type="submit" class="primary">
          Search
        </button>
      </form>
      <p class="hint">
        {understood.parts.length > 0 ? `Understood: ${understood.parts.map((part) => line(part, 90)).join(", ")}. ` : "Every stored packet. "}
        {understood.unknown.length > 0 && `Not understood, and left out: ${understood.unknown.map((word) => line(word, 40)).join(" ")}.`}
      </p>
      {found.failed !== null && (
        <Note tone="bad" title="The relay did not answer">
          <p>{line(found.failed, 300)}</p>
        </Note>
      )}
      <p role="status" class="hint">
        {found.busy ? "Reading…" : found.failed === null && found.rows.length > 0 && counted(found)}
      </p>
      {found.rows.length > 0 && <PacketList rows={found.rows} label="Packets found, newest first" />}
      {found.cursor !== null && !found.busy && (
        <button type="button" class="more" onClick={() => void read(found, found.cursor)}>
          Older packets
        </button>
      )}
      {!found.busy && found.failed === null && found.rows.length === 0 && (
        <p>{query === "" ? "Nothing is stored here yet." : <>Nothing stored here matches. <a href={to("search")}>Show everything</a></>}</p>
      )}
    </section>
  );
}

function counted({ rows, cursor }: Found): string {
  const packets = `${count(rows.length)} ${rows.length === 1 ? "packet" : "packets"}`;
  return cursor === null ? `${packets}: all there are.` : `${packets}, and there are older ones.`;
}
