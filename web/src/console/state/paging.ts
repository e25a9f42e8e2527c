// Long answers to an operator, read page by page as somebody turns them.

import { request, RequestFailed } from "./link.js";
import type { Message } from "./messages.js";

/** What was read, and where it goes on. */
export interface Book<T> {
  readonly entries: readonly T[];
  readonly next: string | undefined;
  /** Every place where it went on. */
  readonly places: readonly string[];
}

export const EMPTY: Book<never> = { entries: [], next: undefined, places: [] };

/**
 * The book with one page more, and the answer that brought it. Throws what `request` does, and `RequestFailed` where a relay's
 * pages lead back, or nowhere: one could turn them for ever.
 */
export async function turn<T>(question: object, before: Book<T> = EMPTY): Promise<{ book: Book<T>; answer: Message }> {
  const after = before.next === undefined ? {} : { after: before.next };
  const answer = await request({ type: "MODERATE", ...question, ...after });
  const [entries, next] = [(answer.entries ?? []) as unknown as readonly T[], answer.next ?? undefined];
  if (next !== undefined && (entries.length === 0 || before.places.includes(next))) {
    throw new RequestFailed("circle", "the relay gives its pages in a circle, or pages of nothing");
  }
  const places = next === undefined ? before.places : [...before.places, next];
  return { book: { entries: [...before.entries, ...entries], next, places }, answer };
}
