// A line over the last ten minutes, and the same figures as a table for people who do not use charts.

import type { JSX } from "preact";

import type { Figure, Point } from "../state/metrics.js";
import { clock, span as words } from "../text.js";

const WIDTH = 320;
const HEIGHT = 72;
const LONGEST = 600_000;
const SHORTEST = 60_000;
const ROWS = 20;

export interface Line {
  readonly figure: Figure;
  readonly name: string;
}

interface Props {
  readonly title: string;
  readonly lines: readonly Line[];
  readonly points: readonly Point[];
  readonly format: (value: number) => string;
}

export function Chart({ title, lines, points, format }: Props): JSX.Element {
  const until = points.at(-1)?.at ?? 0;
  const span = Math.min(LONGEST, Math.max(SHORTEST, until - (points[0]?.at ?? until)));
  const seen = points.filter(({ at }) => at >= until - span);
  const values = lines.flatMap(({ figure }) => seen.map((point) => point.values[figure])).filter(Number.isFinite);
  const top = Math.max(...values, 1e-9);
  const last = seen.at(-1);
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{title}</span>
        {lines.map(({ figure, name }, at) => {
          const value = last?.values[figure] ?? NaN;
          return (
            <span key={figure} class={`chart-now ${lines.length > 1 ? `key-${at}` : ""}`}>
              <b>{Number.isNaN(value) ? "—" : format(value)}</b>
              {lines.length > 1 && ` ${name}`}
            </span>
          );
        })}
      </figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        <path class="axis" d={`M0 ${HEIGHT - 0.5}H${WIDTH}`} />
        {lines.map(({ figure }, at) => (
          <path key={figure} class={`line line-${at}`} d={path(seen, figure, until, span, top)} />
        ))}
      </svg>
      <p class="chart-foot">
        <span>{words(span / 1000)} ago</span> <span>peak {values.length === 0 ? "—" : format(top)}</span> <span>now</span>
      </p>
      <details>
        <summary>Table</summary>
        <table>
          <caption class="hidden">{title}</caption>
          <thead>
            <tr>
              <th scope="col">Time</th>
              {lines.map(({ figure, name }) => (
                <th key={figure} scope="col" class="number">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {thinned(seen).map((point) => (
              <tr key={point.at}>
                <td>{clock(point.at / 1000)}</td>
                {lines.map(({ figure }) => (
                  <td key={figure} class="number">
                    {Number.isNaN(point.values[figure]) ? "—" : format(point.values[figure])}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </figure>
  );
}

/** The path of a line, which is interrupted where nothing was measured. */
function path(points: readonly Point[], figure: Figure, until: number, span: number, top: number): string {
  let text = "";
  let before = 0;
  for (const { at, values } of points) {
    const value = values[figure];
    if (!Number.isFinite(value)) {
      before = 0;
      continue;
    }
    const x = (WIDTH * (1 - (until - at) / span)).toFixed(1);
    const y = (HEIGHT - 2 - (HEIGHT - 6) * (value / top)).toFixed(1);
    text += `${before > 0 && at - before < 12_000 ? "L" : "M"}${x} ${y}`;
    before = at;
  }
  return text;
}

function thinned(points: readonly Point[]): readonly Point[] {
  const every = Math.max(1, Math.ceil(points.length / ROWS));
  return points.filter((_, at) => (points.length - 1 - at) % every === 0).reverse();
}
