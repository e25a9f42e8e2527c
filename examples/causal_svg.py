"""The causal log of a channel as a picture: each message, and the messages that its sender had received.

Each participant is a column, Lamport time runs down, and arrows lead from each message up to the messages in
its causal history. Two messages without a path of arrows between them have no natural order, but the log
orders them too, and in the same way for every participant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["Logged", "causal_svg"]

Logged = tuple[str, str, int, tuple[str, ...]]
"""A row of `ReliableChannel.causal_log`: message id, sender id, Lamport time, and the ids of its history."""

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_COLUMN, _ROW, _LEFT, _TOP, _RADIUS = 150, 26, 90, 96, 7


def causal_svg(log: Sequence[Logged], title: str = "Causal log") -> str:
    """Draw a log in its shared order as an SVG document."""
    senders = sorted({sender for _, sender, _, _ in log})
    colour = {sender: _COLOURS[number % len(_COLOURS)] for number, sender in enumerate(senders)}
    # Lamport times can be as far apart as milliseconds of a clock: one row for each that occurs keeps the
    # picture small.
    rows = {lamport: row for row, lamport in enumerate(sorted({lamport for _, _, lamport, _ in log}))}
    at = {
        message_id: (_LEFT + _COLUMN * (senders.index(sender) + 0.5), _TOP + _ROW * rows[lamport])
        for message_id, sender, lamport, _ in log
    }
    width, height = _LEFT + _COLUMN * len(senders) + 20, _TOP + _ROW * len(rows) + 10
    first = min(rows, default=0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="#111827">{escape(title)}</text>',
        '<text x="16" y="46" fill="#6b7280">Lamport time runs down; an arrow points to what a message follows'
        "</text>",
        *_grid(senders, colour, rows, first, width, height),
    ]
    for message_id, sender, _, follows in log:
        parts += [_arrow(at[message_id], at[each], colour[sender]) for each in follows if each in at]
    for number, (message_id, sender, lamport, follows) in enumerate(log, 1):
        x, y = at[message_id]
        tip = f"{number}. {sender}, Lamport time {lamport}, follows {len(follows)}: {message_id}"
        parts.append(
            f'<circle cx="{x:.0f}" cy="{y}" r="{_RADIUS}" fill="{colour[sender]}" stroke="#ffffff" '
            f'stroke-width="1.5"><title>{escape(tip)}</title></circle>'
            f'<text x="{x + 12:.0f}" y="{y + 4}" font-size="10" fill="#374151" '
            f'stroke="#ffffff" stroke-width="3" paint-order="stroke">{number}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _grid(
    senders: Sequence[str], colour: dict[str, str], rows: dict[int, int], first: int, width: int, height: int
) -> list[str]:
    parts = []
    for lamport, row in rows.items():
        y = _TOP + _ROW * row
        parts.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{width - 16}" y2="{y}" stroke="#f3f4f6"/>'
            f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end" font-size="10" fill="#9ca3af">'
            f"+{lamport - first}</text>"
        )
    for number, sender in enumerate(senders):
        x = _LEFT + _COLUMN * (number + 0.5)
        parts.append(
            f'<line x1="{x:.0f}" y1="{_TOP - 16}" x2="{x:.0f}" y2="{height - 8}" stroke="#e5e7eb"/>'
            f'<text x="{x:.0f}" y="{_TOP - 24}" text-anchor="middle" font-weight="600" '
            f'fill="{colour[sender]}">{escape(sender)}</text>'
        )
    return parts


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    """Draw an arrow to an earlier message, bent within a column so that it hides no message in between."""
    (x1, y1), (x2, y2) = start, end
    bend = 0.0 if x1 != x2 or y1 - y2 <= _ROW else -min(46.0, 10 + (y1 - y2) / 8)
    middle_x, middle_y = (x1 + x2) / 2 + bend * 2, (y1 + y2) / 2
    # The head is at the edge of the circle, in the direction of the curve there.
    towards = math.atan2(y2 - middle_y, x2 - middle_x)
    tip_x, tip_y = x2 - (_RADIUS + 2) * math.cos(towards), y2 - (_RADIUS + 2) * math.sin(towards)
    wings = [
        (tip_x - 6 * math.cos(towards + side), tip_y - 6 * math.sin(towards + side)) for side in (-0.5, 0.5)
    ]
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(tip_x, tip_y), *wings])
    return (
        f'<path d="M{x1:.0f} {y1} Q{middle_x:.1f} {middle_y:.1f} {tip_x:.1f} {tip_y:.1f}" fill="none" '
        f'stroke="{colour}" stroke-opacity="0.45"/>'
        f'<polygon points="{head}" fill="{colour}" fill-opacity="0.6"/>'
    )
