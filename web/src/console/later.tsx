// What the first packets need not wait for: the pages in scripts of their own, and the outbox. It is fetched once the
// relay has shown what it shows, or one of these pages is opened.
//
// It does not wait to be opened, because a page that is opened while the relay is away should be there, and what
// was published here may still wait to be sent.

import { effect, signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";

import { Unfetched } from "./parts/bits.js";
import { connections, refused, wantsAuth } from "./state/link.js";
import { ready } from "./state/tail.js";

type Seldom = typeof import("./pages/seldom.js") & typeof import("./pages/publish.js") & typeof import("./pages/operator.js");

const pages = signal<Seldom | null>(null);
const failed = signal(false);
let isAsked = false;

async function ask(): Promise<void> {
  if (isAsked) return;
  isAsked = true;
  try {
    const [others, publish, operator, { beginOutbox }] = await Promise.all([
      import("./pages/seldom.js"),
      import("./pages/publish.js"),
      import("./pages/operator.js"),
      import("./state/outbox.js"),
    ]);
    beginOutbox();
    pages.value = { ...others, ...publish, ...operator };
    failed.value = false;
  } catch {
    isAsked = false;
    failed.value = true;
  }
}

/** Fetch it when the first packets are there, or the relay shows none, and again with each connection until it has come. */
export function fetchLater(): void {
  effect(() => {
    const isServed = ready.value || wantsAuth.value || refused.value !== null;
    if (connections.value > 0 && isServed) void ask();
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
