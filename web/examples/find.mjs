// Look up a packet by its id, and read a conversation: a post and the answers to it.
import { connect, Identity } from "strata-client";

const me = await Identity.generate();
const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity: me });
const { packetId } = await relay.post({ type: "POST", text: "anybody there?" });
await relay.post({ type: "POST", text: "me", thread_ref: packetId });
const found = await relay.get(packetId);
console.log(found.packet.content.text);
for await (const { packet } of relay.fetch({ authors: me.did })) {
  if (packet.content.thread_ref === packetId) console.log("  ", packet.content.text);
}
console.log(await relay.get(`0x${"0".repeat(64)}`));
await relay.close();
