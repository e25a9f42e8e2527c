// A relay that loses packets, to try how channels recover from that. The same seed loses the same packets.
import type { Delivery, Published } from "strata-client";
import type { ChannelRelay, Reading } from "strata-client/channels";

/** How many packets were lost in each direction. */
export interface Losses {
  out: number;
  in: number;
}

export function lossy(relay: ChannelRelay, share: number, seed: number, losses: Losses): ChannelRelay {
  const isLost = generator(seed, share);
  const reading = (found: Reading): Reading => ({
    close: () => found.close(),
    async *[Symbol.asyncIterator](): AsyncGenerator<Delivery> {
      for await (const delivery of found) {
        if (isLost()) losses.in++;
        else yield delivery;
      }
    },
  });
  return {
    get announced() {
      return relay.announced;
    },
    keyChain: (did) => relay.keyChain(did),
    subscribe: (options) => reading(relay.subscribe(options)),
    fetch: (options) => reading(relay.fetch(options)),
    async publish(packet, options): Promise<Published> {
      if (!isLost()) return relay.publish(packet, options);
      losses.out++; // the sender believes that the packet arrived
      return { packetId: packet.packetId, receivedAt: undefined, duplicate: false, queued: false, downgradedTo: undefined };
    },
  };
}

/** Random draws that are true with this probability (Mulberry32). */
function generator(seed: number, share: number): () => boolean {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32 < share;
  };
}
