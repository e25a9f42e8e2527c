// Verify a pasted packet without a relay. `verify` rejects with an error that has a code; `verdict` returns the code.
import { build, Identity, InvalidPacket, Packet, verdict, verify } from "strata-client";

const genuine = await build(await Identity.generate(), { type: "POST", text: "as I wrote it" });
await verify(Packet.parse(genuine.canonical));
console.log(genuine.packetId, await verdict(genuine));
for (const pasted of [genuine.canonical.replace("wrote", "signed"), '{"version":1,"version":1}']) {
  try {
    await verify(Packet.parse(pasted));
  } catch (error) {
    if (!(error instanceof InvalidPacket)) throw error;
    console.log("refused:", error.code, error.detail, "-", error.reason);
  }
}
