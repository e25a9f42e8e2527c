// A link to make a ruling on the author or packet shown; only for operators.

import type { JSX } from "preact";

import { to } from "../route.js";
import { capabilities } from "../state/session.js";

export function RuleOn({ kind, subject }: { kind: "author" | "packet"; subject: string }): JSX.Element | null {
  if (!capabilities.value.includes("operate")) return null;
  return (
    <p>
      <a href={to("operator", "", { kind, subject })}>{kind === "packet" ? "Remove this packet…" : "Ban this author…"}</a>
    </p>
  );
}
