"""The curves of `benches.sds` as an SVG with three panels; both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["plot"]

_PANELS = (
    ("wraps_per_second", "messages wrapped a second", (10, 100_000)),
    ("receives_per_second", "messages received a second", (10, 100_000)),
    ("bytes_per_message", "bytes kept of a message", (1_000, 100_000)),
)
_COLOURS = ("#1b6ca8", "#c8553d")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 190, 58, 46, 70
_MESSAGES = (1_000, 100_000)


def plot(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw the figures of each implementation."""
    width = _LEFT + len(_PANELS) * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 56}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, (key, title, bounds) in enumerate(_PANELS):
        left = _LEFT + place * (_WIDTH + _GAP)
        parts += _frame(left, title, bounds)
        for colour, rows in zip(_COLOURS, figures.values(), strict=False):
            parts += _curve(left, bounds, [(row["messages"], row[key]) for row in rows], colour)
    for place, (colour, name) in enumerate(zip(_COLOURS, figures, strict=False)):
        left = _LEFT + place * 150
        parts.append(f'<rect x="{left}" y="10" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="16">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(left: int, title: str, bounds: tuple[int, int]) -> list[str]:
    bottom = _TOP + _HEIGHT
    parts = [
        f'<text x="{left}" y="{_TOP - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">messages in the log</text>',
    ]
    for value in _decades(bounds):
        y = _y(value, bounds)
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>')
    for value in _decades(_MESSAGES):
        x = _x(left, value)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:,}</text>')
    return parts


def _curve(
    left: int, bounds: tuple[int, int], points: Sequence[tuple[float, float]], colour: str
) -> list[str]:
    places = [(_x(left, messages), _y(value, bounds)) for messages, value in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), (_, value) in zip(places, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="middle" fill="{colour}">{value:,.0f}</text>'
        )
    return parts


def _decades(bounds: tuple[int, int]) -> list[int]:
    return [10**power for power in range(round(math.log10(bounds[0])), round(math.log10(bounds[1])) + 1)]


def _share(value: float, bounds: tuple[int, int]) -> float:
    return math.log(max(value, bounds[0]) / bounds[0]) / math.log(bounds[1] / bounds[0])


def _x(left: int, messages: float) -> float:
    return left + 12 + (_WIDTH - 24) * _share(messages, _MESSAGES)


def _y(value: float, bounds: tuple[int, int]) -> float:
    return _TOP + _HEIGHT * (1 - _share(value, bounds))
