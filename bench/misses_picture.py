"""Draw tokens a second by the share of hits, with the line that the link allows: SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
RATES = [step * 10**power for power in range(5) for step in (1, 2, 5)]  # that an axis may name
MARKS = {"hits": "#1f77b4", "steady": "#2ca02c", "cold": "#d62728"}
LEGEND = {
    "hits": "who has a slot stays",
    "steady": "experts follow: steady",
    "cold": "the first tokens: cold",
}
LEGEND_AT = (248, 400, 560)  # where each of them begins


def picture(
    rows: Sequence[Mapping[str, Any]], resident_s: float, missed_s: float, title: str
) -> str:
    """Return an SVG.

    rows         of card_misses: phase, percent, adapt, hit_rate, tok_per_s
    resident_s   of a token that misses nothing
    missed_s     that a token takes longer on the link if it misses everything
    """
    limit = [1 / (resident_s + (1 - place / 100) * missed_s) for place in range(101)]
    shown = [row for row in rows if row["phase"] in MARKS]
    ways = {row["adapt"] for row in shown if row["phase"] != "hits"}
    rates = [*limit, *(row["tok_per_s"]["median"] for row in shown)]
    low = max([rate for rate in RATES if rate <= min(rates)], default=RATES[0])
    high = min([rate for rate in RATES if rate >= max(rates)], default=RATES[-1])
    span = math.log(max(high, low * 2) / low)

    def x(hit_rate: float) -> float:
        return LEFT + hit_rate * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - math.log(rate / low) / span * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 20, f"{title}: tokens a second by the share of hits", size=14),
    ]
    for rate in (rate for rate in RATES if low <= rate <= high):
        parts.append(_line(LEFT, y(rate), WIDTH - RIGHT, y(rate), "#ddd"))
        parts.append(_text(LEFT - 8, y(rate) + 4, f"{rate:,}", anchor="end"))
    for percent in range(0, 101, 25):
        place = x(percent / 100)
        parts.append(_line(place, TOP, place, HEIGHT - BOTTOM, "#ddd"))
        parts.append(_text(place, HEIGHT - BOTTOM + 18, f"{percent}%", anchor="middle"))
    points = " ".join(f"{x(n / 100):.1f},{y(rate):.1f}" for n, rate in enumerate(limit))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#555" stroke-dasharray="6 4"/>')
    for row in shown:
        hit_rate, rate = row["hit_rate"], row["tok_per_s"]["median"]
        what = f"{row['percent']}%, {row['adapt']}, {row['phase']}"
        name = f"{row['routes']}, {what}: {rate:,.1f} tok/s"
        parts.append(
            f'<circle cx="{x(hit_rate):.1f}" cy="{y(rate):.1f}" r="4" '
            f'fill="{MARKS[row["phase"]]}"><title>{escape(name)}</title></circle>'
        )
        if row["phase"] != "hits":
            label = f"{row['percent']}%" + (f" {row['adapt']}" if len(ways) > 1 else "")
            parts.append(_text(x(hit_rate), y(rate) - 8, label, anchor="middle", size=10))
    parts.append(_line(LEFT, HEIGHT - 14, LEFT + 24, HEIGHT - 14, "#555", dash="6 4"))
    parts.append(_text(LEFT + 30, HEIGHT - 10, "what the link allows"))
    for (phase, text), place in zip(LEGEND.items(), LEGEND_AT, strict=True):
        parts.append(f'<circle cx="{place}" cy="{HEIGHT - 14}" r="4" fill="{MARKS[phase]}"/>')
        parts.append(_text(place + 8, HEIGHT - 10, text))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {where}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, dash: str = "none") -> str:
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{stroke}" stroke-dasharray="{dash}"/>'
