"""Draw the stories that the model is trained on from the plots.

Usage:
  corpus.py [--stories=N] [--seed=N] OUT
  corpus.py --help

OUT gets train.txt, held_out.txt and new_plots.txt (a story a line) and corpus.json (figures). Two
of a hundred stories are held out, and all stories of two of a hundred plots: those of new_plots.txt
tell what the model makes of plots it has never seen. No story comes twice.

In a few stories the hero is one of another plot, and a few begin somewhere in the middle: a prompt
need not begin like the plots.

Options:
  --stories=N  [default: 600000]
  --seed=N     [default: 1]
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from docopt import docopt
from plots import draw_draft, read_plots

HELD_OUT = 0.02  # of the stories, and of the plots
OTHER_HERO = 0.08
FROM_THE_MIDDLE = 0.05
NEW_PLOT_STORIES = 100  # of each plot that is held out
PLOTS = Path(__file__).parent / "plots"


def main() -> None:
    """Draw, split and write."""
    arguments = docopt(str(__doc__))
    out = Path(arguments["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(int(arguments["--seed"]))
    plots = read_plots(list(PLOTS.glob("*.toml")))
    rng.shuffle(plots)
    new = plots[: round(len(plots) * HELD_OUT)]
    known = plots[len(new) :]
    seen: set[str] = set()
    stories: list[str] = []
    nats = 0.0
    while len(stories) < int(arguments["--stories"]):
        plot = known[len(stories) % len(known)]
        if rng.random() < OTHER_HERO:
            plot = replace(plot, heroes=rng.choice(known).heroes)
        draft = draw_draft(rng, plot)
        sentences = draft.sentences()
        if rng.random() < FROM_THE_MIDDLE:
            sentences = sentences[rng.randrange(1, len(sentences) - 2) :]
        text = " ".join(sentences)
        if text not in seen:
            seen.add(text)
            stories.append(text)
            nats += draft.nats
    rng.shuffle(stories)
    held_out = round(len(stories) * HELD_OUT)
    of_new = [" ".join(draw_draft(rng, plot).sentences()) for plot in new * NEW_PLOT_STORIES]
    figures: dict[str, object] = {
        "plots": len(known),
        "new_plots": sorted(plot.name for plot in new),
        "wordings": sum(len(beat) for plot in plots for beat in plot.beats),
        "words_of_the_wordings": sum(
            len(text.split()) for plot in plots for beat in plot.beats for text in beat
        ),
        # What is left to guess where the plots are known by heart: the draws themselves.
        "nats_of_the_draws_of_a_story": nats / len(stories),
    }
    for name, texts in (
        ("train", stories[held_out:]),
        ("held_out", stories[:held_out]),
        ("new_plots", dict.fromkeys(of_new)),
    ):
        figures[name] = write(out / f"{name}.txt", texts)
    (out / "corpus.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def write(path: Path, stories: Iterable[str]) -> dict[str, object]:
    """Write stories, one a line; returns their figures."""
    lines = list(stories)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    words = sum(len(line.split()) for line in lines)
    return {"stories": len(lines), "words": words, "sha256": digest}


if __name__ == "__main__":
    main()
