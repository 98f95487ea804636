"""Draw the skeleton of a story from the plots in `plots/*.toml`, which were written by hand.

A plot is a list of beats, the sentences that carry a story: what the hero wants, what is in the
way, who helps, how it ends. Each beat has several wordings, and words in braces are filled in:

    {name} {he} {him} {his} {He} {His}          the hero
    {hero}                                      what the hero is: "frog"
    {friend} {fhe} {fhim} {fhis} {fHe} {fHis}   the second one
    {helper}                                    what the second one is: "turtle"
    {word} {word.1} {word.2}                    the plot's own `words`: one choice a story; a choice
                                                that is a list gives its parts by their number

The opening sentence, which says who and where, is the same business for all plots, and drawn here.
A seed gives the same stories everywhere.

Usage:
  plots.py [--samples=N] [--seed=N] FILE...
  plots.py --help

It checks the files and prints what would make them unusable, or samples.

Options:
  --samples=N  stories of each plot [default: 2]
  --seed=N     [default: 1]
"""

from __future__ import annotations

import math
import random
import string
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
# What the program fills in, without and with a second character.
OF_HERO = {"name", "he", "him", "his", "He", "His", "hero"}
OF_BOTH = OF_HERO | {"friend", "fhe", "fhim", "fhis", "fHe", "fHis", "helper"}
OF_OPENING = {"one", "adjective", "place", "Place"}
NO_ADJECTIVE = 0.15
RARE_NAME = 0.1
VOWELS = tuple("aeiou")
SIGNS_OF_AN_END = (".", "!", "?", '."', '!"', '?"')


@dataclass(frozen=True)
class Plot:
    """Hold one plot.

    heroes, helpers   nouns, one of them drawn; helpers may be empty
    places            "in a little pond", one of them drawn
    beats             wordings of each beat, in the order of the story
    words             own words: name to choices, each a tuple of parts
    adjectives        of the hero; the common ones where the file gives none
    """

    name: str
    heroes: tuple[str, ...]
    helpers: tuple[str, ...]
    places: tuple[str, ...]
    beats: tuple[tuple[str, ...], ...]
    words: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    adjectives: tuple[str, ...] = tuple(WORDS["adjectives"])


def read_plots(paths: Sequence[Path]) -> list[Plot]:
    """Read plots; ValueError names the file, the plot and what is wrong with it."""
    plots = []
    for path in sorted(paths):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["plot"]:
            words = {
                word: tuple(
                    (choice,) if isinstance(choice, str) else tuple(choice) for choice in of
                )
                for word, of in entry.pop("words", {}).items()
            }
            lists = {
                key: tuple(value) for key, value in entry.items() if key not in ("name", "beats")
            }
            lists.setdefault("helpers", ())
            beats = tuple(tuple(beat) for beat in entry["beats"])
            plot = Plot(name=entry["name"], beats=beats, words=words, **lists)
            faults = list(faults_of(plot))
            if faults:
                raise ValueError(f"{path}: {plot.name}: " + "; ".join(faults))
            plots.append(plot)
    names = [plot.name for plot in plots]
    if len(names) != len(set(names)):
        raise ValueError(f"plots named twice: {sorted({n for n in names if names.count(n) > 1})}")
    return plots


def faults_of(plot: Plot) -> Iterator[str]:
    """Say what is wrong with a plot."""
    known = set(OF_BOTH if plot.helpers else OF_HERO)
    for word, choices in plot.words.items():
        if word in OF_BOTH | OF_OPENING:
            yield f"{word}: a word that the program fills in"
        known |= {word} | {f"{word}.{part}" for part in range(1, len(choices[0]))}
        if len({len(choice) for choice in choices}) != 1:
            yield f"{word}: choices of different lengths"
    for noun in plot.heroes:
        if set(noun.split()) & set(plot.adjectives):
            yield f"{noun}: the adjective may be drawn again"
    if not 5 <= len(plot.beats) <= 9:
        yield f"{len(plot.beats)} beats, needs 5 to 9"
    for number, beat in enumerate(plot.beats):
        if len(beat) < 3:
            yield f"beat {number}: {len(beat)} wordings, needs 3"
        for text in beat:
            used = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
            if used - known:
                yield f"{text!r}: unknown {sorted(used - known)}"
            if not text.endswith(SIGNS_OF_AN_END) or text != text.strip():
                yield f"{text!r}: no whole sentences"
            if text.count('"') % 2 or not text.isascii() or not 4 <= len(text.split()) <= 45:
                yield f"{text!r}: quotes, signs or length ({len(text.split())} words)"


