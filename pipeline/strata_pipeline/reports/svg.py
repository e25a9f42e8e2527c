"""Plots as inline SVG. Colours come from the page's style sheet, so they follow its light or dark mode.

They have no role: as images they would hide their labels and titles from those who hear the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from strata_pipeline.reports.text import escaped, shortened

__all__ = ["bars", "columns", "heat", "lines", "ranges", "triangle"]

_WIDTH, _HEIGHT = 640, 200
_LEFT, _TOP, _BOTTOM = 72, 12, 28
_LABEL, _ROW = 220, 22
_LABEL_CHARACTERS = 27
_LETTER = 7.5
_LINE = 14
_DURATIONS = (0, 1, 10, 60, 600, 3_600, 36_000, 86_400, 864_000, 8_640_000, 86_400_000)


def columns(
    points: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    show: Callable[[float], str],
    base: float = 1,
) -> str:
    """Stacked columns: each point has a label and a value for each of `names`.

    `base` is 1024 for bytes, so that the axis has round numbers of KiB, MiB or larger units.
    """
    highest = max((sum(values) for _, values in points), default=0.0)
    unit = base ** math.floor(math.log(highest, base)) if base > 1 and highest > base else 1.0
    top, step = (unit * part for part in _scale(highest / unit))
    parts = [_open(_WIDTH, _TOP + _HEIGHT + _BOTTOM)]
    for tick in range(round(top / step) + 1):
        y = _TOP + _HEIGHT * (1 - tick * step / top)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH}"/>')
        parts.append(_text(_LEFT - 6, y + 4, show(tick * step), "end"))
    slot = (_WIDTH - _LEFT) / max(1, len(points))
    every = math.ceil((max((len(label) for label, _ in points), default=0) + 2) * _LETTER / slot)
    for place, (label, values) in enumerate(points):
        x, below = _LEFT + slot * (place + 0.1), 0.0
        told = ", ".join(f"{name} {show(value)}" for name, value in zip(names, values, strict=True))
        parts.append(f"<g><title>{escaped(f'{label}: {told}')}</title>")
        for number, value in enumerate(values):
            below += value
            y, height = _TOP + _HEIGHT * (1 - below / top), _HEIGHT * value / top
            parts.append(
                f'<rect class="s{number}" x="{x:.1f}" y="{y:.1f}" width="{slot * 0.8:.1f}" '
                f'height="{height:.1f}"/>'
            )
        parts.append("</g>")
        if place % every == 0:
            parts.append(_below(x + slot * 0.4, label))
    return "".join([*parts, "</svg>", _legend(names)])


def bars(rows: Sequence[tuple[str, float]], show: Callable[[float], str]) -> str:
    """A horizontal bar for each row: its label and value."""
    highest = max((value for _, value in rows), default=0.0) or 1.0
    room = _WIDTH - _LABEL - 70
    parts = [_open(_WIDTH, _ROW * len(rows) + 4)]
    for place, (label, value) in enumerate(rows):
        y, width = place * _ROW + 4, room * value / highest
        parts.append(_label(y, label))
        parts.append(f'<rect class="s0" x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_ROW - 6}"/>')
        parts.append(_text(_LABEL + width + 6, y + 12, show(value)))
    return "".join([*parts, "</svg>"])


def ranges(rows: Sequence[tuple[str, float, float]], show: Callable[[float], str]) -> str:
    """A line from a low to a high number of seconds for each row, on a logarithmic axis with a 0."""
    highest = max((high for _, _, high in rows), default=0.0)
    needed = next((n for n, tick in enumerate(_DURATIONS) if n > 1 and tick >= highest), len(_DURATIONS))
    ticks = _DURATIONS[: needed + 1]
    room = _WIDTH - _LABEL - 40
    end = math.log10(max(highest, ticks[-1]) + 1)
    height = _ROW * len(rows) + 4

    def x(value: float) -> float:
        return _LABEL + 8 + room * math.log10(max(0.0, value) + 1) / end

    parts = [_open(_WIDTH, height + 20)]
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 0V{height}"/>')
        parts.append(_text(x(tick), height + 14, show(tick), "middle"))
    for place, (label, low, high) in enumerate(rows):
        y = place * _ROW + 4
        parts.append(
            f"<g><title>{escaped(f'{label}: {show(low)} to {show(high)}')}</title>{_label(y, label)}"
        )
        parts.append(f'<path class="line" d="M{x(low):.1f} {y + 8}H{x(high):.1f}"/>')
        parts.append(f'<circle class="s0" cx="{x(low):.1f}" cy="{y + 8}" r="5"/>')
        parts.append(f'<circle class="s1" cx="{x(high):.1f}" cy="{y + 8}" r="5"/></g>')
    return "".join([*parts, "</svg>"])


def lines(
    points: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[str], show: Callable[[float], str]
) -> str:
    """A line of seconds for each of `names`, four at most, on a logarithmic axis with a 0; None is a gap."""
    found = [value for _, values in points for value in values if value is not None]
    low, high = min([0.0, *found]), max([1.0, *found])
    least, most = _log(low), _log(high)
    ticks = [sign * tick for tick in _DURATIONS for sign in (1, -1) if low <= sign * tick <= high]
    apart = (most - least) * _LINE / _HEIGHT

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - (_log(value) - least) / (most - least))

    parts = [_open(_WIDTH, _TOP + _HEIGHT + _BOTTOM)]
    shown: list[float] = []
    for tick in ticks:
        if all(abs(_log(tick) - _log(other)) >= apart for other in shown):
            shown.append(tick)
            parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH}"/>')
            parts.append(_text(_LEFT - 6, y(tick) + 4, show(tick), "end"))
    slot = (_WIDTH - _LEFT) / max(1, len(points))
    every = math.ceil((max((len(label) for label, _ in points), default=0) + 2) * _LETTER / slot)
    places = [_LEFT + slot * (place + 0.5) for place in range(len(points))]
    for number in range(len(names)):
        drawn, pen = "", "M"
        for x, (_, values) in zip(places, points, strict=True):
            value = values[number]
            drawn += "" if value is None else f"{pen}{x:.1f} {y(value):.1f}"
            pen = "M" if value is None else "L"
        parts.append(f'<path class="l{number}" d="{drawn}"/>')
    for place, (x, (label, values)) in enumerate(zip(places, points, strict=True)):
        known = [(n, value) for n, value in enumerate(values) if value is not None]
        told = ", ".join(f"{names[n]} {show(value)}" for n, value in known)
        dots = "".join(f'<circle class="s{n}" cx="{x:.1f}" cy="{y(value):.1f}" r="3"/>' for n, value in known)
        parts.append(f"<g><title>{escaped(f'{label}: {told}')}</title>{dots}</g>")
        if place % every == 0:
            parts.append(_below(x, label))
    return "".join([*parts, "</svg>", _legend(names)])


def triangle(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Shares from 0 to 1, a row of cells for each label: the fuller, the larger the share."""
    cells = [
        (label, [(f"{label} +{number}: {share:.0%}", share) for number, share in enumerate(shares)])
        for label, shares in rows
    ]
    most = max((len(shares) for _, shares in rows), default=1)
    return _cells(cells, [f"+{number}" for number in range(most)])


