import assert from "node:assert/strict";
import { test } from "node:test";

import { Identity } from "../src/client/protocol/ids.js";
import { Core } from "../src/client/relays/core.js";
import { withDefaults } from "../src/client/relays/options.js";
import type { Stream } from "../src/client/relays/stream.js";
import { Query } from "../src/client/relays/values.js";
import { bytes, vectors } from "./vectors.js";

// Each kind of step has members of its own
type Step = Record<string, any> & { do: string; now: number; sent?: unknown[]; settled?: unknown[] };

interface Talk {
  name: string;
  options: Record<string, unknown>;
  did: string | null;
  seed: string;
  steps: Step[];
  statistics: Record<string, unknown>;
}

const T = 1_760_000_000;

function camel(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

function camelMembers(value: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [camel(name), item]));
}

function outcome(value: unknown): unknown {
  if (value instanceof Error) {
    const { code, detail } = value as { code?: string; detail?: string };
    if (value.name !== "RequestRefused") return { error: value.name };
    return { error: value.name, code, detail: detail ?? null };
  }
  const members = value as Record<string, unknown>;
  if ("authorId" in members) {
    const granted = members["capabilities"] as Set<string> | undefined;
    return { author_id: members["authorId"], capabilities: granted ? [...granted].sort() : null };
  }
  return {
    packet_id: members["packetId"],
    received_at: members["receivedAt"] ?? null,
    duplicate: members["duplicate"],
    queued: members["queued"],
  };
}

for (const talk of vectors<Talk[]>("transcripts")) {
  test(`the core says what Python's says: ${talk.name}`, async () => {
    const me = await Identity.fromSeed(bytes(talk.seed));
    const core = new Core({
      options: withDefaults(camelMembers(talk.options)),
      random: () => 0.5,
      did: talk.did ?? undefined,
      address: "ws://r:1/",
    });
    const streams: Stream[] = [];
    for (const [number, step] of talk.steps.entries()) {
      const place = `step ${number}, ${JSON.stringify(step)}`;
      const stream = streams[step["stream"] ?? -1] as Stream;
      const now = step.now;
      switch (step.do) {
        case "connect": {
          if (step["expect"] !== undefined) core.expect(step["expect"]);
          const extensions = new Set<string>(step["extensions"]);
          core.connectionMade({ extensions, relayId: step["relay_id"] ?? undefined }, now, T + now);
          break;
        }
        case "lose":
          core.connectionLost();
          break;
        case "subscribe":
          streams.push(core.subscribe(new Query(camelMembers(step["query"] ?? {})), now));
          break;
        case "unsubscribe":
          core.unsubscribe(stream);
          break;
        case "publish":
          core.publish(step["packet_id"] as string, step["canonical"] as string, step["timeout"] as number, now);
          break;
        case "authenticate":
          assert.equal(core.authenticate(now), step["undecided"], place);
          break;
        case "timer":
          core.handleTimer(now);
          break;
        case "receive":
          core.receiveMessage(step["frame"] as string, now);
          break;
        case "take":
          assert.deepEqual(take(core, stream, step["most"] as number, now), step["taken"] ?? [], place);
      }
      const settled: unknown[] = [];
      for (let changes = core.changes(); changes.length > 0; changes = core.changes()) {
        for (const change of changes) {
          if (change.kind === "signature") core.signed(change.request, await me.sign(change.message), now);
          if (change.kind === "published") settled.push({ handle: change.handle, outcome: outcome(change.outcome) });
          if (change.kind === "authenticated") settled.push({ authenticated: outcome(change.outcome) });
        }
      }
      const expected = (step.settled ?? []).filter((item) => !("short" in (item as object)));
      assert.deepEqual(core.dataToSend().map((frame) => JSON.parse(frame) as unknown), step.sent ?? [], place);
      assert.deepEqual(settled, expected, place);
      assert.deepEqual(
        streams.map((one) => [one.phase, one.wireId ?? null, one.error ? outcome(one.error) : null]),
        step["streams"] ?? [],
        place,
      );
      assert.equal(core.timer === Infinity ? undefined : core.timer, step["wake_at"], place);
    }
    const expected = camelMembers(talk.statistics);
    for (const [name, value] of Object.entries(core.statistics)) assert.deepEqual(value, expected[name], name);
  });
}

function take(core: Core, stream: Stream, most: number, now: number): unknown[] {
  const taken: unknown[] = [];
  while (taken.length < most) {
    const item = stream.take();
    if (item === undefined) break;
    if (item.kind === "reset") {
      const { lost, cursor, since } = item.reset;
      taken.push({ lost, cursor: cursor ?? null, since: since ?? null });
    } else {
      taken.push([item.cursor ?? null, item.receivedAt, item.live ?? null, item.byReceipt]);
    }
    core.taken(stream, item.kind === "event", now);
  }
  return taken;
}
