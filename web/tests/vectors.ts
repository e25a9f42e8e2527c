/** The shared vectors: written by Python (`python -m tests.web.vectors`), read by these tests. */

import { readFileSync } from "node:fs";

/** What one file of web/vectors holds. */
export function vectors<T>(name: string): T {
  return JSON.parse(readFileSync(`${process.cwd()}/vectors/${name}.json`, "utf8")) as T;
}

/** The code and detail of what a check throws; nulls if it throws nothing. */
export async function verdict(check: () => unknown): Promise<{ code: string | null; detail: string | null }> {
  try {
    await check();
  } catch (error) {
    const { code, detail } = error as { code?: string; detail?: string };
    if (code === undefined) throw error;
    return { code, detail: detail ?? null };
  }
  return { code: null, detail: null };
}

/** The bytes of hex digits. */
export function bytes(hex: string): Uint8Array<ArrayBuffer> {
  return new Uint8Array(Buffer.from(hex, "hex"));
}
