// Change the key of an identity, and see which key could sign when.
import { build, connect, Identity, rotateContent } from "strata-client";

const [old, fresh] = [await Identity.generate(), await Identity.generate()];
const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity: old });
const { receivedAt } = await relay.post({ type: "POST", text: "by the old key" });
const replaces = `${old.did}#keys-1`;
const next = { keyId: `${old.did}#keys-2`, publicKey: fresh.publicKey, validFrom: receivedAt, replaces };
await relay.post(rotateContent(next));
await relay.publish(await build(fresh.speakingFor(old.did), { type: "POST", text: "by the new key" }));
for (const key of await (await relay.keyChain(old.did)).keys(receivedAt)) {
  console.log(key.keyId.slice(-6), "from", key.validFrom, "until", key.validUntil ?? "further notice");
}
await relay.close();
