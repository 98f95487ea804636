"""The float32 forward against the figures of an independent one, and against itself.

The stored figures come from the transformers library (tools/oracle_transformers.py). Last, how
tools/judge.py reads documents apart when it holds a device against this forward.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import judge
import numpy as np
import pytest
from criteria import text_checks
from model_shapes import BENCH_SHAPES, Q4_K_M, SPREADS, plan_tensors
from oracle_models import RANDOM_MODELS, float32_logits, weights_digest

from strata_nb import cpu, models
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.kernels.reference import Floats
from strata_nb.models import ReferenceModel, weights
from strata_nb.models.tensors import is_expert
from strata_nb.models.weights import Kept, tensors_to_keep
from strata_nb.tokenizer import Tokenizer

ORACLE = Path(__file__).parent / "data/oracle"
STORIES = Path(models.__file__).parents[1] / "stories/stories.gguf"
TOLERANCE = 1e-3  # of a logit; the largest are about 20


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A maker of the random model of a name, each made once."""
    directory = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        path = directory / f"{name}.gguf"
        if not path.exists():
            RANDOM_MODELS[name](path)
        return path

    return make


@pytest.fixture
def mixture(random_model: Callable[[str], Path]) -> Iterator[GGUFFile]:
    with GGUFFile.open(random_model("qwen2moe")) as file:
        yield file


def open_model(file: GGUFFile, **options: Any) -> ReferenceModel:
    return models.open_reference(file, models.describe(file), **options)


def float32_bytes(file: GGUFFile) -> int:
    return 4 * models.describe(file).parameters


def read(model: ReferenceModel, ids: list[int], *cuts: int) -> Floats:
    """Return the logits of all ids, read in batches that end at `cuts`."""
    state = model.new_state(len(ids))
    ends = [*cuts, len(ids)]
    parts = []
    for start, end in zip([0, *cuts], ends, strict=True):
        parts.append(model.forward(ids[start:end], state, "all"))
    assert state.length == len(ids)
    return np.concatenate(parts)


