// Handle a relay's refusal, and a relay that cannot be reached.
import { build, connect, ConnectionFailed, Identity, RequestRefused } from "strata-client";

const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata");
try {
  const old = await build(await Identity.generate(), { type: "POST", text: "late" }, { timestamp: 1_700_000_000 });
  await relay.publish(old, { timeout: 10 });
} catch (error) {
  if (!(error instanceof RequestRefused)) throw error;
  console.log(`${error.code}: ${error.reason} Try again: ${error.retry}.`);
}
await relay.close();
await connect("ws://127.0.0.1:9/strata", { connectTimeout: 0.5 }).catch((error) => {
  if (!(error instanceof ConnectionFailed)) throw error;
  console.log(error.message);
});
