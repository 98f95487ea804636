"""Draw tokens a second by the share of hits, with the line that the link allows: SVG.

Usage:
  misses_picture.py RESULT [--together=GB] [-o FILE]
  misses_picture.py --help

Draws anew what card_misses.py has stored, and prints the share of the lines that each row reaches.

Options:
  --together=GB  what link and CPU read in a second together, in 1e9 bytes, if the CPU computes a
                 part of the missed: a second line
  -o FILE        [default: bench/results/card_misses.svg]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from docopt import docopt

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
LINES = (("#555", "6 4", "what the link allows"), ("#999", "2 3", "link and CPU together"))
LINES_AT = 34  # below the title


def picture(
    rows: Sequence[Mapping[str, Any]], resident_s: float, missed_s: Sequence[float], title: str
) -> str:
    """Return an SVG.

    rows         of card_misses: phase, percent, adapt, hit_rate, tok_per_s
    resident_s   of a token that misses nothing
    missed_s     that a token takes longer if it misses everything: over the link; with the CPU too
    """
    limits = [
        [1 / (resident_s + (1 - place / 100) * longer) for place in range(101)]
        for longer in missed_s
    ]
    shown = [row for row in rows if row["phase"] in MARKS]
    ways = {row["adapt"] for row in shown if row["phase"] != "hits"}
    rates = [
        *(rate for limit in limits for rate in limit),
        *(row["tok_per_s"]["median"] for row in shown),
    ]
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
    for limit, (stroke, dash, _) in zip(limits, LINES, strict=False):
        points = " ".join(f"{x(n / 100):.1f},{y(rate):.1f}" for n, rate in enumerate(limit))
        shape = f'fill="none" stroke="{stroke}" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {shape}/>')
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
    for place, (stroke, dash, text) in zip((LEFT, 400), LINES[: len(limits)], strict=False):
        high_up = HEIGHT - 14 if place == LEFT else LINES_AT
        parts.append(_line(place, high_up, place + 24, high_up, stroke, dash=dash))
        parts.append(_text(place + 30, high_up + 4, text))
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


def main() -> None:
    """Draw what the command line names."""
    arguments = docopt(str(__doc__))
    found = json.loads(Path(arguments["RESULT"]).read_text(encoding="utf-8"))
    if found["resident_us"] is None:
        raise SystemExit(f"{arguments['RESULT']}: no row had all experts in slots: no limit")
    rates = [found["link_gb_per_s"]]
    if arguments["--together"]:
        rates.append(float(arguments["--together"]))
    resident_s = found["resident_us"] / 1e6
    missed_s = [found["experts_bytes_per_token"] / (rate * 1e9) for rate in rates]
    Path(arguments["-o"]).write_text(
        picture(found["rows"], resident_s, missed_s, found["model"]), encoding="utf-8"
    )
    for row in found["rows"]:
        limits = [1 / (resident_s + (1 - row["hit_rate"]) * longer) for longer in missed_s]
        shares = [row["tok_per_s"]["median"] / limit for limit in limits]
        said = ", ".join(
            f"{share:.0%} of {text}" for share, (_, _, text) in zip(shares, LINES, strict=False)
        )
        print(f"{row['routes']:9} {row['percent']:3}% {row['adapt']:6} {row['phase']:8} {said}")


if __name__ == "__main__":
    main()