def check_against_oracle(file: GGUFFile, name: str) -> None:
    with np.load(ORACLE / f"{name}.npz") as oracle:
        assert str(oracle["weights"]) == weights_digest(file), (
            "the figures belong to other weights: run tools/oracle_transformers.py again"
        )
        logits = read(open_model(file), oracle["ids"].tolist())
        norms = np.linalg.norm(logits.astype(np.float64), axis=-1)
        rows = logits[oracle["positions"]]
        ours = np.take_along_axis(rows, oracle["best_ids"].astype(np.int64), axis=-1)
        np.testing.assert_allclose(ours, oracle["best_logits"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(norms, oracle["norms"], rtol=1e-5)
        assert (rows.argmax(axis=-1) == oracle["best_ids"][:, 0]).mean() > 0.99


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_each_architecture_equals_transformers(
    name: str, random_model: Callable[[str], Path]
) -> None:
    with GGUFFile.open(random_model(name)) as file:
        check_against_oracle(file, name)


@pytest.mark.model
def test_a_real_model_equals_transformers_on_500_tokens_of_prose(smollm2: Path) -> None:
    with GGUFFile.open(smollm2) as file:
        check_against_oracle(file, "smollm2")


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_how_a_prompt_is_cut_changes_only_the_rounding(
    name: str, random_model: Callable[[str], Path]
) -> None:
    with GGUFFile.open(random_model(name)) as file:
        model = open_model(file)
        ids = np.random.default_rng(1).integers(0, model.description.vocab_size, 70).tolist()
        whole = read(model, ids)
        for cuts in ([1], [69], [33, 64], list(range(1, 70))):
            np.testing.assert_allclose(read(model, ids, *cuts), whole, rtol=0, atol=2e-4)


def test_want_last_returns_the_last_row_alone(mixture: GGUFFile) -> None:
    model = open_model(mixture)
    state = model.new_state(8)
    last = model.forward([3, 1, 4, 1, 5], state, "last")
    assert last.shape == (1, model.description.vocab_size)
    assert last.dtype == np.float32
    np.testing.assert_allclose(last, read(model, [3, 1, 4, 1, 5])[-1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("int8", "f16"), ("int8", "int8")])
def test_a_smaller_cache_type_moves_the_logits_a_little(
    type_k: str, type_v: str, mixture: GGUFFile
) -> None:
    model = open_model(mixture)
    ids = list(range(40))
    exact = read(model, ids)
    state = model.new_state(40, type_k, type_v)
    logits = np.concatenate(
        [model.forward(ids[:25], state, "all"), model.forward(ids[25:], state, "all")]
    )
    moved = np.abs(logits - exact).mean() / exact.std()
    assert 1e-5 < moved < (0.05 if "int8" in (type_k, type_v) else 0.001)


def test_a_rewound_state_continues_as_a_straight_one(mixture: GGUFFile) -> None:
    model = open_model(mixture)
    straight = read(model, [7, 8, 9, 10, 11, 12])
    state = model.new_state(64, "f32", "f32")
    model.forward([7, 8, 9, 200, 201, 202, 203], state, "all")
    state.rewind(3)
    assert state.length == 3
    np.testing.assert_allclose(
        model.forward([10, 11, 12], state, "all"), straight[3:], rtol=0, atol=1e-4
    )
    with pytest.raises(ConfigError, match="cannot rewind to 7: the K/V holds 6 cells"):
        state.rewind(7)
    with pytest.raises(ConfigError, match="cannot rewind to -1"):
        state.rewind(-1)


def test_states_of_one_model_do_not_touch_each_other(mixture: GGUFFile) -> None:
    model = open_model(mixture)
    first, second = model.new_state(8), model.new_state(8)
    model.forward([1, 2, 3], first, "last")
    model.forward([9, 8, 7, 6], second, "last")
    wanted = read(model, [1, 2, 3, 4])[-1:]
    np.testing.assert_allclose(model.forward([4], first, "last"), wanted, rtol=0, atol=1e-4)


def test_what_cannot_be_read_is_refused_with_both_numbers(mixture: GGUFFile) -> None:
    model = open_model(mixture)
    vocab_size = model.description.vocab_size
    state = model.new_state(4)
    with pytest.raises(ConfigError, match="5 tokens do not fit: 4 of 4 cells are left"):
        model.forward([1] * 5, state, "all")
    with pytest.raises(ConfigError, match=f"token {vocab_size} at place 1 .* of {vocab_size}"):
        model.forward([0, vocab_size], state, "all")
    for strange in (-1, 2**63, 2**70):
        with pytest.raises(ConfigError, match=f"token {strange} at place 1"):
            model.forward([0, strange], state, "all")
    with pytest.raises(ConfigError, match="no tokens"):
        model.forward([], state, "last")
    assert state.length == 0
    with pytest.raises(ConfigError, match="0 cells"):
        model.new_state(0)
    with pytest.raises(ConfigError, match="type q4_0"):
        model.new_state(4, "q4_0")


def test_every_budget_of_memory_gives_the_same_logits(
    mixture: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SLAB_VALUES", 10_000)  # so that matrices are cut into slabs
    everything = float32_bytes(mixture)
    opened = [
        open_model(mixture, budget_bytes=budget) for budget in (everything, everything - 1, 0)
    ]
    kept = [len(model.kept.names) for model in opened]
    assert kept[0] == len(mixture.tensors) > kept[1] > kept[2] == 0
    results = [read(model, [5, 6, 7, 8, 9, 300, 301]) for model in opened]
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(results[2], results[0], rtol=0, atol=1e-4)


def test_weights_may_take_six_tenths_of_the_memory_available(
    mixture: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = float32_bytes(mixture) / 0.6
    for available, everything in ((least + 9, True), (least - 9, False)):
        monkeypatch.setattr(cpu, "available_memory_bytes", lambda: int(available))  # noqa: B023
        assert open_model(mixture).kept.everything is everything


def test_a_model_says_what_is_kept_and_warns_where_the_rest_is_slow(mixture: GGUFFile) -> None:
    everything = float32_bytes(mixture)
    names = [name for name in mixture.tensors if not is_expert(name)]
    dense = 4 * sum(int(np.prod(mixture.tensors[name].shape)) for name in names)
    assert open_model(mixture, budget_bytes=everything).warnings == []
    model = open_model(mixture, budget_bytes=dense)
    assert model.kept == Kept(names, len(mixture.tensors), dense, everything)
    figures = f"{dense / 2**20:.1f} MiB of {everything / 2**20:.1f} MiB"
    assert str(model.kept) == f"{len(names)} of {len(mixture.tensors)} tensors, {figures}"
    (warning,) = model.warnings
    assert warning.startswith(f"{figures} of weights are kept as float32; the rest is dequantised")
    assert open_model(mixture, budget_bytes=dense - 1).kept.size_bytes == 0


def test_sizes_of_a_large_model_are_chosen_without_its_weights() -> None:
    shape = BENCH_SHAPES["qwen3moe"]
    tensors = {
        tensor.name: TensorInfo(tensor.name, tensor.kind, tensor.shape, 0, 0, tensor.size_bytes)
        for tensor in plan_tensors(shape, Q4_K_M, SPREADS["bench"], 0.4)
    }
    kept = tensors_to_keep(tensors, 12 * 2**30)
    assert str(kept) == "435 of 579 tensors, 5.74 GiB of 113.74 GiB"
    assert kept.warnings[0].startswith("5.74 GiB of 113.74 GiB of weights")


def test_loading_counts_the_bytes_of_the_file_up_to_the_total(mixture: GGUFFile) -> None:
    seen: list[tuple[int, int]] = []
    open_model(mixture, progress=lambda done, total: seen.append((done, total)))
    total = sum(info.size_bytes for info in mixture.tensors.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_an_interrupt_while_loading_leaves_the_file_usable(mixture: GGUFFile) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_model(mixture, progress=interrupt)
    assert np.isfinite(read(open_model(mixture), [1, 2, 3])).all()


def test_an_interrupt_in_a_forward_leaves_the_state_as_it_was(
    mixture: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(mixture)
    straight = read(model, [1, 2, 3, 4])
    state = model.new_state(16)
    model.forward([1, 2, 3], state, "last")
    append = type(state).append

    def interrupted(self, layer, keys, values):  # type: ignore[no-untyped-def]
        if layer == 1:
            raise KeyboardInterrupt
        return append(self, layer, keys, values)

    monkeypatch.setattr(type(state), "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.forward([200, 201, 202], state, "last")
    monkeypatch.undo()
    assert state.length == 3
    np.testing.assert_allclose(model.forward([4], state, "last"), straight[3:], rtol=0, atol=1e-4)


DOCUMENTS = ["A fox sat by the sea.", "A frog had a hat.\nIt was red.", "One day it rained."]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of DOCUMENTS, more than one blank line between two of them."""
    path = tmp_path / "documents.txt"
    path.write_text("\n \n\n".join(DOCUMENTS[:2]) + "\n\n" + DOCUMENTS[2] + "\n")
    return path


@pytest.fixture
def alone() -> list[list[int]]:
    """The ids of DOCUMENTS."""
    with GGUFFile.open(STORIES) as file:
        tokenizer = Tokenizer.from_gguf(file)
    return [list(tokenizer.encode(document)) for document in DOCUMENTS]


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """What llama.cpp is given to read, (ids, batch); its answer is the float32 forward's."""
    calls: list[tuple[list[int], int]] = []

    def logits(path: Path, ids: judge.Ids, batch: int) -> Floats:
        calls.append((ids.tolist(), batch))
        with GGUFFile.open(path) as file:
            return float32_logits(file, ids)

    monkeypatch.setattr(judge, "llama_cpp_logits", logits)
    return calls


def judge_text(
    monkeypatch: pytest.MonkeyPatch, text: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """Run the judge on the story model; return its exit status and what it stores."""
    kept: dict[str, Any] = {}

    def keep(
        name: str, what: str, command: str, stored: Mapping[str, object], packages: object
    ) -> None:
        kept.update(stored, name=name, command=command)

    monkeypatch.setattr(judge, "write_result", keep)
    words = ["judge.py", str(STORIES), f"--text={text}", "--device=reference", *options]
    monkeypatch.setattr(sys, "argv", words)
    return judge.main(), kept


def test_documents_do_not_see_each_other(
    text: Path,
    alone: list[list[int]],
    llama_cpp: list[tuple[list[int], int]],
) -> None:
    with GGUFFile.open(STORIES) as file:
        documents = judge.document_ids(file, text, sum(map(len, alone)))
        joined = float32_logits(file, np.concatenate(documents))
        apart = np.concatenate([float32_logits(file, ids) for ids in documents])
    assert judge.figures(apart, joined)["kl_max"] > 1  # so much would seeing each other change
    result = judge.judge_model("reference", None, judge.Peer(None), STORIES, documents, text_checks)
    # The fake llama.cpp reads what it is given alone: no one else may have read it otherwise.
    assert llama_cpp == [(ids, batch) for batch in (judge.PROMPT_BATCH, 1) for ids in alone]
    for way in ("prompt", "decode"):
        for reader in ("device", "llama.cpp"):
            found: Any = result[way][reader]
            assert found["kl_max"] < 1e-6, (way, reader)
        assert result[way]["passed"]


def test_whole_documents_are_taken_until_there_are_tokens_enough(
    text: Path, alone: list[list[int]]
) -> None:
    first, second, third = map(len, alone)
    with GGUFFile.open(STORIES) as file:

        def taken(count: int) -> list[list[int]]:
            return [ids.tolist() for ids in judge.document_ids(file, text, count)]

        assert taken(1) == taken(first) == alone[:1]
        assert taken(first + 1) == taken(first + second) == alone[:2]
        everything = first + second + third
        assert taken(everything) == alone
        message = f"has {everything} tokens in 3 documents, wanted {everything + 1} tokens"
        with pytest.raises(SystemExit, match=message):
            taken(everything + 1)


def test_a_result_says_how_many_documents_and_tokens_were_read_and_how(
    text: Path,
    alone: list[list[int]],
    llama_cpp: list[tuple[list[int], int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = len(alone[0]) + 1
    tokens = len(alone[0]) + len(alone[1])
    status, stored = judge_text(monkeypatch, text, "--apart", f"--tokens={count}")
    assert status == 0
    assert (stored["documents"], stored["tokens"]) == (2, tokens)
    assert stored["command"] == (
        "python tools/judge.py stories.gguf --text=documents.txt --apart --device=reference "
        f"--tokens={count}"
    )
    assert f"{tokens} tokens in 2 documents: 0 of 2 paths failed" in capsys.readouterr().out
    _, stored = judge_text(monkeypatch, text, f"--tokens={count}")
    assert (stored["documents"], stored["tokens"]) == (1, count)
    assert "--apart" not in stored["command"]


def test_figures_of_a_peer_are_taken_from_as_many_documents_and_tokens_only(
    text: Path,
    alone: list[list[int]],
    llama_cpp: list[tuple[list[int], int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tokens = len(alone[0]) + len(alone[1])
    options = ("--apart", f"--tokens={tokens}", f"--peer={tmp_path / 'peer.json'}")
    _, stored = judge_text(monkeypatch, text, *options[:2])
    (tmp_path / "peer.json").write_text(json.dumps(stored))
    llama_cpp.clear()
    _, again = judge_text(monkeypatch, text, *options)
    assert again["models"] == stored["models"]
    assert llama_cpp == []
    for documents, kept in ((None, tokens), (2, tokens + 1)):
        other = {**stored, "documents": documents, "tokens": kept}
        if documents is None:  # a result of one text, which does not count documents
            del other["documents"]
        (tmp_path / "peer.json").write_text(json.dumps(other))
        said = f"{kept} tokens in {documents or 1} documents?, not {tokens} tokens in 2 documents"
        with pytest.raises(SystemExit, match=said):
            judge_text(monkeypatch, text, *options)