def heat(
    rows: Sequence[tuple[str, Sequence[float]]], heads: Sequence[str], show: Callable[[float], str]
) -> str:
    """A row of cells for each label, and in it one for each of `heads`: the fuller, the larger the value."""
    highest = max((value for _, values in rows for value in values), default=0.0) or 1.0
    cells = [
        (
            label,
            [(f"{label} {head}: {show(value)}", value / highest)
             for head, value in zip(heads, values, strict=True)],
        )
        for label, values in rows
    ]  # fmt: skip
    return _cells(cells, heads)


def _cells(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], heads: Sequence[str]) -> str:
    """Rows of cells, each with its title and how full it is."""
    width = min(60.0, (_WIDTH - _LEFT) / max(1, len(heads)))
    parts = [_open(_WIDTH, _ROW * len(rows) + 24)]
    for place, (label, cells) in enumerate(rows):
        y = place * _ROW + 2
        parts.append(_text(_LEFT - 6, y + 14, label, "end"))
        for number, (title, fullness) in enumerate(cells):
            x = _LEFT + number * width
            place_and_size = f'x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="{_ROW - 2}"'
            # An empty cell is visible by its frame.
            parts.append(
                f"<g><title>{escaped(title)}</title>"
                f'<rect class="grid" {place_and_size} fill="none"/>'
                f'<rect class="s0" {place_and_size} fill-opacity="{fullness:.2f}"/></g>'
            )
    for number in range(0, len(heads), math.ceil(3 * _LETTER / width)):
        x = _LEFT + (number + 0.5) * width
        parts.append(_text(x, _ROW * len(rows) + 18, heads[number], "middle"))
    return "".join([*parts, "</svg>"])


def _log(seconds: float) -> float:
    return math.copysign(math.log10(abs(seconds) + 1), seconds)


def _below(x: float, label: str) -> str:
    """A label below the axis, placed so that all of it is within the picture."""
    half = len(label) * _LETTER / 2
    return _text(min(max(x, half), _WIDTH - half), _TOP + _HEIGHT + 18, label, "middle")


def _open(width: int, height: int) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _label(y: float, label: str) -> str:
    short = escaped(shortened(label, _LABEL_CHARACTERS))
    return (
        f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{short}<title>{escaped(label)}</title></text>'
    )


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    keys = [f'<span class="key k{number}">{escaped(name)}</span>' for number, name in enumerate(names)]
    return f'<p class="legend">{"".join(keys)}</p>'


def _scale(highest: float) -> tuple[float, float]:
    """A round number at or above the highest value, and a round step that divides it into at most five
    parts."""
    if highest <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(part * power for part in (0.2, 0.5, 1.0, 2.0) if highest / (part * power) <= 5)
    return math.ceil(highest / step) * step, step
