// Long answers to an operator, read page by page on demand.

import { request, RequestFailed } from "./link.js";
import type { Message } from "./messages.js";

/** The entries read so far, and where the next page begins. */
export interface Book<T> {
  readonly entries: readonly T[];
  readonly next: string | undefined;
  /** Every place where a page began. */
  readonly places: readonly string[];
}

export const EMPTY: Book<never> = { entries: [], next: undefined, places: [] };

/**
 * Read one more page; returns the extended book and the relay's answer. Rejects with what `request` rejects with, and
 * with `RequestFailed` if a relay's pages lead back or nowhere, because they would never end.
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
