// Builds what web/ makes: `node build.mjs client | console | chat | page | test`.
//
//   client    dist/: the package's modules and their types, one file for each source
//   console   what relayd serves at "/"; src/console/build.mjs knows how
//   chat      build/chat: the page of examples/chat, to be served by anything
//   page      a page that does what the tests in a real browser ask of it
//   test      the unit tests, bundled into build/tests and run by node's own runner

import { spawnSync } from "node:child_process";
import { copyFileSync, existsSync, readdirSync, rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));

function run(command, ...args) {
  const { status } = spawnSync(command, args, { cwd: HERE, stdio: "inherit" });
  if (status !== 0) process.exit(status ?? 1);
}

/** TypeScript's compiler, as npm installed it. */
function tsc(...args) {
  run(join(HERE, "node_modules/.bin/tsc"), ...args);
}

const targets = {
  client() {
    rmSync(join(HERE, "dist"), { recursive: true, force: true });
    copyFileSync(join(HERE, "../LICENSE"), join(HERE, "LICENSE"));
    tsc("--project", "tsconfig.package.json");
  },

  async console() {
    const script = join(HERE, "src/console/build.mjs");
    if (!existsSync(script)) throw new Error("there is no src/console/build.mjs");
    await (await import(script)).default();
  },

  async page() {
    await build({
      absWorkingDir: HERE,
      entryPoints: ["tests/page/page.ts"],
      outdir: join(HERE, "build/page"),
      bundle: true,
      format: "esm",
      target: "es2022",
      logLevel: "warning",
    });
  },

  async chat() {
    const outdir = join(HERE, "build/chat");
    rmSync(outdir, { recursive: true, force: true });
    await build({
      absWorkingDir: HERE,
      entryPoints: ["examples/chat/chat.ts", "examples/chat/chat.css"],
      outdir,
      bundle: true,
      minify: true,
      format: "esm",
      target: "es2022",
      alias: { "strata-client": "./src/client/index.ts", "strata-client/channels": "./src/client/channels/index.ts" },
      logLevel: "warning",
    });
    copyFileSync(join(HERE, "examples/chat/index.html"), join(outdir, "index.html"));
  },

  async test(...names) {
    const outdir = join(HERE, "build/tests");
    rmSync(outdir, { recursive: true, force: true });
    const tests = readdirSync(join(HERE, "tests")).filter(
      (name) => name.endsWith(".test.ts") && (names.length === 0 || names.some((part) => name.includes(part))),
    );
    await build({
      absWorkingDir: HERE,
      entryPoints: tests.map((name) => join("tests", name)),
      outdir,
      bundle: true,
      splitting: true,
      packages: "external",
      format: "esm",
      platform: "node",
      target: "es2022",
      outExtension: { ".js": ".mjs" },
      sourcemap: "inline",
      logLevel: "warning",
    });
    const files = tests.map((name) => join(outdir, name.replace(/\.ts$/, ".mjs")));
    run(process.execPath, "--enable-source-maps", "--test", ...files);
  },
};

const [name = "client", ...args] = process.argv.slice(2);
if (!(name in targets)) {
  console.error(`usage: node build.mjs ${Object.keys(targets).join(" | ")}`);
  process.exit(2);
}
await targets[name](...args);
