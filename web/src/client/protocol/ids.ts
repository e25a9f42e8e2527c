/**
 * Identities: `did:strata` names, the Ed25519 keys behind them, and signers (RFC-0001 §3–§4).
 *
 * A self-certifying DID contains its own public key: `did:strata:z` + base58btc(`ed 01` ‖ 32-byte key). The
 * form without the `ed 01` is read but never written. Every other DID is a name whose key must come from
 * elsewhere.
 */

import { type Bytes, concat, equal, fromHex } from "./bytes.js";
import * as ed25519 from "./ed25519.js";
import { IdentityError } from "./errors.js";

/** The longest DID accepted. */
export const MAX_DID_CHARACTERS = 1024;

const MULTICODEC = new Uint8Array([0xed, 0x01]);
const SELF_CERTIFYING = "did:strata:z";
const LONGEST_SELF_CERTIFYING = SELF_CERTIFYING.length + 47; // 34 bytes take at most 47 base58 digits
const DID = /^did:[a-z0-9]+:(?:[A-Za-z0-9._:-]|%[0-9A-Fa-f]{2})*(?<!:)$/;
const ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";

/** An object that can sign for a DID: a key in memory, in WebCrypto, in an extension or in hardware. */
export interface Signer {
  /** The DID that the signatures are made for. */
  readonly did: string;
  /** The 64-byte Ed25519 signature of the message itself, without a prefix or a prehash. */
  sign(message: Uint8Array): Promise<Uint8Array> | Uint8Array;
}

/**
 * An Ed25519 key pair and the DID that it signs for. If there is WebCrypto, it holds the private key, which cannot be
 * read back.
 */
export class Identity implements Signer {
  private constructor(
    /** The DID that the signatures are made for; by default the self-certifying DID of this key. */
    readonly did: string,
    /** The 32-byte public key. */
    readonly publicKey: Uint8Array,
    private readonly signing: (message: Uint8Array) => Promise<Uint8Array>,
    /** WebCrypto's key pair, which IndexedDB can store; undefined for an identity made from a seed. */
    readonly keyPair?: CryptoKeyPair,
  ) {}

  /** Generate an identity from the system's random source. */
  static async generate(): Promise<Identity> {
    if ((await ed25519.sourceHere()) === "webcrypto") {
      const pair = (await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"])) as CryptoKeyPair;
      return Identity.fromKeyPair(pair);
    }
    return Identity.fromSeed(crypto.getRandomValues(new Uint8Array(ed25519.SEED_BYTES)));
  }

  /** The identity of a 32-byte seed. Rejects with `IdentityError` for another length. */
  static async fromSeed(seed: Uint8Array): Promise<Identity> {
    if (seed.length !== ed25519.SEED_BYTES) {
      throw new IdentityError(`a seed has ${ed25519.SEED_BYTES} bytes, not ${seed.length}`);
    }
    const publicKey = await ed25519.publicKeyOf(seed);
    return new Identity(didFromPublicKey(publicKey), publicKey, await ed25519.signerOf(seed));
  }

  /** The identity of a WebCrypto key pair, such as one that was stored in IndexedDB. */
  static async fromKeyPair(pair: CryptoKeyPair): Promise<Identity> {
    const publicKey = new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey));
    return new Identity(didFromPublicKey(publicKey), publicKey, ed25519.signWith(pair.privateKey), pair);
  }

  /**
   * Read the text of a key file that `strata identity` wrote.
   *
   * Rejects with `IdentityError` if the text is not a key file. No error quotes the file.
   */
  static async fromKeyFile(text: string): Promise<Identity> {
    let members: { did?: unknown; seed?: unknown; key?: unknown };
    try {
      members = JSON.parse(text) as typeof members;
    } catch {
      throw new IdentityError("the text is not a key file");
    }
    const digits = typeof members?.seed === "string" && members.seed.startsWith("0x") ? members.seed.slice(2) : "";
    const seed = fromHex(digits, ed25519.SEED_BYTES);
    if (seed === undefined || typeof members.did !== "string") {
      throw new IdentityError("the text is not a key file");
    }
    const identity = await Identity.fromSeed(seed);
    if (identity.did !== (members.key ?? members.did)) throw new IdentityError("the key file is damaged");
    return identity.did === members.did ? identity : identity.speakingFor(members.did);
  }

  /** The same key, signing for another DID, which must have made it one of its keys. */
  speakingFor(did: string): Identity {
    if (!isDid(did)) throw new IdentityError("the text is not a DID");
    return new Identity(did, this.publicKey, this.signing, this.keyPair);
  }

  /** The 64-byte signature of `message` itself, without a prefix or a prehash. */
  sign(message: Uint8Array): Promise<Uint8Array> {
    return this.signing(message);
  }
}

