"""`generate --watch`: what it shows is what there is, and the text stays whole."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_world import owner_of
from console import Console as CommandLine
from device_world import opened, random_tokens, read
from rich.console import Console

from strata_nb import Engine, Options
from strata_nb.cache.accounts import Change
from strata_nb.commands.watch import Watch, cells_text
from strata_nb.errors import DriverError

DEVICE = "host:1x16MiB@64KiB"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch)


def test_a_look_is_what_the_ledger_and_the_tables_say(tiny: Path) -> None:
    with opened(tiny, DEVICE, ctx=512) as model:
        first, second = model.open_sequence(), model.open_sequence()
        read(model, first, random_tokens(60))
        read(model, first, random_tokens(9))
        read(model, second, random_tokens(3))
        look, account = model.look(), model.ledger.account()
        assert sum(look.chunks.values()) == account.capacity
        assert (look.chunks["kv"], look.chunks["experts"]) == (account.kv, account.experts)
        assert look.kv_cells - look.free_cells == 3 * 64
        held = look.kv_fill() * look.chunk_bytes
        assert held.sum() == 3 * model.kv.layout.block_bytes
        assert len(look.resident) == model.arena.resident > 0
        assert np.array_equal(look.use, model.arena.use)
        layout, values = model.arena.layout, np.random.default_rng(0).random(look.use.shape)
        wanted = np.zeros(look.chunks["experts"])
        for slot in range(model.arena.usable_slots):
            owner = owner_of(model.arena, slot)
            if owner is not None:
                at, size = layout.offset(slot), layout.blob_bytes[owner[0]]
                first_chunk, last = at // look.chunk_bytes, (at + size - 1) // look.chunk_bytes
                wanted[first_chunk : last + 1] += values[owner]
        assert np.allclose(look.arena_heat(values), wanted)


def test_growths_are_those_that_were_announced_whatever_lies_between_two_looks(tiny: Path) -> None:
    with opened(tiny, DEVICE, ctx=512, kv_grow_init=64, kv_grow_step=64) as model:
        ledger, heard = model.ledger, list[Change]()
        ledger.announce = heard.append
        assert model.look().growths == 0
        ledger.grow_kv(3, 3)
        ledger.grow_kv(3, 3)  # nothing to do
        ledger.grow_kv(4, 4)
        ledger.trim_kv(1)
        assert model.look().growths == 2
        model._backend.driver.faults.plan("map")
        with pytest.raises(DriverError):
            ledger.grow_kv(4, 4)
        assert model.look().growths == 2
        ledger.grow_kv(2, 2)
        assert model.look().growths == 3
        requests = [change.request for change in heard]
        assert requests == ["grow_kv"] * 3 + ["trim_kv"] + ["grow_kv"] * 2


def test_cells_are_one_a_chunk_and_lie_above_each_other_where_there_are_many() -> None:
    few = [("experts", 1.0)] * 7 + [("kv", 0.0)] * 6
    assert cells_text(few, 10, 3, coloured=True).plain == "■" * 10 + "\n" + "■" * 3
    assert cells_text(few, 10, 3, coloured=False).plain == "EEEEEEEKKK\nKKK"
    many = [("kv", 0.5)] * 35
    doubled = cells_text(many, 10, 3, coloured=True)
    assert doubled.plain == "▀" * 10 + "\n" + "▀" * 10
    # The upper cells of the second row have five below them.
    backgrounds = [" on " in str(span.style) for span in doubled.spans]
    assert backgrounds == [True] * 15 + [False] * 5
    assert cells_text(many, 10, 3, coloured=False).plain.endswith("\nand 5 more")
    assert cells_text(many * 2, 10, 3, coloured=True).plain.endswith("\nand 10 more")


def test_a_cell_is_brighter_where_more_is_going_on() -> None:
    text = cells_text([("kv", brightness) for brightness in (0.0, 0.5, 1.0)], 10, 3, coloured=True)
    blues = [int(re.findall(r"\d+", str(span.style))[2]) for span in text.spans]
    assert blues == sorted(set(blues))


def test_the_heat_of_an_expert_fades_when_it_is_no_longer_used(tiny: Path) -> None:
    with Engine.open(Options(tiny, device=DEVICE, ctx_size=512)) as engine:
        generation = engine.generate([1, 2, 3], max_tokens=20, ignore_eos=True)
        list(generation)
        watch = Watch(engine, generation, Console(file=io.StringIO(), force_terminal=True))
        look = engine.look()
        watch._follow(look)
        assert watch._heat is not None
        before = watch._heat.copy()
        generation.generated += 16
        watch._follow(look)
        assert np.allclose(watch._heat, before / 2)


def test_the_rate_is_of_tokens_whatever_pieces_are_written(tiny: Path) -> None:
    with Engine.open(Options(tiny, device=DEVICE, ctx_size=512)) as engine:
        generation = engine.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
        with Watch(engine, generation, Console(file=io.StringIO(), force_terminal=True)) as watch:
            watch.write("the prompt\n")
            assert "tok/s" not in watch._figures(engine.look())
            list(generation)
            watch.write("\n")
            assert f" {4 / generation.decode_s:.1f} tok/s" in watch._figures(engine.look())


def test_whole_lines_go_above_the_panel_and_the_last_one_is_written_at_the_end(tiny: Path) -> None:
    out = io.StringIO()
    with Engine.open(Options(tiny, device=DEVICE, ctx_size=512)) as engine:
        console = Console(file=out, force_terminal=True, no_color=True, width=60, height=24)
        with Watch(engine, engine.generate([1]), console) as watch:
            for piece in (
                "One [b]upon[/b]",
                " a time\n\nthere",
                " was " + "x" * 100 + "\nan",
                " end",
            ):
                watch.write(piece)
    text = out.getvalue()
    for line in ("One [b]upon[/b] a time\n", "there was " + "x" * 100 + "\n"):
        assert line in text
    assert text.endswith("an end")
    assert "╭─ host:1x16MiB@64KiB, chunks of 64.0 KiB" in text
    assert re.search(r"│ E+K+", text)
    assert re.search(r"K/V 64 of \d+ cells", text)


@pytest.mark.parametrize(("width", "height"), [(20, 5), (5, 20), (8, 3)])
def test_nothing_of_the_panel_is_left_on_a_terminal_that_is_too_small_for_it(
    tiny: Path, width: int, height: int
) -> None:
    out = io.StringIO()
    with Engine.open(Options(tiny, device=DEVICE, ctx_size=512)) as engine:
        console = Console(file=out, force_terminal=True, no_color=True, width=width, height=height)
        with Watch(engine, engine.generate([1]), console) as watch:
            watch.write("One\n")
    below = 0  # lines of the screen that the cursor has below its first
    for piece in re.findall(r"\n|\x1b\[1A", out.getvalue()):
        below += 1 if piece == "\n" else -1
    assert below == 1  # "One": each line that was drawn was gone back over, and fits the screen
    frames = re.split(r"(?:\x1b\[1A\x1b\[2K)+", out.getvalue())
    assert max(frame.count("\n") for frame in frames) <= height


def test_it_is_refused_where_there_is_no_terminal(run: CommandLine, tiny: Path) -> None:
    status, out, err = run("generate", "-m", str(tiny), "--device", DEVICE, "--watch", "ab")
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == "strata_nb: --watch: stdout is not a terminal"


def letters_of(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def in_a_terminal(*words: str) -> tuple[int, str]:
    """Run a command in a terminal of its own; returns its status and all that it wrote."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "strata_nb", *words])
    written = b""
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), written.decode()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_on_a_terminal_the_panel_is_drawn_and_the_text_is_the_same(
    run: CommandLine, tiny: Path
) -> None:
    words = ["generate", "-m", str(tiny), "--device", DEVICE, "-c", "256", "-n", "30"]
    words += ["--temp", "0", "--ignore-eos", "ab"]
    status, plain, _ = run(*words)
    assert status == 0
    status, shown = in_a_terminal(*words, "--watch")
    assert status == 0
    assert "chunks of 64.0 KiB" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    # The panel does not let control characters through, which this model's bytes may be.
    first, last = bare.index("╭"), bare.rindex("prompt 2 tokens")
    assert letters_of(plain) in letters_of(bare[first:last])


def test_the_judge_has_nothing_to_show(monkeypatch: pytest.MonkeyPatch, run: CommandLine) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)
    status, _, err = run("generate", "-m", "x.gguf", "--device", "reference", "--watch", "ab")
    assert status == 2
    assert "no memory of its own to show" in err
