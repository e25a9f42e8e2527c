// Topics: what the latest packets are about, by content topic and type.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { Note, useWhile } from "../parts/bits.js";
import { to } from "../route.js";
import { connections, page, relayNow, RequestFailed } from "../state/link.js";
import { manifest } from "../state/relay.js";
import { rowOf } from "../state/rows.js";
import { quotedType } from "../state/searching.js";
import { bytes, clock, count, line, moment, span } from "../text.js";

const MOST = 500;

interface Topic {
  readonly name: string;
  packets: number;
  bytes: number;
  last: number;
  readonly authors: Set<string>;
}

interface Sample {
  readonly topics: readonly Topic[];
  readonly packets: number;
  readonly since: number;
  readonly isAll: boolean;
}

async function read(over: AbortSignal): Promise<Sample> {
  const limit = Math.min(MOST, Number(manifest.value?.limits["max_limit"] ?? 100));
  const { events, complete } = await page({ limit }, over);
  const topics = new Map<string, Topic>();
  for (const row of events.map(rowOf)) {
    const topic = topics.get(row.type) ?? { name: row.type, packets: 0, bytes: 0, last: 0, authors: new Set<string>() };
    topic.packets += 1;
    topic.bytes += row.size;
    topic.last = Math.max(topic.last, row.receivedAt);
    topic.authors.add(row.author);
    topics.set(row.type, topic);
  }
  return {
    topics: [...topics.values()].sort((a, b) => b.packets - a.packets),
    packets: events.length,
    since: events.at(-1)?.received_at ?? 0,
    isAll: complete,
  };
}

export function Topics(): JSX.Element {
  const [sample, setSample] = useState<Sample | null>(null);
  const [failed, fail] = useState("");
  const [asks, askAgain] = useState(0);
  const times = connections.value;
  useWhile((over) => {
    if (times === 0) return;
    read(over).then(
      (found) => over.aborted || (setSample(found), fail("")),
      (error: unknown) => over.aborted || fail(error instanceof RequestFailed ? error.reason : String(error)),
    );
  }, [times, asks]);
  const content = sample?.topics.filter(({ name }) => name.startsWith("/")) ?? [];
  const others = sample?.topics.filter(({ name }) => !name.startsWith("/")) ?? [];
  return (
    <section class="page topics">
      <div class="bar">
        <h1>Topics</h1>
        <button type="button" onClick={() => askAgain(asks + 1)}>
          Refresh
        </button>
      </div>
      {failed !== "" && (
        <Note tone="bad" title="The relay did not answer">
          <p>{line(failed, 300)}</p>
        </Note>
      )}
      {sample === null && failed === "" && <p class="hint">Reading…</p>}
      {sample !== null && (
        <p role="status" class="hint">
          {sample.packets === 0
            ? "Nothing is stored here yet."
            : `From the last ${count(sample.packets)} packets${sample.isAll ? ", which is all there are" : ""}, received since ${moment(sample.since)} (${span(relayNow() - sample.since)}).`}
        </p>
      )}
      {content.length > 0 && <Table title="Content topics of channels" topics={content} all={sample?.packets ?? 1} />}
      {others.length > 0 && <Table title="Types" topics={others} all={sample?.packets ?? 1} />}
    </section>
  );
}

const share = (part: number): string => (part < 0.01 ? "< 1 %" : `${Math.round(100 * part)} %`);

function Table({ title, topics, all }: { title: string; topics: readonly Topic[]; all: number }): JSX.Element {
  return (
    <>
      <h2>{title}</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label={title}>
        <table>
          <thead>
            <tr>
              <th scope="col">Name</th>
              <th scope="col" class="number">
                Packets
              </th>
              <th scope="col" class="number">
                Share
              </th>
              <th scope="col" class="number">
                Authors
              </th>
              <th scope="col" class="number">
                Size
              </th>
              <th scope="col">Last</th>
            </tr>
          </thead>
          <tbody>
            {topics.map((topic) => (
              <tr key={topic.name}>
                <td>
                  <a href={to("search", "", { q: quotedType(topic.name) })}>{line(topic.name, 100) || "(empty)"}</a>
                </td>
                <td class="number" data-label="Packets">{count(topic.packets)}</td>
                <td class="number share" data-label="Share">
                  <meter min={0} max={1} value={topic.packets / all} aria-hidden="true" /> <span>{share(topic.packets / all)}</span>
                </td>
                <td class="number" data-label="Authors">{count(topic.authors.size)}</td>
                <td class="number" data-label="Size">{bytes(topic.bytes)}</td>
                <td data-label="Last">{clock(topic.last)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
