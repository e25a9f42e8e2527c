// A list of packets, of which only the rows in view are drawn.

import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { to } from "../route.js";
import type { GapRow, PacketRow, Row } from "../state/rows.js";
import { preview } from "../state/rows.js";
import { check, unable } from "../state/checking.js";
import { bytes, clock, count, line, shortDid, shown, when } from "../text.js";
import { Badge } from "./bits.js";

const LINE = 38;
const CARD = 92;
const SPARE = 8;
const NARROW = matchMedia("(max-width: 860px)");

/** The height of a row; the style sheet has the same. */
function useRowHeight(): number {
  const [height, set] = useState(NARROW.matches ? CARD : LINE);
  useEffect(() => {
    const change = (): void => set(NARROW.matches ? CARD : LINE);
    NARROW.addEventListener("change", change);
    return () => NARROW.removeEventListener("change", change);
  }, []);
  return height;
}

/**
 * Which element shows which row. A row keeps its element. If none of the rows stays, as in a flood, the new rows take
 * over all elements in order, because changing an element costs a fraction of making one. An element is never moved,
 * nor taken from a row that has the focus.
 */
function useElements(seen: readonly Row[]): Map<string, number> {
  const held = useRef(new Map<string, number>());
  const made = useRef(0);
  const before = held.current;
  const focused = (document.activeElement as HTMLElement | null)?.dataset["row"] ?? "";
  const free = before.has(focused) || seen.some(({ id }) => before.has(id)) ? [] : [...before.values()];
  held.current = new Map(seen.map(({ id }) => [id, before.get(id) ?? free.shift() ?? ++made.current]));
  return held.current;
}

/**
 * A list in which new rows appear at the top. If it is scrolled down, or a row has the focus, the rows in view stay in
 * view: a row that is not drawn any more would lose the focus.
 */
export function PacketList({ rows, label }: { rows: readonly Row[]; label: string }): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const height = useRowHeight();
  const [view, setView] = useState({ top: 0, size: 800 });
  const before = useRef<readonly Row[]>(rows);

  const look = (): void => {
    const at = box.current;
    if (at !== null) setView({ top: at.scrollTop, size: at.clientHeight });
  };
  useLayoutEffect(() => {
    look();
    const watch = new ResizeObserver(look);
    if (box.current !== null) watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  // `view` is the position after the last scroll: reading it from the box would force a layout during drawing.
  const anchor = before.current === rows ? undefined : before.current[0];
  const isHeld = view.top > 0 || document.activeElement?.closest(".list .row") != null;
  const added = anchor !== undefined && isHeld ? Math.max(0, rows.indexOf(anchor)) * height : 0;
  useLayoutEffect(() => {
    if (box.current !== null && added > 0) {
      box.current.scrollTop += added;
      look();
    }
    before.current = rows;
  }, [rows, height]);

  const top = view.top + added;
  const first = Math.max(0, Math.floor(top / height) - SPARE);
  const last = Math.min(rows.length, Math.ceil((top + view.size) / height) + SPARE);
  const seen = rows.slice(first, last);
  const elements = useElements(seen);
  useEffect(() => check(seen), [seen[0], seen.at(-1), seen.length, unable.value]);

  return (
    <div class="list" ref={box} onScroll={look} role="region" aria-label={label} tabIndex={rows.length > 0 ? 0 : -1}>
      <ol role="list" style={{ height: `${rows.length * height}px` }}>
        {seen.map((row, at) => (
          <li key={elements.get(row.id)} style={{ top: `${(first + at) * height}px` }} aria-setsize={rows.length} aria-posinset={first + at + 1}>
            {row.kind === "packet" ? <PacketLine row={row} /> : <GapLine row={row} />}
          </li>
        ))}
      </ol>
    </div>
  );
}

function PacketLine({ row }: { row: PacketRow }): JSX.Element {
  return (
    <a class="row" href={to("packet", row.id)} data-row={row.id}>
      <span class="time">{when(row.receivedAt)}</span>
      <span class="who" title={shown(row.author)}>
        {shortDid(row.author)}
      </span>
      <span class="type">{line(row.type, 60)}</span>
      <span class="size">{bytes(row.size)}</span>
      <bdi class="preview">{line(preview(row.event))}</bdi>
      <Badge verdict={row.verdict.value} />
    </a>
  );
}

function GapLine({ row }: { row: GapRow }): JSX.Element {
  const many = row.packets === null ? "packets" : `${count(row.packets)} packets`;
  return (
    <a class="row gap" href={to("search", "", { q: `received:${row.from}..${row.to}` })} data-row={row.id}>
      <span class="time">{clock(row.to)}</span>
      <span class="gap-words">
        Gap: {many} from {clock(row.from)} to {clock(row.to)} are not in this list ({row.why}). Search has them.
      </span>
    </a>
  );
}

/** Move the focus from row to row. */
export function step(by: number): void {
  const all = [...document.querySelectorAll<HTMLElement>(".list .row")];
  if (all.length === 0) return;
  const at = all.indexOf(document.activeElement as HTMLElement);
  const next = all[at < 0 ? 0 : Math.min(Math.max(at + by, 0), all.length - 1)];
  next?.focus({ preventScroll: false });
  next?.scrollIntoView({ block: "nearest" });
}
