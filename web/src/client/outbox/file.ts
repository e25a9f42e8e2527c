/** An outbox in a folder, for Node: it survives a killed program. */

import { randomBytes } from "node:crypto";
import { type FileHandle, mkdir, open, readdir, readFile, rename, rm, stat, unlink } from "node:fs/promises";
import { join } from "node:path";

import { OutboxError } from "../protocol/errors.js";
import { Packet } from "../protocol/packets.js";
import type { OutboxStore, Refusal, StoredEntry } from "./store.js";

const NAME = /^(\d{16})-([0-9a-f]{64})\.json$/;
const DRAFT = /^\.[0-9a-f]{16}\.part$/;
const ABANDONED_MS = 3_600_000;
const POLL_MS = 1_000;

/**
 * Keep packets in a folder, one file each. The folder is made if it is missing.
 *
 * A file is written under a temporary name, flushed to the disk and renamed, so that a killed program leaves a whole
 * packet or none. A later program removes temporary files that are an hour old. `list` rejects once with `OutboxError`
 * for a file that is damaged; the file is then renamed, and the others are sent.
 *
 * Several programs may share the folder: each sends the waiting packets, which is harmless, because a relay stores a
 * packet once. This program lists a packet only once its name is flushed too. If that fails, `add` removes the file
 * again; another program may have sent it by then.
 */
export function fileOutbox(folder: string): OutboxStore {
  let last = 0;
  let isTidy = false;
  const known = new Map<string, StoredEntry>();
  const adding = new Map<string, Promise<void>>();

  async function names(): Promise<string[]> {
    await mkdir(folder, { recursive: true, mode: 0o700 });
    const all = await readdir(folder);
    if (!isTidy) {
      isTidy = true;
      for (const name of all) if (DRAFT.test(name)) await removeAbandoned(join(folder, name));
    }
    return all.filter((name) => NAME.test(name)).sort();
  }

  async function nameOf(packetId: string): Promise<string | undefined> {
    return (await names()).find((name) => NAME.exec(name)?.[2] === packetId.slice(2));
  }

  async function write(name: string, entry: StoredEntry): Promise<void> {
    const temporary = join(folder, `.${randomBytes(8).toString("hex")}.part`);
    try {
      await flushed(temporary, "wx", (file) => file.writeFile(JSON.stringify(entry)));
      await rename(temporary, join(folder, name));
    } catch (error) {
      await rm(temporary, { force: true });
      throw new OutboxError(`the outbox cannot be written: ${String(error)}`);
    }
    known.set(name, entry); // the file has this content now, even if the flush fails
    try {
      await flushed(folder, "r"); // the name itself
    } catch (error) {
      throw new OutboxError(`the outbox cannot be written: ${String(error)}`);
    }
  }

  async function add(entry: StoredEntry): Promise<void> {
    const present = await names();
    if (present.some((name) => NAME.exec(name)?.[2] === entry.packetId.slice(2))) return;
    const highest = Number(present.at(-1)?.slice(0, 16) ?? 0);
    last = Math.max(highest, last) + 1;
    const name = `${String(last).padStart(16, "0")}-${entry.packetId.slice(2)}.json`;
    try {
      await write(name, entry);
    } catch (error) {
      known.delete(name);
      await rm(join(folder, name), { force: true });
      throw error;
    }
  }

  /** Read a file. One that is not a packet is reported once and renamed, so that the others can be sent. */
  async function readOrPutAside(name: string): Promise<StoredEntry | undefined> {
    const path = join(folder, name);
    try {
      return await read(path);
    } catch (error) {
      if (!(error instanceof OutboxError)) throw error;
      await rename(path, `${path}.damaged`).catch(ignoreMissing);
      throw new OutboxError(`${error.message}: it is called ${name}.damaged now, and will not be sent`);
    }
  }

  return {
    add(entry) {
      // Callers that add the same packet meanwhile get the same outcome: the packet may be removed again.
      let added = adding.get(entry.packetId);
      if (added === undefined) {
        added = add(entry).finally(() => adding.delete(entry.packetId));
        adding.set(entry.packetId, added);
      }
      return added;
    },
    count: async () => (await names()).length,
    async list() {
      const unproven = new Set([...adding.keys()].map((packetId) => packetId.slice(2)));
      const present = (await names()).filter((name) => !unproven.has(NAME.exec(name)?.[2] ?? ""));
      for (const name of known.keys()) if (!present.includes(name)) known.delete(name);
      const entries: StoredEntry[] = [];
      for (const name of present) {
        const entry = known.get(name) ?? (await readOrPutAside(name));
        if (entry === undefined) continue; // sent meanwhile, by another program
        known.set(name, entry);
        entries.push(entry);
      }
      return entries;
    },
    async refuse(packetId, refusal) {
      const name = await nameOf(packetId);
      const entry = name === undefined ? undefined : await read(join(folder, name));
      if (name !== undefined && entry !== undefined) await write(name, { ...entry, refusal });
    },
    async remove(packetId) {
      const name = await nameOf(packetId);
      if (name === undefined) return;
      known.delete(name);
      await unlink(join(folder, name)).catch(ignoreMissing);
    },
    exclusively: (drain) => drain(),
    watch(heard) {
      let seen = new Set<string>();
      const poll = async () => {
        const present = await names();
        // Compared by name: as many may have been removed as were added.
        if (present.some((name) => !seen.has(name))) heard({ kind: "added" });
        seen = new Set(present);
      };
      const timer = setInterval(() => void poll().catch(() => undefined), POLL_MS);
      timer.unref();
      return () => clearInterval(timer);
    },
  };
}

async function flushed(path: string, flags: string, act?: (file: FileHandle) => Promise<void>): Promise<void> {
  const file = await open(path, flags, 0o600);
  try {
    await act?.(file);
    await file.sync();
  } finally {
    await file.close();
  }
}

/** Remove a temporary file, unless another program may still be writing it. */
async function removeAbandoned(path: string): Promise<void> {
  try {
    if (Date.now() - (await stat(path)).mtimeMs > ABANDONED_MS) await rm(path);
  } catch (error) {
    ignoreMissing(error);
  }
}

async function read(path: string): Promise<StoredEntry | undefined> {
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (error) {
    ignoreMissing(error);
    return undefined;
  }
  const entry = entryOf(text);
  if (entry === undefined) throw new OutboxError(`${path} is not a packet of an outbox`);
  return entry;
}

function entryOf(text: string): StoredEntry | undefined {
  try {
    const value = JSON.parse(text) as { packetId?: unknown; canonical?: unknown; refusal?: Refusal } | null;
    if (typeof value?.canonical !== "string" || Packet.read(value.canonical).packetId !== value.packetId) return undefined;
    return value as StoredEntry;
  } catch {
    return undefined;
  }
}

function ignoreMissing(error: unknown): void {
  if ((error as { code?: string }).code !== "ENOENT") throw error;
}
