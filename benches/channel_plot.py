"""Convergence as an SVG with two panels: the share of runs that agree, by time, and the cost of a message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["plot"]

_COLOURS = ("#1b6ca8", "#e0a030", "#c8553d")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 190, 58, 46, 76
_COSTS = (
    ("retransmissions_per_message", "sent again"),
    ("syncs_per_message", "syncs"),
    ("repairs_per_message", "repairs"),
    ("retrievals_per_message", "store asked"),
)
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def plot(agreed: Mapping[float, Sequence[float]], summaries: Sequence[Mapping[str, Any]]) -> str:
    """Draw the seconds after which runs agreed, by loss, and the summary of each loss."""
    width = _LEFT + 2 * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 56}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, (colour, loss) in enumerate(zip(_COLOURS, agreed, strict=False)):
        left = _LEFT + place * 110
        parts.append(f'<rect x="{left}" y="10" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="16">{100 * loss:.0f} % lost</text>')
    parts += _shares(agreed)
    parts += _costs(_LEFT + _WIDTH + _GAP, summaries)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _shares(agreed: Mapping[float, Sequence[float]]) -> list[str]:
    """A curve for each loss: the share of runs that agreed, by seconds."""
    parts = _frame(_LEFT, "runs that agree, %", "virtual seconds since the last message was sent")
    for share in (0, 25, 50, 75, 100):
        parts += _level(_LEFT, share / 100, f"{share}")
    for seconds in (0.1, 1, 10, 100, 1000):
        x = _x(seconds)
        parts.append(f'<path d="M{x:.1f} {_TOP}v{_HEIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{seconds:g}</text>')
    for colour, found in zip(_COLOURS, agreed.values(), strict=False):
        ordered = sorted(found)
        # A step up for each run, and level to the edge.
        path = f"M{_LEFT} {_TOP + _HEIGHT}"
        for number, value in enumerate(ordered, 1):
            path += f"H{_x(value):.1f}"
            path += f"V{_TOP + _HEIGHT * (1 - number / len(ordered)):.1f}"
        path += f"H{_LEFT + _WIDTH}"
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def _x(seconds: float) -> float:
    """The place of a time on the axis: four decades, from a tenth of a second on."""
    return _LEFT + _WIDTH * min(1.0, max(0.0, (math.log10(seconds or 0.1) + 1) / 4))


def _costs(left: int, summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A group of bars for each kind of message that is sent in addition to the first transmissions."""
    most = max((summary[key] for summary in summaries for key, _ in _COSTS), default=1.0) * 1.15 or 1.0
    parts = _frame(left, "besides the first sending, for each message", "")
    step = _step(most)
    for tick in range(int(most / step) + 1):
        parts += _level(left, tick * step / most, f"{tick * step:g}")
    group = _WIDTH / len(_COSTS)
    bar = group / (len(summaries) + 1)
    for place, (key, name) in enumerate(_COSTS):
        start = left + place * group
        parts.append(
            f'<text x="{start + group / 2:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{name}</text>'
        )
        for number, (colour, summary) in enumerate(zip(_COLOURS, summaries, strict=False)):
            height = _HEIGHT * summary[key] / most
            x, y = start + bar * (number + 0.5), _TOP + _HEIGHT - height
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.9:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{x + bar * 0.45:.1f}" y="{y - 4:.1f}" text-anchor="middle" fill="{colour}">'
                f"{summary[key]:.2f}</text>"
            )
    return parts


def _frame(left: int, title: str, axis: str) -> list[str]:
    return [
        f'<text x="{left}" y="{_TOP - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 32}" text-anchor="middle">{axis}</text>',
    ]


def _level(left: int, share: float, label: str) -> list[str]:
    y = _TOP + _HEIGHT * (1 - share)
    return [
        f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#eee"/>',
        f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
    ]


def _step(most: float) -> float:
    """A round number that divides an axis into at most six parts."""
    return next((step for step in _STEPS if most / step <= 6), most)
