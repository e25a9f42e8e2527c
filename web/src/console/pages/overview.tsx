// Overview: the state of the relay, by its own figures.

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";

import { Note } from "../parts/bits.js";
import { Chart } from "../parts/chart.js";
import { relayNow } from "../state/link.js";
import { latest, missing, points, type Reading, sum, watch } from "../state/metrics.js";
import { manifest } from "../state/relay.js";
import { bytes, count, line, shown, span } from "../text.js";

const rate = (value: number): string => `${value < 10 ? value.toFixed(1) : count(Math.round(value))}/s`;
const whole = (value: number): string => count(Math.round(value));
const time = (seconds: number): string => (seconds === Infinity ? "over 10 s" : seconds < 1 ? `≤ ${+(1000 * seconds).toFixed(1)} ms` : `≤ ${seconds} s`);

export function Overview(): JSX.Element {
  useEffect(watch, []);
  const reading = latest.value;
  return (
    <section class="page overview">
      <h1>Overview</h1>
      {missing.value === "elsewhere" && (
        <Note title="The figures are on another port">
          <p>This relay serves /metrics on another port (metrics_listen), so this page cannot read them.</p>
        </Note>
      )}
      {missing.value === "unreachable" && (
        <Note tone="warn" title="The relay's figures cannot be read now">
          <p>What is shown was read before.</p>
        </Note>
      )}
      {reading !== null && <Tiles reading={reading} />}
      {reading === null && missing.value === "" && <p class="hint">Reading…</p>}
      {reading !== null && (
        <div class="charts">
          <Chart title="Published" format={rate} points={points.value} lines={[{ figure: "publishes", name: "stored" }, { figure: "refused", name: "refused" }]} />
          <Chart title="Events to readers" format={rate} points={points.value} lines={[{ figure: "events", name: "events" }]} />
          <Chart title="Time to OK" format={time} points={points.value} lines={[{ figure: "p50", name: "p50" }, { figure: "p99", name: "p99" }]} />
          <Chart title="Connections" format={whole} points={points.value} lines={[{ figure: "connections", name: "open" }]} />
          <Chart title="Subscriptions" format={whole} points={points.value} lines={[{ figure: "subscriptions", name: "open" }, { figure: "behind", name: "behind" }]} />
          <Chart title="Sent" format={(value) => `${bytes(Math.round(value))}/s`} points={points.value} lines={[{ figure: "bytes", name: "sent" }]} />
        </div>
      )}
      {reading !== null && (
        <p class="hint">
          Read every two seconds while this page is in view; it alone keeps the last ten minutes. Times are the upper bounds of
          histogram buckets: p99 ≤ 5 ms means that 99 of 100 took 5 ms or less.
        </p>
      )}
      <Described />
    </section>
  );
}

function Tiles({ reading }: { reading: Reading }): JSX.Element {
  const started = sum(reading, "process_start_time_seconds");
  const behind = sum(reading, "relayd_subscriptions_behind");
  const faults = sum(reading, "relayd_faults_total");
  return (
    <dl class="tiles">
      <Tile name="Stored" value={whole(sum(reading, "relayd_publishes_total", '"accepted"'))} note="since it started" />
      <Tile name="Connections" value={whole(sum(reading, "relayd_connections"))} note="this page has one" />
      <Tile name="Subscriptions" value={whole(sum(reading, "relayd_subscriptions"))} note={behind > 0 ? `${whole(behind)} read behind the live feed` : "all live"} />
      <Tile name="Database" value={sum(reading, "relayd_database_up") > 0 ? "✓ up" : "✗ away"} note={bytes(sum(reading, "relayd_database_bytes"))} />
      {started > 0 && <Tile name="Running for" value={span(relayNow() - started)} />}
      <Tile name="Internal errors" value={whole(faults)} note={faults > 0 ? "each is in its log" : "none since it started"} />
    </dl>
  );
}

function Tile({ name, value, note = "" }: { name: string; value: string; note?: string }): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        <b>{value}</b>
        {note !== "" && <span class="hint">{note}</span>}
      </dd>
    </div>
  );
}

/** What the relay says about itself in its manifest. */
function Described(): JSX.Element | null {
  const said = manifest.value;
  if (said === null) return null;
  const days = said.policy["default_retention_days"];
  const required = said.auth.required_for;
  const size = said.limits["max_packet_bytes"];
  const facts: readonly [string, string][] = [
    ["Relay", said.relay_id],
    ["Address", said.ws_endpoint],
    ["Software", `${said.software.name} ${said.software.version}`],
    ["Keeps packets", typeof days === "number" ? `${days} days` : "for ever"],
    ["Publishing", said.policy["accepts_public_packets"] === true ? "open to anybody" : "open to listed authors"],
    ["Authentication", required.length === 0 ? "not needed" : `needed to ${required.join(" and ")}`],
    ["Largest packet", typeof size === "number" ? bytes(size) : "—"],
  ];
  return (
    <>
      <h2>What the relay says about itself</h2>
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{name === "Relay" ? <span class="mono">{shown(value)}</span> : line(value, 200)}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}
