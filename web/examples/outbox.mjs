// Keep packets until the relay has them, even if this program restarts. In a browser: indexedDbOutbox("me").
import { build, connect, Identity } from "strata-client";
import { fileOutbox } from "strata-client/node";

const outbox = fileOutbox(`${process.env.FOLDER ?? "."}/outbox`);
const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { outbox });
const { packetId, sent } = await relay.outbox.add(await build(await Identity.generate(), { type: "POST", text: "safe" }));
console.log(packetId, "is durable here");
await sent; // need not be awaited: waiting packets are sent as soon as the relay can be reached
console.log("and the relay has it;", (await relay.outbox.list()).length, "packets wait");
await relay.close();
