// Resume where the last run stopped: save the cursor after each packet has been processed, and pass it to the next run.
import { readFile, writeFile } from "node:fs/promises";
import { connect, Identity } from "strata-client";

const place = `${process.env.FOLDER ?? "."}/place`;
const me = await Identity.generate();
const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity: me });
for (const text of ["one", "two", "three"]) await relay.post({ type: "POST", text });
for (let run = 1; run <= 2; run++) {
  const cursor = await readFile(place, "utf8").catch(() => undefined);
  for await (const delivery of relay.fetch({ authors: me.did, cursor, limit: 2 })) {
    console.log(`run ${run}:`, delivery.packet.content.text);
    await writeFile(place, delivery.cursor);
  }
}
await relay.close();
