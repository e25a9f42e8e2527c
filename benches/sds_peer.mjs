// Measures @waku/sds the way benches/sds.py measures strata.channels.sds; run by it, in a folder with the package.
// Arguments: history sizes, ascending; then the seconds after which no further size is begun.
import { MessageChannel, Message } from "@waku/sds";

const WINDOW = 100;
const sizes = process.argv.slice(2, -1).map(Number);
const deadline = performance.now() + 1000 * Number(process.argv.at(-1));
const options = { causalHistorySize: 2, enableRepair: true };
const sender = new MessageChannel("room", "alice", options);
const receiver = new MessageChannel("room", "bob", options);
const hint = new Uint8Array(32).fill(7);

function memory() {
  globalThis.gc();
  const { heapUsed, external } = process.memoryUsage();
  return heapUsed + external;
}

async function push(from, to) {
  const wire = [];
  for (let i = from; i < to; i++) {
    const payload = new TextEncoder().encode(String(i).padStart(8, "0") + ".".repeat(112));
    sender.pushOutgoingMessage(payload, async (message) => {
      wire.push(message.encode());
      return { success: true, retrievalHint: hint };
    });
    await sender.processTasks();
  }
  return wire;
}

async function receive(wire) {
  for (const data of wire) {
    receiver.pushIncomingMessage(Message.decode(data), hint);
    await receiver.processTasks();
  }
}

async function timed(work) {
  const start = performance.now();
  const result = await work();
  return [result, (performance.now() - start) / 1000];
}

const before = memory();
let done = 0;
for (const size of sizes) {
  while (done < size - WINDOW && performance.now() < deadline) {
    const next = Math.min(done + WINDOW, size - WINDOW);
    await receive(await push(done, next));
    done = next;
  }
  if (done < size - WINDOW) break;
  const [wire, pushing] = await timed(() => push(done, size));
  const [, receiving] = await timed(() => receive(wire));
  done = size;
  const figures = {
    messages: size,
    wraps_per_second: WINDOW / pushing,
    receives_per_second: WINDOW / receiving,
    bytes_per_message: (memory() - before) / size / 2,
    message_bytes: wire.at(-1).length,
  };
  console.log(JSON.stringify(figures));
}
process.exit(0);
