/**
 * The parts that only work in Node: an outbox and pins in files.
 *
 * @packageDocumentation
 */

import { randomBytes } from "node:crypto";
import { mkdir, readFile, rename, rm, writeFile } from "node:fs/promises";
import { dirname } from "node:path";

import { addressOf, parsePins, type Pins } from "./relays/pins.js";

export { fileOutbox } from "./outbox/file.js";

/**
 * Pins in a JSON file, in the form that Python's `pins=FILE` reads and writes: both may share a file.
 *
 * The file is replaced as a whole, never half-written. `load` rejects with `IdentityError` if it is not a pin file.
 */
export function filePins(path: string): Pins {
  const load = async () => {
    let text = "{}";
    try {
      text = await readFile(path, "utf8");
    } catch (error) {
      if ((error as { code?: string }).code !== "ENOENT") throw error;
    }
    return parsePins(text, path);
  };
  return {
    load,
    async add(address, relayId) {
      const pins = await load();
      if (pins.has(address)) return;
      pins.set(address, relayId);
      await mkdir(dirname(path), { recursive: true, mode: 0o700 });
      const temporary = `${path}.${randomBytes(6).toString("hex")}`;
      const sorted = Object.fromEntries([...pins].sort(([one], [other]) => (one < other ? -1 : 1)));
      try {
        await writeFile(temporary, `${JSON.stringify(sorted, undefined, 2)}\n`, { flag: "wx", mode: 0o600, flush: true });
        await rename(temporary, path);
      } catch (error) {
        await rm(temporary, { force: true });
        throw error;
      }
    },
  };
}

export { addressOf };
