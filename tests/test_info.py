"""`strata_nb info`: what it shows of any file, why one cannot run, and the sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from rewrite_gguf import rewrite
from vocab_files import write_vocabulary

from strata_nb import cpu, models
from strata_nb.cli import main
from strata_nb.formats import TensorType
from strata_nb.gguf import GGUFFile
from strata_nb.models import Description

U32, TEXT = GGUFValueType.UINT32, GGUFValueType.STRING
MIB = 2**20

Info = Callable[..., tuple[int, str, str]]
Change = Callable[..., str]


@pytest.fixture(scope="module")
def known(model: str) -> Description:
    with GGUFFile.open(model) as file:
        return models.describe(file)


@pytest.fixture
def info(capsys: pytest.CaptureFixture[str]) -> Info:
    def run(*words: str) -> tuple[int, str, str]:
        status = main(("info", *words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def changed(model: str, tmp_path: Path) -> Change:
    """A function that copies the model with other keys."""

    def change(**keys: tuple[Any, GGUFValueType]) -> str:
        path = tmp_path / "changed.gguf"
        rewrite(model, path, keys={k.replace("__", "."): v for k, v in keys.items()}, tensors={})
        return str(path)

    return change


def figure(out: str, section: str, label: str) -> str:
    """Return what a line of a section says behind its label."""
    lines = out[out.index(section) :].splitlines()
    return next(line for line in lines if line.startswith(f"  {label}"))[len(label) + 2 :].strip()


# -- what is in a file -----------------------------------------------------------------------------


def test_info_shows_what_the_file_says_of_itself(info: Info, model: str) -> None:
    status, out, err = info(model)
    assert (status, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[:6])
    assert lines["file"].startswith("model.gguf: GGUF v3, 2.4 MiB")
    with GGUFFile.open(model) as file:
        count = sum(tensor.type is TensorType.F32 for tensor in file.tensors.values())
    assert f" {count} F32 (" in lines["tensors"]
    assert lines["model"] == "random qwen3moe, architecture qwen3moe"
    assert lines["tokenizer"] == "gpt2, pre-tokenizer gpt-2, 512 tokens, chat template no"
    assert lines["layers"].startswith("2 of width 256; attention 8 heads, 2 for K/V, of 64")


def test_info_lists_keys_and_tensors_where_asked(info: Info, model: str) -> None:
    out = info(model, "--keys", "--tensors")[1]
    assert "  general.architecture = 'qwen3moe'\n" in out
    assert "  tokenizer.ggml.merges = [1] 'h e'\n" in out
    assert "  blk.1.ffn_down_exps.weight  Q4_K  8 x 256 x 256  288.0 KiB\n" in out
    assert "blk.1" not in info(model)[1]


def test_the_model_may_be_named_either_way_but_once(info: Info, model: str) -> None:
    (status, flag, _), (_, word, _) = info("-m", model), info(model)
    assert status == 0
    assert flag.split("memory available")[0] == word.split("memory available")[0]
    assert info(model, "-m", model)[::2] == (
        2,
        "strata_nb: info takes one file\nhint: strata_nb info FILE\n",
    )


@pytest.mark.parametrize("words", [[""], ["-m", ""]])
def test_an_empty_name_is_refused_with_how_to_write_it(info: Info, words: list[str]) -> None:
    status, out, err = info(*words)
    assert (status, out) == (2, "")
    assert "an empty file name\nhint: strata_nb info FILE\n" in err


def test_a_file_may_call_itself_anything(info: Info, changed: Change) -> None:
    status, out, _ = info(changed(general__name=("two\nlines", TEXT)))
    assert status == 0
    assert "\nmodel         'two\\nlines', architecture qwen3moe\n" in out


# -- files that cannot run -------------------------------------------------------------------------


def test_another_architecture_is_shown_before_it_is_said_that_it_cannot_run(
    info: Info, changed: Change
) -> None:
    path = changed(general__architecture=("mamba", TEXT), tokenizer__chat_template=("x", TEXT))
    status, out, err = info(path, "--tensors")
    assert (status, err) == (0, "")
    assert "model         random qwen3moe, architecture mamba\n" in out
    assert "gpt2, pre-tokenizer gpt-2, 512 tokens, chat template yes\n" in out
    assert "blk.1.ffn_down_exps.weight" in out
    *_, cause, hint = out.splitlines()
    assert cause == "cannot run: architecture 'mamba' is not supported"
    assert hint == "hint: supported are: " + ", ".join(models.SUPPORTED)


def test_a_vocabulary_alone_is_shown_and_cannot_run(info: Info, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.gguf", ["a", "b", "ab"], pre=None)
    status, out, _ = info(str(path))
    assert status == 0
    assert "tensors       0: none\n" in out
    assert "tokenizer     gpt2, pre-tokenizer none, 3 tokens, chat template no\n" in out
    assert "cannot run: no tensors: a vocabulary only\n" in out


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"qwen3moe__mystery": (1, U32)}, "qwen3moe.mystery: 1 key is not understood"),
        ({"tokenizer__ggml__model": ("bert", TEXT)}, "tokenizer.ggml.model: 'bert' is not"),
        ({"general__name": (7, U32)}, "general.name: uint32, wanted string"),
        ({"tokenizer__ggml__tokens": (7, U32)}, "tokenizer.ggml.tokens: uint32, wanted array"),
    ],
)
def test_what_the_engine_would_refuse_is_the_last_thing_said(
    keys: dict[str, tuple[Any, GGUFValueType]], cause: str, info: Info, changed: Change
) -> None:
    status, out, _ = info(changed(**keys))
    assert status == 0
    assert f"\ncannot run: {cause}" in out
    assert "what it takes" not in out


def test_a_damaged_file_is_refused_and_nothing_is_shown(info: Info, model: str) -> None:
    damaged = Path(model).with_name("damaged.gguf")
    damaged.write_bytes(Path(model).read_bytes()[:-1000])
    status, out, err = info(str(damaged))
    assert (status, out) == (2, "")
    assert "damaged.gguf" in err


# -- sums ------------------------------------------------------------------------------------------


def test_info_sums_what_would_fit_on_a_card(info: Info, model: str, known: Description) -> None:
    status, out, _ = info(model, "--vram", "958MiB", "-c", "100")
    assert status == 0
    free = 2 * MIB - known.dense_bytes - 100 * known.kv_bytes_per_cell("f16", "f16")
    fits = 0
    for one in sorted(known.one_expert_bytes * known.experts):
        free -= one
        fits += free >= 0
    assert f"experts that fit      {fits} of 16" in out
    assert 0 < fits < 16
    assert "as a run begins" not in out  # 100 cells are there from the start


def test_info_says_how_many_experts_fit_before_the_kv_has_grown(
    info: Info, model: str, known: Description
) -> None:
    _, out, _ = info(model, "--vram", "959MiB", "-c", "1024")
    free = 3 * MIB - known.dense_bytes - 512 * known.kv_bytes_per_cell("f16", "f16")
    fits = 0
    for one in sorted(known.one_expert_bytes * known.experts):
        free -= one
        fits += free >= 0
    assert f"as a run begins       {fits} of 16" in out
    assert int(figure(out, "a card of", "experts that fit").split()[0]) < fits


def test_info_names_what_is_missing_on_a_card_that_is_too_small(info: Info, model: str) -> None:
    out = info(model, "--vram", "600MiB")[1]
    assert figure(out, "a card of 600.0 MiB", "= too small by").endswith("MiB")
    assert "experts that fit" not in out


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ([], ("f32", "f32")),
        (["--ctk", "int8"], ("int8", "f32")),
        (["--ctk", "f16", "--ctv", "f16"], ("f16", "f16")),
    ],
)
def test_the_float32_sum_counts_the_kv_that_the_reference_device_would_keep(
    info: Info,
    model: str,
    known: Description,
    flags: list[str],
    kinds: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 1000 * MIB)
    out = info(model, "-c", "4000", *flags)[1]
    kv = 4000 * known.kv_bytes_per_cell(*kinds)
    weights = 4 * known.parameters
    shown = [
        figure(out, "as float32", label).split("   ")[0]
        for label in ("weights", "K/V", "sum", "memory available", "= left")
    ]
    wanted = (weights, kv, weights + kv, 1000 * MIB, 1000 * MIB - weights - kv)
    assert shown == [f"{count / MIB:.1f} MiB" for count in wanted]


def test_the_float32_verdict_is_what_the_engine_would_do(
    info: Info, model: str, known: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, kv = 4 * known.parameters, 1000 * known.kv_bytes_per_cell("f32", "f32")

    def verdict(available: float) -> str:
        monkeypatch.setattr(cpu, "available_memory_bytes", lambda: int(available))
        return info(model, "-c", "1000")[1].split("memory available")[1].splitlines()[1]

    assert verdict(weights / 0.6 + kv).startswith("  = left ")
    with GGUFFile.open(model) as file:
        slow = models.open_reference(file, known, budget_bytes=weights - 9).warnings
    assert verdict(weights / 0.6 - 99) == f"  = slow: {slow[0]}"
    assert verdict(kv - 1.5 * MIB).split() == ["=", "too", "small", "by", "1.5", "MiB"]


def test_a_context_beyond_the_sliding_window_is_refused_as_the_engine_does(
    info: Info, changed: Change
) -> None:
    path = changed(qwen3moe__attention__sliding_window=(600, U32))
    status, out, err = info(path, "-c", "601")
    assert (status, out) == (2, "")
    assert "a context of 601 cells" in err
    assert "hint: give --ctx-size 600 or less" in err
    out = info(path)[1]
    assert "context       600 tokens: its sliding window" in out
    assert "600 cells in f16" in out


def test_the_context_that_a_model_was_trained_for_may_be_exceeded(info: Info, model: str) -> None:
    status, out, _ = info(model, "-c", "5000")
    assert status == 0
    assert "context       1024 tokens trained\n" in out
    assert "5000 cells in f16" in out
