// Follow an author: first stored packets, then new ones. Leaving the loop ends the subscription.
import { connect, Identity } from "strata-client";

const me = await Identity.generate();
const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity: me });
await relay.post({ type: "POST", text: "stored" });
for await (const { packet, live } of relay.subscribe({ authors: me.did })) {
  console.log(live ? "live:" : "stored:", packet.content.text);
  if (live) break;
  await relay.post({ type: "POST", text: "live" });
}
await relay.close();
