// Prove an identity to one relay only: the DID that a relay shows first is pinned.
import { connect, Identity } from "strata-client";
import { filePins } from "strata-client/node";

const identity = await Identity.generate();
const pins = filePins(`${process.env.FOLDER ?? "."}/relays.json`); // in a browser: localStoragePins()
const relay = await connect(process.env.RELAY ?? "ws://127.0.0.1:7447/strata", { identity, pins });
const { authorId, capabilities } = await relay.authenticate();
console.log(authorId, "may", [...capabilities].join(" and "), "at", relay.relayId);
await relay.close();
