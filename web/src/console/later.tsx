// The parts that the first packets need not wait for: the pages in separate scripts, and the outbox. They are fetched
// once the relay has sent the first packets or refused them, or when one of these pages is opened.
//
// They do not wait to be opened, because a page that is opened while the relay is unreachable should work, and packets
// published here may still be waiting to be sent.

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

/** Fetch them once the first packets have arrived or were refused; retry with each connection until that succeeds. */
export function fetchLater(): void {
  effect(() => {
    const isServed = ready.value || wantsAuth.value || refused.value !== null;
    if (connections.value > 0 && isServed) void ask();
  });
}

/** A page that may need to be fetched first; its name is its title. */
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
