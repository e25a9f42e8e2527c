// Builds the console into relayd/console/, which is committed, so that installing relayd does not need Node.
//
// The names of the files contain hashes of their contents. They are computed here, because esbuild's own hashes depend
// on the folder in which it runs. The same sources give the same bytes on every machine.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, extname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const WEB = join(HERE, "../..");
const TARGET = join(WEB, "../relayd/console");
const OTHERS = ["build.mjs", "index.html", "icon.svg"].map((name) => `src/console/${name}`);

const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");

/** What the build was made from: our files with their hashes, other packages with their versions. */
function sources(inputs) {
  const lock = JSON.parse(readFileSync(join(WEB, "package-lock.json"), "utf8")).packages;
  const files = {};
  const packages = { esbuild: lock["node_modules/esbuild"].version };
  for (const path of [...inputs, ...OTHERS].sort()) {
    const [, name] = /(?:^|\/)node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path) ?? [];
    if (name === undefined) files[path] = sha256(readFileSync(join(WEB, path)));
    else packages[name] = lock[`node_modules/${name}`].version;
  }
  return { files, packages };
}

/** The output of esbuild, by name; the names by which files refer to each other are not final yet. */
async function bundled() {
  const { metafile, outputFiles } = await build({
    absWorkingDir: WEB,
    entryPoints: { main: "src/console/main.tsx", verify: "src/console/verify.worker.ts", style: "src/console/style.css" },
    outdir: "out",
    bundle: true,
    splitting: true,
    minify: true,
    format: "esm",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    jsx: "automatic",
    jsxImportSource: "preact",
    chunkNames: "chunk-[hash]",
    metafile: true,
    write: false,
    logLevel: "warning",
  });
  const made = new Map(outputFiles.map(({ path, text }) => [relative(join(WEB, "out"), path), text]));
  made.set("icon.svg", readFileSync(join(HERE, "icon.svg"), "utf8"));
  return { made, inputs: Object.keys(metafile.inputs) };
}

/** Whether a file refers to another: by a mark (in the page, and for the worker's name), or by a module's path. */
const mentions = (text, name) => text.includes(`@${name}@`) || text.includes(`"./${name}"`);

/** Give each file its name, beginning with those that refer to no other. */
function named(made) {
  const names = new Map();
  const done = new Map();
  while (names.size < made.size) {
    const before = names.size;
    for (const [name, text] of made) {
      const needs = [...made.keys()].filter((other) => other !== name && mentions(text, other));
      if (names.has(name) || !needs.every((other) => names.has(other))) continue;
      const whole = settled(text, names, "");
      const stem = name.startsWith("chunk-") ? "part" : name.slice(0, name.lastIndexOf("."));
      names.set(name, `${stem}-${sha256(whole).slice(0, 16)}${extname(name)}`);
      done.set(names.get(name), whole);
    }
    if (names.size === before) throw new Error("the parts of the console need each other in a circle");
  }
  return { names, done };
}

function settled(text, names, folder) {
  for (const [name, final] of names) {
    text = text.replaceAll(`@${name}@`, folder + final).replaceAll(`"./${name}"`, `"./${final}"`);
  }
  return text;
}

export default async function () {
  const { made, inputs } = await bundled();
  const { names, done } = named(made);
  const page = settled(readFileSync(join(HERE, "index.html"), "utf8"), names, "assets/");
  rmSync(TARGET, { recursive: true, force: true });
  mkdirSync(join(TARGET, "assets"), { recursive: true });
  const written = new Map([["index.html", page], ...[...done].map(([name, text]) => [`assets/${name}`, text])]);
  const manifest = { sources: sources(inputs), files: {} };
  for (const [name, text] of [...written].sort(([a], [b]) => (a < b ? -1 : 1))) {
    writeFileSync(join(TARGET, name), text);
    manifest.files[name] = sha256(text);
  }
  writeFileSync(join(TARGET, "manifest.json"), `${JSON.stringify(manifest, null, 2)}\n`);
}
