import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

const CORE = "// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).";
const FORBIDDEN =
  /\b(Date\b|performance\b|Math\.random|setTimeout|setInterval|fetch\(|WebSocket\b|crypto\.|localStorage|indexedDB|navigator|globalThis|window\b|process\.)|from "node:/;
const ROOT = join(process.cwd(), "src/client");
const sources = (readdirSync(ROOT, { recursive: true }) as string[])
  .filter((name) => name.endsWith(".ts"))
  .map((name) => ({ name, text: readFileSync(join(ROOT, name), "utf8") }));

/** The program without comments. */
function code(text: string): string {
  return text.replace(/\/\*[\s\S]*?\*\//g, "").replace(/\/\/.*$/gm, "");
}

test("core modules have no I/O, no clock and no randomness", () => {
  const core = sources.filter(({ text }) => text.includes(CORE));
  assert.ok(core.length >= 25);
  for (const { name, text } of core) assert.equal(FORBIDDEN.exec(code(text))?.[0], undefined, name);
  for (const part of ["core", "liveness", "stream", "publishing", "authenticating", "inspection", "keyring"]) {
    assert.ok(core.some(({ name }) => name === join("relays", `${part}.ts`)), part);
  }
});

test("the protocol knows nothing of relays, and only node.ts and file.ts know Node", () => {
  for (const { name, text } of sources) {
    if (name.startsWith("protocol")) assert.doesNotMatch(text, /from "\.\.\/(\.\.\/)?(relays|outbox)\//, name);
    const mayUseNode = name === "node.ts" || name === join("outbox", "file.ts");
    if (!mayUseNode) assert.doesNotMatch(text, /from "node:|outbox\/file/, name);
  }
});

test("one module alone sets timers: what setTimeout is asked for beyond its longest wait comes at once", () => {
  for (const { name, text } of sources) if (name !== "timers.ts") assert.doesNotMatch(code(text), /\bsetTimeout\(/, name);
});

test("every public name is documented, and no module is long", () => {
  for (const { name, text } of sources) {
    const lines = text.split("\n");
    assert.ok(lines.length <= 520, `${name} has ${lines.length} lines`);
    lines.forEach((line, at) => {
      if (/^export (async )?(abstract )?(class|function|const|interface|type) /.test(line) && !line.startsWith("export type {")) {
        assert.match(lines[at - 1] ?? "", /\*\/\s*$|^export const/, `${name}: ${line}`);
      }
    });
  }
});

test("nothing is evaluated, and no HTML is written", () => {
  for (const { name, text } of sources) assert.doesNotMatch(code(text), /\beval\(|new Function|innerHTML/, name);
});
