/**
 * Ed25519 with the same verdicts everywhere (RFC 8032, R-025).
 *
 * Libraries differ on keys and signatures at the edge of the curve. The check here is strict: a scalar S beyond the
 * group order, a key or R of small order, and a key that is not in its canonical encoding all fail, and R is compared
 * byte for byte. Two sources give the same verdicts: WebCrypto behind a filter, and JavaScript if there is no WebCrypto
 * or it accepts signatures that it must not.
 */

import { type Bytes, concat, equal, fromHex, hex } from "./bytes.js";

/** Sizes in bytes. */
export const PUBLIC_KEY_BYTES = 32;
export const SEED_BYTES = 32;
export const SIGNATURE_BYTES = 64;

const ORDER = 2n ** 252n + 27742317777372353535851937790883648493n;
const PRIME = 2n ** 255n - 19n;

/** Every encoding of a point of small order, without its sign bit. */
const SMALL_ORDER = new Set([
  "0000000000000000000000000000000000000000000000000000000000000000",
  "0100000000000000000000000000000000000000000000000000000000000000",
  "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
  "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
  "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
  "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
  "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]);

const PKCS8_PREFIX = fromHex("302e020100300506032b657004220420") as Bytes;
const MAX_KEYS = 256;

/** Where signatures are made and checked. */
export type Source = "webcrypto" | "javascript";

/**
 * Whether `signature` is the signature of `message` under `publicKey`; false for wrong lengths. Never rejects.
 *
 * `source` chooses one of the two sources; by default WebCrypto is used if possible.
 */
export async function verify(
  publicKey: Uint8Array,
  message: Uint8Array,
  signature: Uint8Array,
  source?: Source,
): Promise<boolean> {
  if (!passesFilter(publicKey, signature)) return false;
  if ((source ?? (await sourceHere())) === "javascript") return verifyInJavaScript(publicKey, message, signature);
  return verifyByWebCrypto(publicKey, message, signature);
}

/** The public key of a 32-byte seed. */
export async function publicKeyOf(seed: Uint8Array): Promise<Bytes> {
  const noble = await javascript();
  return new Uint8Array(await noble.ed.getPublicKey(seed));
}

/** A function that signs with a seed: by WebCrypto, which does not reveal the key, or in JavaScript. */
export async function signerOf(seed: Uint8Array): Promise<(message: Uint8Array) => Promise<Bytes>> {
  if ((await sourceHere()) === "webcrypto") return signWith(await importSeed(seed));
  const kept = new Uint8Array(seed);
  const { ed } = await javascript();
  return async (message) => new Uint8Array(ed.sign(message, kept));
}

/** A function that signs with a private key of WebCrypto. */
export function signWith(key: CryptoKey): (message: Uint8Array) => Promise<Bytes> {
  return async (message) => new Uint8Array(await crypto.subtle.sign("Ed25519", key, message as Bytes));
}

/** Import a seed into WebCrypto as a private key that cannot be exported. Rejects if there is no WebCrypto. */
export async function importSeed(seed: Uint8Array): Promise<CryptoKey> {
  return crypto.subtle.importKey("pkcs8", concat(PKCS8_PREFIX, seed), "Ed25519", false, ["sign"]);
}

/** The source used here; determined once. */
export async function sourceHere(): Promise<Source> {
  found ??= findSource();
  return found;
}

let found: Promise<Source> | undefined;

/** Two signatures by a key of mixed order: a good one, and one that verifies only if multiplied by the cofactor. */
const PROBES = {
  key: "b502ff3d92e31d8190b4aa4ea0414005167fad089c4de9dac8a2fc850fed4f58",
  good: ["737472617461203230", "ef4f62f8479733ad879cfaced3c89a9c39dd4fc795ef2efa1c3eafe4d729a081",
    "8857124bb7aed5b30d82dcb48cd503f79b86ed79602a3d144195dd7233fef90e"],
  bad: ["7374726174612031", "ef4f62f8479733ad879cfaced3c89a9c39dd4fc795ef2efa1c3eafe4d729a081",
    "9f290828b7059aad13776799cb49b414a055efdac32c02ec954c01d2f47d7a0a"],
} as const;

/** WebCrypto, if it has Ed25519 and refuses a signature that verifies only if multiplied by the cofactor. */
async function findSource(): Promise<Source> {
  if (globalThis.crypto?.subtle === undefined) return "javascript";
  try {
    const key = fromHex(PROBES.key) as Bytes;
    const [good, bad] = await Promise.all(
      [PROBES.good, PROBES.bad].map(([message, r, s]) =>
        verifyByWebCrypto(key, fromHex(message) as Bytes, fromHex(r + s) as Bytes),
      ),
    );
    return good && !bad ? "webcrypto" : "javascript";
  } catch {
    return "javascript";
  }
}

function passesFilter(publicKey: Uint8Array, signature: Uint8Array): boolean {
  if (publicKey.length !== PUBLIC_KEY_BYTES || signature.length !== SIGNATURE_BYTES) return false;
  return (
    littleEndian(signature.subarray(32)) < ORDER &&
    littleEndian(withoutSign(publicKey)) < PRIME &&
    !SMALL_ORDER.has(hex(withoutSign(publicKey))) &&
    !SMALL_ORDER.has(hex(withoutSign(signature.subarray(0, 32))))
  );
}

function withoutSign(encoded: Uint8Array): Bytes {
  const bytes = new Uint8Array(encoded);
  bytes[31] = (bytes[31] as number) & 0x7f;
  return bytes;
}

function littleEndian(bytes: Uint8Array): bigint {
  return BigInt(`0x${hex(new Uint8Array(bytes).reverse())}`);
}

const keys = new Map<string, Promise<CryptoKey>>();

async function verifyByWebCrypto(
  publicKey: Uint8Array,
  message: Uint8Array,
  signature: Uint8Array,
): Promise<boolean> {
  const name = hex(publicKey);
  let key = keys.get(name);
  if (key === undefined) {
    key = crypto.subtle.importKey("raw", new Uint8Array(publicKey), "Ed25519", false, ["verify"]);
    keys.set(name, key);
    if (keys.size > MAX_KEYS) keys.delete(keys.keys().next().value as string);
  }
  try {
    return await crypto.subtle.verify("Ed25519", await key, signature as Bytes, message as Bytes);
  } catch {
    return false; // the key is not a point of the curve
  }
}

async function verifyInJavaScript(
  publicKey: Uint8Array,
  message: Uint8Array,
  signature: Uint8Array,
): Promise<boolean> {
  const { ed, sha512 } = await javascript();
  const r = signature.subarray(0, 32);
  let a: InstanceType<typeof ed.Point>;
  try {
    a = ed.Point.fromBytes(publicKey, false);
  } catch {
    return false;
  }
  const s = littleEndian(signature.subarray(32));
  const k = littleEndian(sha512(concat(r, publicKey, message))) % ORDER;
  const left = s === 0n ? ed.Point.ZERO : ed.Point.BASE.multiply(s, false);
  const right = k === 0n ? ed.Point.ZERO : a.multiply(k, false);
  return equal(left.add(right.negate()).toBytes(), r);
}

/** The JavaScript source, loaded when it is first needed. */
async function javascript() {
  const [ed, { sha512 }] = await Promise.all([import("@noble/ed25519"), import("@noble/hashes/sha2.js")]);
  ed.hashes.sha512 = (message: Uint8Array) => new Uint8Array(sha512(message));
  return { ed, sha512 };
}