@dataclass(frozen=True)
class Draft:
    """Hold one story before its sentences are put together.

    words     what each word in braces stands for
    nats      what the draws hold, in nats, where the plot is given
    opening   wording of the opening sentence
    wordings  number of the chosen wording of each beat
    """

    plot: Plot
    words: dict[str, str]
    opening: str
    wordings: tuple[int, ...]
    nats: float

    def sentences(self) -> list[str]:
        """Return the opening, where there is one, and the beats, filled in."""
        chosen = zip(self.plot.beats, self.wordings, strict=True)
        texts = (self.opening, *(beat[number] for beat, number in chosen))
        return [fill(text, self.words) for text in texts if text]


def draw_draft(rng: random.Random, plot: Plot) -> Draft:
    """Draw a story of a plot; the same state of `rng` gives the same one."""
    draws = Draws(rng)
    hero = draws.choice(plot.heroes)
    words = _character(draws, hero, "", "")
    if plot.helpers:
        helper = draws.choice([kind for kind in plot.helpers if kind != hero] or plot.helpers)
        words |= _character(draws, helper, "f", words["name"])
        words |= {"friend": words.pop("fname"), "helper": helper}
    adjective = draws.choice(plot.adjectives)
    one = with_article(hero if draws.chance(NO_ADJECTIVE) else f"{adjective} {hero}")
    place = draws.choice(plot.places)
    words |= {
        "hero": hero,
        "adjective": adjective,
        "one": one,
        "place": place,
        "Place": capitalised(place),
    }
    for word, choices in plot.words.items():
        parts = draws.choice(choices)
        words[word] = parts[0]
        words |= {f"{word}.{number}": part for number, part in enumerate(parts) if number}
    opening = draws.weighted(WORDS["openings"])
    wordings = tuple(draws.choice(range(len(beat))) for beat in plot.beats)
    return Draft(plot, words, opening, wordings, draws.nats)


class Draws:
    """Draw from a generator, and add up how much could not be known before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.nats = 0.0

    def choice(self, choices: Sequence[T]) -> T:
        """Draw one of several, all alike."""
        self.nats += math.log(len(choices))
        return self._rng.choice(choices)

    def chance(self, share: float) -> bool:
        """Draw True in this share of all cases."""
        happened = self._rng.random() < share
        self.nats -= math.log(share if happened else 1 - share)
        return happened

    def weighted(self, choices: Sequence[Sequence[Any]]) -> str:
        """Draw a text by its weight."""
        weights = [weight for weight, _ in choices]
        ((weight, text),) = self._rng.choices(choices, weights)
        self.nats -= math.log(weight / sum(weights))
        return str(text)


def fill(text: str, words: dict[str, str]) -> str:
    """Replace the words in braces; an article before one becomes `an` where it must."""
    result = ""
    for before, name, _, _ in string.Formatter().parse(text):
        result += before
        word = words[name] if name else ""
        if word[:1] in VOWELS and result.endswith(("a ", "A ")) and result[-3:-2] in ("", " ", '"'):
            result = result[:-1] + "n "
        result += word
    return result


def _character(draws: Draws, kind: str, prefix: str, taken: str) -> dict[str, str]:
    noun = kind.split()[-1]
    sexes = [noun in WORDS["female"]] if noun in WORDS["female"] + WORDS["male"] else [True, False]
    female = draws.choice(sexes)
    rare = "rare_" if draws.chance(RARE_NAME) else ""
    names = WORDS[rare + ("she" if female else "he")]
    name = draws.choice([name for name in names if name != taken])
    he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
    words = {"name": name, "he": he, "him": him, "his": his, "He": he.title(), "His": his.title()}
    return {prefix + key: value for key, value in words.items()}


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    return ("an " if noun[0] in VOWELS else "a ") + noun


def capitalised(text: str) -> str:
    """Make the first letter large."""
    return text[0].upper() + text[1:]


def main() -> None:
    """Check plot files and print samples."""
    from docopt import docopt

    arguments = docopt(str(__doc__))
    rng = random.Random(int(arguments["--seed"]))
    try:
        plots = read_plots([Path(path) for path in arguments["FILE"]])
    except ValueError as error:
        sys.exit(str(error))
    for plot in plots:
        for _ in range(int(arguments["--samples"])):
            print(f"[{plot.name}]", " ".join(draw_draft(rng, plot).sentences()))
    beats = [text for plot in plots for beat in plot.beats for text in beat]
    print(f"{len(plots)} plots, {len(beats)} wordings, {sum(len(b.split()) for b in beats)} words")


if __name__ == "__main__":
    main()
