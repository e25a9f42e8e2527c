// The console's frame: the menu, the state of the connection, and the current page.

import { type JSX, render } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { fetchLater, later } from "./later.js";
import { ConnectionState, Notices } from "./parts/connection.js";
import { step } from "./parts/list.js";
import { Identity } from "./pages/identity.js";
import { Live } from "./pages/live.js";
import { PacketPage } from "./pages/packet.js";
import { Search } from "./pages/search.js";
import { go, route, to } from "./route.js";
import { loadKeys } from "./state/keys.js";
import { begin, connections } from "./state/link.js";
import { manifest, refreshManifest } from "./state/relay.js";
import { keepAuthenticated } from "./state/session.js";
import { singleKeys } from "./state/shortcuts.js";
import { follow, pause } from "./state/tail.js";
import { shortDid, shown } from "./text.js";

interface Page {
  readonly title: string;
  readonly view: () => JSX.Element;
  /** Whether the menu lists it. */
  readonly listed: boolean;
}

const PAGES: Readonly<Record<string, Page>> = {
  live: { title: "Live", view: Live, listed: true },
  search: { title: "Search", view: Search, listed: true },
  overview: { title: "Overview", view: later("Overview"), listed: true },
  topics: { title: "Topics", view: later("Topics"), listed: true },
  publish: { title: "Publish", view: later("Publish"), listed: true },
  operator: { title: "Operator", view: later("Operator"), listed: true },
  identity: { title: "Identity", view: Identity, listed: false },
  packet: { title: "Packet", view: PacketPage, listed: false },
};

function Frame(): JSX.Element {
  const { page, subject } = route.value;
  const found = PAGES[page];
  const title = found?.title ?? "Nothing here";
  const main = useRef<HTMLElement>(null);
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = `${title} · Strata relay`;
    // Focus makes screen readers announce the new page; the first page is announced anyway.
    if (!isFirst.current) main.current?.focus();
    isFirst.current = false;
  }, [page, subject]);
  const View = found?.view;
  const hasOperators = manifest.value?.auth.capabilities.includes("operate") ?? false;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        Skip to the page
      </a>
      <header class="top">
        <a class="brand" href={to("live")}>
          <span aria-hidden="true">≡</span> Strata relay
        </a>
        {manifest.value !== null && (
          <span class="relay-id" title={shown(manifest.value.relay_id)}>
            {shortDid(manifest.value.relay_id)}
          </span>
        )}
        <nav aria-label="Pages">
          {Object.entries(PAGES).map(
            ([name, { title: words, listed }]) =>
              listed &&
              (name !== "operator" || hasOperators) && (
                <a key={name} href={to(name)} aria-current={name === page ? "page" : undefined}>
                  {words}
                </a>
              ),
          )}
        </nav>
        <ConnectionState />
      </header>
      <main ref={main} id="main" tabIndex={-1}>
        <Notices />
        {View === undefined ? <h1 class="page">There is no such page</h1> : <View key={`${page}/${subject}`} />}
      </main>
    </>
  );
}

/** Space, /, j and k work unless something is being typed, or the shortcuts are switched off. */
function keys(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key.length === 1 && !singleKeys.value) return;
  const target = event.target as HTMLElement;
  const field = document.querySelector<HTMLInputElement>("[data-find]");
  if (target.matches("input, textarea, select")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const isLive = route.value.page === "live";
  const isPressing = target.matches("button, summary, a:not(.row)");
  if (event.key === " " && isLive && !isPressing) pause();
  else if (event.key === "/" && field !== null) field.focus();
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "Escape" && route.value.page === "packet") history.length > 1 ? history.back() : go("live");
  else return;
  event.preventDefault();
}

addEventListener("keydown", keys);
begin();
follow();
keepAuthenticated();
void loadKeys();
fetchLater();
void refreshManifest();
connections.subscribe((count) => void (count > 1 && refreshManifest()));
const app = document.querySelector("#app");
if (app !== null) render(<Frame />, app);
