"""`generate --watch`: the device's memory on the terminal, live, below the text that is written.

    Once upon a time, there was a little                 the line that is being written
    ╭─ host:1x24MiB, chunks of 64.0 KiB ────────────╮
    │ ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■ │    a cell for each chunk: colour is the owner,
    │ ■■■■■■■■■■■■■■■■■■■■■■■■                      │    brightness how much is going on in it
    │ experts 173 (10.8 MiB)  K/V 32 (2.0 MiB)      │
    │ K/V 64 of 512 cells  hits 66.0%               │
    ╰───────────────────────────────────────────────╯

Lines that are whole go above the panel and stay. It is drawn between tokens, in the thread that
makes them, a few times a second: a look at the tables costs less than a millisecond, and nothing
looks while a step runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from strata_nb.commands.arguments import Arguments
from strata_nb.engine import Engine, Generation
from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text
from strata_nb.options import REFERENCE

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from strata_nb.cache.look import Look

FRAME_S = 1 / 12
HALF_LIFE_STEPS = 16  # after which what an expert was used counts half
DIM = 0.35  # of a colour, where nothing is going on

_COLOURS = {  # of owners, as on the page of a trace; and a letter, where there is no colour
    "experts": ("E", "experts", (233, 154, 60)),
    "loan": ("L", "loan", (168, 135, 221)),
    "kv": ("K", "K/V", (79, 151, 224)),
    "spare": ("s", "spare", (123, 124, 120)),
    "stuck": ("X", "stuck", (255, 90, 84)),
    "given_back": (".", "given back", (56, 58, 62)),
}
Colour = tuple[int, int, int]


def watch_from(arguments: Arguments) -> bool:
    """Return whether to watch; ConfigError, before a model is loaded, where that cannot be."""
    if not arguments.flag("--watch"):
        return False
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None or not stream.isatty():
            raise ConfigError(
                f"--watch: {name} is not a terminal",
                hint="leave it out; --trace FILE records the memory for later",
            )
    if arguments.text("--device") == REFERENCE:
        raise ConfigError(
            "--watch: the reference device has no memory of its own to show",
            hint="give a device made of memory: --device host:1x512MiB",
        )
    return True


class Watch:
    """Draw the panel while the block runs; `write` takes the text, piece by piece.

    generation   that writes it, whose tokens are counted: a piece may be the prompt, or no token
    """

    def __init__(
        self, engine: Engine, generation: Generation, console: Console | None = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._engine = engine
        self._generation = generation
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._line = ""  # what is written of the last line
        self._drawn_s = 0.0
        self._tokens_drawn = 0
        self._heat: npt.NDArray[np.float64] | None = None  # of experts, and their use before
        self._use: npt.NDArray[np.int64] | None = None

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The live display ends with a frame that is not cut to the terminal, and of one that is
        # larger only the part on the screen could be erased: end with an empty one.
        self._live.update("", refresh=True)
        self._live.stop()
        if self._line:
            self._console.out(self._line, end="", highlight=False)

    def write(self, text: str) -> None:
        """Write a piece of the answer: whole lines go above the panel."""
        from rich.text import Text

        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._console.print(Text(line), soft_wrap=True)
        if whole or time.perf_counter() - self._drawn_s >= FRAME_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.perf_counter()
        look = self._engine.look()
        self._follow(look)
        self._live.update(self._render(look), refresh=True)

    def _follow(self, look: Look) -> None:
        """Take over what has changed since the look before."""
        steps = self._generation.generated - self._tokens_drawn
        self._tokens_drawn = self._generation.generated
        use = look.use.astype(np.float64)
        if self._heat is None or self._use is None:
            self._heat = use
        else:
            self._heat = self._heat * 0.5 ** (steps / HALF_LIFE_STEPS) + (look.use - self._use)
        self._use = look.use

    def _render(self, look: Look) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        width = self._console.width - 4
        most_rows = max(3, self._console.height // 3)
        cells = list(self._cells(look))
        panel = Panel(
            Group(
                cells_text(cells, width, most_rows, coloured=not self._console.no_color),
                self._owners(look),
                Text(self._figures(look)),
            ),
            title=f"{self._engine.device}, chunks of {bytes_text(look.chunk_bytes)}",
            title_align="left",
        )
        room = max(1, self._console.height - most_rows - 8)
        written = Text(self._line).wrap(self._console, self._console.width)[-room:]
        return Group(*written, panel)

    def _cells(self, look: Look) -> Iterator[tuple[str, float]]:
        """Yield owner and brightness, 0 to 1, of every chunk."""
        arena = look.arena_heat(self._heat) if self._heat is not None else np.zeros(0)
        most = max(1e-9, float(arena.max(initial=0.0)))
        lit = {"experts": np.sqrt(arena / most), "kv": look.kv_fill()}
        for owner in _COLOURS:
            for brightness in lit.get(owner, np.ones(look.chunks[owner])).tolist():
                yield owner, min(1.0, brightness)

    def _owners(self, look: Look) -> Text:
        from rich.text import Text

        text = Text()
        for owner, (letter, name, colour) in _COLOURS.items():
            count = look.chunks[owner]
            if count:
                mark = letter if self._console.no_color else "■"
                text.append(f"{mark} ", style="" if self._console.no_color else _style(colour, 1))
                text.append(f"{name} {count:,} ({bytes_text(count * look.chunk_bytes)})  ")
        return text

    def _figures(self, look: Look) -> str:
        held = look.kv_cells - look.free_cells
        parts = [f"K/V {held:,} of {look.kv_cells:,} cells"]
        if look.growths:
            parts.append(f"grown {look.growths} time{'' if look.growths == 1 else 's'}")
        if look.slots:
            parts.append(f"{len(look.resident):,} experts in {look.slots:,} slots")
        if look.slots and look.hits + look.misses:
            parts.append(f"{look.hits / (look.hits + look.misses):.1%} hits")
        if look.filled:
            parts.append(f"{look.filled:,} misses kept")
        if look.by_cpu:
            parts.append(f"{look.by_cpu:,} computed by the CPU")
        if self._generation.generated > 1:  # the first is not of `decode_s`
            rate = (self._generation.generated - 1) / self._generation.decode_s
            parts.append(f"{rate:.1f} tok/s")
        return " · ".join(parts)


def cells_text(
    cells: list[tuple[str, float]], width: int, most_rows: int, *, coloured: bool
) -> Text:
    """Return cells, (owner, brightness), in rows of `width`.

    Two lie above each other where that helps. Where there are too many even so, the last are
    counted. Without colour each is a letter.
    """
    from rich.text import Text

    text, doubled = Text(no_wrap=True), coloured and len(cells) > width * most_rows
    rows = most_rows * (2 if doubled else 1)
    shown = cells[: width * rows]
    if not doubled:
        for at in range(0, len(shown), width):
            text.append("\n" if at else "")
            for owner, brightness in shown[at : at + width]:
                letter, _, colour = _COLOURS[owner]
                style = _style(colour, brightness) if coloured else ""
                text.append("■" if coloured else letter, style)
    for at in range(0, len(shown) if doubled else 0, 2 * width):
        text.append("\n" if at else "")
        upper, lower = shown[at : at + width], shown[at + width : at + 2 * width]
        for column, (owner, brightness) in enumerate(upper):
            style = _style(_COLOURS[owner][2], brightness)
            if column < len(lower):
                below, bright_below = lower[column]
                style += f" on {_style(_COLOURS[below][2], bright_below)}"
            text.append("▀", style)
    if len(cells) > len(shown):
        text.append(f"\nand {len(cells) - len(shown):,} more")
    return text


def _style(colour: Colour, brightness: float) -> str:
    share = DIM + (1 - DIM) * brightness
    red, green, blue = (round(part * share) for part in colour)
    return f"rgb({red},{green},{blue})"
