// Pages in a script of their own: it is fetched once the first packets are shown, or one of its pages is opened.
//
// It does not wait to be opened, because a page that is opened while the relay is away should be there.

import { effect, signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";

import { Unfetched } from "./parts/bits.js";
import { connections } from "./state/link.js";
import { ready } from "./state/tail.js";

type Seldom = typeof import("./pages/seldom.js") & typeof import("./pages/publish.js");

const pages = signal<Seldom | null>(null);
const failed = signal(false);
let isAsked = false;

async function ask(): Promise<void> {
  if (isAsked) return;
  isAsked = true;
  try {
    const [others, publish] = await Promise.all([import("./pages/seldom.js"), import("./pages/publish.js")]);
    pages.value = { ...others, ...publish };
    failed.value = false;
  } catch {
    isAsked = false;
    failed.value = true;
  }
}

/** Fetch them when the first packets are there, and again with each connection until they have come. */
export function fetchLater(): void {
  effect(() => {
    if (connections.value > 0 && ready.value) void ask();
  });
}

/** A page that may have to be fetched first; its name is its title. */
export function later(name: keyof Seldom): () => JSX.Element {
  return () => {
    useEffect(() => void ask(), []);
    const View = pages.value?.[name];
    if (View !== undefined) return <View />;
    return (
      <section class="page">
        <h1>{name}</h1>
        {failed.value ? <Unfetched title="This page could not be fetched" /> : <p class="hint">Reading…</p>}
      </section>
    );
  };
}
