// The console's current page: `#/packet/0x…`, `#/search?q=…`. None of it reaches the relay.

import { signal } from "@preact/signals";

export interface Route {
  readonly page: string;
  readonly subject: string;
  readonly query: URLSearchParams;
}

function read(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", ...rest] = path.split("/");
  return { page: page || "live", subject: decoded(rest.join("/")), query: new URLSearchParams(query) };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const route = signal(read());

addEventListener("hashchange", () => {
  route.value = read();
});

export function to(page: string, subject = "", query: Record<string, string> = {}): string {
  const search = new URLSearchParams(query).toString();
  return `#/${page}${subject && `/${encodeURIComponent(subject)}`}${search && `?${search}`}`;
}

export function go(page: string, subject = "", query: Record<string, string> = {}): void {
  location.hash = to(page, subject, query);
}