/** The self-certifying DID of a 32-byte Ed25519 key. Throws `IdentityError` for another length. */
export function didFromPublicKey(publicKey: Uint8Array): string {
  if (publicKey.length !== ed25519.PUBLIC_KEY_BYTES) {
    throw new IdentityError(`a public key has ${ed25519.PUBLIC_KEY_BYTES} bytes, not ${publicKey.length}`);
  }
  return SELF_CERTIFYING + base58Encode(concat(MULTICODEC, publicKey));
}

/**
 * The key that a self-certifying DID contains; undefined for any other DID.
 *
 * Throws `IdentityError` if `did` is not a DID.
 */
export function publicKeyFromDid(did: string): Bytes | undefined {
  if (!isDid(did)) throw new IdentityError("the text is not a DID");
  if (!did.startsWith(SELF_CERTIFYING) || did.length > LONGEST_SELF_CERTIFYING) return undefined;
  const key = base58Decode(did.slice(SELF_CERTIFYING.length));
  if (key?.length === 32) return key;
  if (key?.length === 34 && key[0] === MULTICODEC[0] && key[1] === MULTICODEC[1]) return key.slice(2);
  return undefined;
}

/**
 * The key of a verification method, from either of its two spellings, which must agree.
 *
 * Throws `IdentityError` if neither is given, one is malformed, or they differ.
 */
export function publicKeyFromMethod(asHex: string | undefined, asMultibase: string | undefined): Bytes {
  let key: Bytes | undefined;
  if (asHex !== undefined) {
    key = asHex.startsWith("0x") ? fromHex(asHex.slice(2), ed25519.PUBLIC_KEY_BYTES) : undefined;
    if (key === undefined) throw new IdentityError("public_key_hex is not 0x and 64 hex digits");
  }
  if (asMultibase === undefined) {
    if (key === undefined) throw new IdentityError("the method has no key");
    return key;
  }
  const did = `did:strata:${asMultibase}`;
  const spelled = isDid(did) ? publicKeyFromDid(did) : undefined;
  if (spelled === undefined || didFromPublicKey(spelled) !== did) {
    throw new IdentityError("public_key_multibase is not an Ed25519 key in base58btc");
  }
  if (key !== undefined && !equal(key, spelled)) throw new IdentityError("the two spellings of the key differ");
  return spelled;
}

/** Whether the text has the form of a DID of any method. */
export function isDid(text: string): boolean {
  return text.length <= MAX_DID_CHARACTERS && DID.test(text);
}

/** Base58 in Bitcoin's alphabet, without a multibase prefix; each leading zero byte is a leading `1`. */
export function base58Encode(data: Uint8Array): string {
  let number = 0n;
  for (const byte of data) number = number * 256n + BigInt(byte);
  let digits = "";
  for (; number > 0n; number /= 58n) digits = ALPHABET[Number(number % 58n)] + digits;
  const zeros = data.findIndex((byte) => byte !== 0);
  return "1".repeat(zeros === -1 ? data.length : zeros) + digits;
}

/**
 * The bytes that `base58Encode` encoded; undefined if a character is outside the alphabet.
 *
 * The time is quadratic in the length: callers must bound the text.
 */
export function base58Decode(text: string): Bytes | undefined {
  let number = 0n;
  let zeros = 0;
  for (const character of text) {
    const digit = ALPHABET.indexOf(character);
    if (digit === -1) return undefined;
    if (number === 0n && digit === 0) zeros++;
    number = number * 58n + BigInt(digit);
  }
  const bytes: number[] = [];
  for (; number > 0n; number /= 256n) bytes.unshift(Number(number % 256n));
  return new Uint8Array([...new Array<number>(zeros).fill(0), ...bytes]);
}
