// Showing text from packets, in which the author may have put any character.

// Characters that move, hide or reverse their neighbours, or are invisible: controls, joiners, directions, fillers, and
// selectors except that of an emoji. Two types that differ by one of them would look alike.
const HIDDEN = /(?![\t\n]|(?<=\p{ExtPict})\ufe0f)[\p{Cc}\p{Cs}\p{DI}\u2028\u2029\u2800\ufff9-\ufffb]/gu;

/** The text, with every such character made visible. */
export function shown(text: string): string {
  return text.replace(HIDDEN, (c) => `⟨U+${(c.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** The beginning of a text, at most `length` long; it never ends with half a surrogate pair. */
export function start(text: string, length: number): string {
  return text.slice(0, length).replace(/[\ud800-\udbff]$/, "");
}

/** The text in one line, at most `length` long. */
export function line(text: string, length = 160): string {
  const cut = text.length > length ? `${start(text, length)}…` : text;
  return shown(cut.replace(/\s+/g, " "));
}

/** A short form of a DID, mostly its end: all DIDs of a method begin alike. */
export function shortDid(did: string): string {
  const tail = did.slice(did.lastIndexOf(":") + 1);
  return shown(tail.length > 14 ? `${tail.slice(0, 4)}…${tail.slice(-6)}` : tail);
}

export function shortId(id: string): string {
  return shown(id.length > 20 ? `${id.slice(0, 10)}…${id.slice(-6)}` : id);
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });
const BRIEF = new Intl.DateTimeFormat("sv", { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" });
const COUNT = new Intl.NumberFormat("en");

const isTime = (seconds: number): boolean => Number.isFinite(seconds) && Math.abs(seconds) < 8.64e12;

/** The local time of day. */
export function clock(seconds: number): string {
  return isTime(seconds) ? CLOCK.format(seconds * 1000) : "—";
}

/** The time for a row of a list; without the day if that is today. */
export function when(seconds: number): string {
  const isToday = new Date(seconds * 1000).toDateString() === new Date().toDateString();
  return isToday || !isTime(seconds) ? clock(seconds) : BRIEF.format(seconds * 1000);
}

/** The local day and time. */
export function moment(seconds: number): string {
  return isTime(seconds) ? `${DAY.format(seconds * 1000)}, ${CLOCK.format(seconds * 1000)}` : "—";
}

export function count(number: number): string {
  return COUNT.format(number);
}

export function bytes(size: number): string {
  if (size < 1000) return `${size} B`;
  if (size < 1_000_000) return `${(size / 1000).toFixed(size < 10_000 ? 1 : 0)} kB`;
  return `${(size / 1_000_000).toFixed(1)} MB`;
}

/** A length of time, as a short text. */
export function span(seconds: number): string {
  const rounded = Math.round(seconds);
  if (rounded < 90) return `${rounded} s`;
  if (rounded < 5400) return `${Math.round(rounded / 60)} min`;
  if (rounded < 172_800) return `${Math.round(rounded / 3600)} h`;
  return `${Math.round(rounded / 86_400)} days`;
}
