// Publish a packet. `post` resolves only once the relay has stored it.
import { connect, Identity } from "strata-client";

const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity: await Identity.generate() });
const { packetId, receivedAt } = await relay.post({ type: "POST", text: "hello from JavaScript" });
console.log(packetId, "stored at", new Date(receivedAt * 1000).toISOString());
await relay.close();
