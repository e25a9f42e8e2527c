// Read the latest packets of a relay, newest first; each is verified before it is delivered.
import { connect, Identity } from "strata-client";

const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity: await Identity.generate() });
await relay.post({ type: "POST", text: "so that there is something to read" });
for await (const { packet } of relay.fetch({ types: "POST", order: "desc", limit: 10 })) {
  console.log(packet.authorId.slice(-8), packet.content.text);
}
await relay.close();
