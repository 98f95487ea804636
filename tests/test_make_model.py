"""The makers of random models, of copies and of routes: what they write is what they say."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import make_model as maker
import make_routes as routes_maker
import numpy as np
import pytest
from make_model import make_model
from make_routes import make_routes, measure
from model_shapes import BENCH_SHAPES, LOGITS_SHAPES, Q4_K_M, SPREADS, ModelShape, plan_tensors
from random_blocks import random_blocks
from rewrite_gguf import rewrite

from strata_nb import models
from strata_nb.errors import ConfigError
from strata_nb.formats import DEQUANTISABLE, TensorType, block_layout, dequantise, row_bytes
from strata_nb.gguf import GGUFFile

FAMILIES = list(LOGITS_SHAPES)
TINY = replace(LOGITS_SHAPES["qwen3moe"], layers=1, experts=2, top_k=1, vocab=258)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", [TensorType.Q4_K, TensorType.IQ1_M, TensorType.MXFP4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gguf_package_and_our_reader_find_the_same_tensors(
    family: str, kind: TensorType, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    make_model(path, LOGITS_SHAPES[family], rules=[("*", kind)])
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == list(theirs)
        assert file.architecture == LOGITS_SHAPES[family].architecture
        for name, tensor in file.tensors.items():
            assert tensor.type.name == theirs[name].tensor_type.name, name
            assert tensor.shape == tuple(theirs[name].shape[::-1].tolist()), name
            np.testing.assert_array_equal(file.raw(name), theirs[name].data.reshape(-1).view("u1"))
            values = dequantise(tensor.type, file.raw(name))
            assert np.isfinite(values).all(), name
            assert tensor.type == (kind if is_matrix(name) else TensorType.F32), name


def is_matrix(name: str) -> bool:
    return not any(part in name for part in ("norm", "bias", "gate_inp"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_complete_and_every_layer_shows_in_its_logits(
    family: str, tmp_path: Path
) -> None:
    path, shorter = tmp_path / "model.gguf", tmp_path / "shorter.gguf"
    shape = LOGITS_SHAPES[family]
    make_model(path, shape)
    make_model(shorter, replace(shape, layers=1))
    logits = []
    for each in (path, shorter):
        with GGUFFile.open(each) as file:
            model = models.open_reference(file, models.describe(file))
            logits.append(model.forward(list(range(8)), model.new_state(8), "all"))
    assert 1 < logits[0].std() < 10
    assert np.abs(logits[0] - logits[1]).mean() > 0.1 * logits[0].std()


def test_equal_arguments_give_equal_bytes_and_another_seed_gives_others(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    make_model(first, TINY, seed=1)
    make_model(second, TINY, seed=1)
    make_model(other, TINY, seed=2)
    assert digest(first) == digest(second) != digest(other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "other", "second"]


def test_models_that_differ_in_layers_have_the_common_ones_in_common(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_model(one, TINY)
    make_model(two, replace(TINY, layers=2))
    with GGUFFile.open(one) as short, GGUFFile.open(two) as long:
        assert len(short.tensors) < len(long.tensors)
        for name in short.tensors:
            np.testing.assert_array_equal(short.raw(name), long.raw(name))


def test_types_follow_the_first_rule_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rules = [("*attn_v*", TensorType.Q8_0), *Q4_K_M]
    make_model(path, replace(TINY, layers=2), rules=rules)
    with GGUFFile.open(path) as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert types["blk.0.attn_v.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["blk.0.ffn_down_exps.weight"] == "Q6_K"
    assert types["blk.1.ffn_down_exps.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"


def test_the_mix_keeps_more_bits_in_every_second_layer() -> None:
    shape = BENCH_SHAPES["qwen3moe"]
    plan = plan_tensors(shape, Q4_K_M, SPREADS["bench"], 0.4)
    down = [tensor.kind.name for tensor in plan if "ffn_down" in tensor.name]
    assert down == ["Q6_K", "Q4_K"] * 24


def test_the_bench_shape_is_17_gib() -> None:
    plan = plan_tensors(BENCH_SHAPES["qwen3moe"], Q4_K_M, SPREADS["bench"], 0.4)
    assert sum(tensor.size_bytes for tensor in plan) / 2**30 == pytest.approx(17.28, abs=0.01)


def test_rows_of_a_tensor_larger_than_a_tile_all_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "TILE_VALUES", 2**14)
    path = tmp_path / "model.gguf"
    make_model(path, TINY)
    with GGUFFile.open(path) as file:
        for name in ("blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_exps.weight"):
            tensor = file.tensors[name]
            rows = file.raw(name).reshape(-1, row_bytes(tensor.type, tensor.shape[-1]))
            assert len(np.unique(rows, axis=0)) >= 2**14 // 256  # a whole tile
            assert not (rows[1:] == rows[:-1]).all(axis=1).any()
        up, gate = (file.raw(f"blk.0.ffn_{part}_exps.weight") for part in ("up", "gate"))
        assert (up != gate).any()


def test_tensors_are_padded_as_by_the_writer_of_the_gguf_package(tmp_path: Path) -> None:
    path, copy = tmp_path / "model.gguf", tmp_path / "copy.gguf"
    odd = ModelShape("llama", 1, 0, 0, dim=3, ff=5, heads=1, kv_heads=1, head_dim=2, vocab=259)
    make_model(path, odd, rules=[("*", TensorType.F16)])
    rewrite(path, copy, keys={}, tensors={})
    assert path.read_bytes() == copy.read_bytes()
    with GGUFFile.open(path) as file:
        assert all(tensor.size_bytes % 32 for tensor in file.tensors.values())


def test_a_large_tensor_is_written_without_a_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "TILE_VALUES", 2**14)
    path = tmp_path / "model.gguf"
    tracemalloc.start()
    try:
        make_model(path, replace(TINY, experts=128))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    with GGUFFile.open(path) as file:
        assert peak_bytes < file.tensors["blk.0.ffn_up_exps.weight"].size_bytes / 2


def test_a_model_whose_writing_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(maker, "random_blocks", full)
    (tmp_path / "model.gguf").write_bytes(b"older")
    with pytest.raises(OSError, match="no space"):
        make_model(tmp_path / "model.gguf", TINY)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


def test_a_tied_head_leaves_the_output_matrix_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_model(path, replace(TINY, tied_head=True))
    with GGUFFile.open(path) as file:
        assert "output.weight" not in file.tensors
        assert models.describe(file).tied_head


def test_skew_makes_some_experts_more_popular(tmp_path: Path) -> None:
    spreads = []
    for skew in (0.0, 1.0):
        path = tmp_path / f"{skew}.gguf"
        make_model(path, replace(TINY, experts=64), skew=skew)
        with GGUFFile.open(path) as file:
            router = dequantise(TensorType.F32, file.raw("blk.0.ffn_gate_inp.weight"))
        spreads.append(np.log(router.reshape(64, -1).std(axis=1)).std())
    assert spreads[0] < 0.1
    assert 0.7 < spreads[1] < 1.3


def test_the_vocabulary_of_another_file_is_taken_over(tmp_path: Path) -> None:
    source, path, copy = (tmp_path / name for name in ("source.gguf", "model.gguf", "copy.gguf"))
    writer = gguf.GGUFWriter(source, "llama")
    tokens = [*(f"token {i}".encode() for i in range(299)), b"\xe2\x82"]  # half a character
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(300)])
    writer.add_token_types([1] * 300)
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    make_model(path, TINY, vocab_gguf=source)
    rewrite(path, copy, keys={"general.name": ("copy", gguf.GGUFValueType.STRING)}, tensors={})
    with GGUFFile.open(source) as wanted, GGUFFile.open(path) as file:
        keys = [key for key in wanted.metadata if key.startswith("tokenizer.")]
        assert len(keys) == 6
        assert all(file.metadata.agrees(key, wanted.metadata) for key in keys)
        assert [key for key in file.metadata if key.startswith("tokenizer.")] == keys
        assert file.tensors["token_embd.weight"].shape == (300, 256)
        with GGUFFile.open(copy) as rewritten:
            assert rewritten.metadata["general.name"] == "copy"
            assert all(rewritten.metadata.agrees(key, wanted.metadata) for key in keys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "gpt2"}, "gpt2: not known"),
        ({"layers": 0}, "layers 0"),
        ({"vocab": 257}, "257 tokens"),
        ({"experts": 0, "top_k": 0}, "0 experts"),
        ({"top_k": 9}, "9 of 8 experts"),
        ({"top_k": 0}, "0 of 8 experts"),
        ({"architecture": "qwen3"}, "qwen3: 8 experts, needs 0"),
        ({"shared_ff": 256}, "shared expert of width 256"),
        ({"heads": 5}, "5 heads, no multiple of 2"),
        ({"architecture": "olmoe", "heads": 4}, "2 key/value heads, needs 4"),
        ({"architecture": "olmoe", "heads": 8, "kv_heads": 8}, "head_dim = 512, needs dim = 256"),
        ({"architecture": "olmoe", "heads": 4, "kv_heads": 4, "tied_head": True}, "tied head"),
    ],
)
def test_a_shape_that_cannot_be_loaded_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(LOGITS_SHAPES["qwen3moe"], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "kind", "said"),
    [
        (replace(TINY, dim=320), TensorType.Q4_K, "token_embd.weight: rows of 320 values .* 256"),
        (TINY, TensorType.Q8_K, "random Q8_K blocks"),
    ],
)
def test_a_type_that_cannot_be_made_is_refused_and_nothing_is_written(
    shape: ModelShape, kind: TensorType, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_model(tmp_path / "model.gguf", shape, rules=[("*", kind)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", sorted(DEQUANTISABLE))
def test_random_blocks_are_finite_and_spread_as_asked(kind: TensorType) -> None:
    blocks = 2**18 // block_layout(kind).values
    for std in (1.0, 0.005):
        rng = np.random.default_rng(5)
        values = dequantise(kind, random_blocks(kind, blocks, std, rng))
        assert np.isfinite(values).all()
        # The scales of MXFP4 are powers of two: half a step either way is left to chance.
        assert values.std() == pytest.approx(std, rel=0.15 if kind == TensorType.MXFP4 else 0.03)
        assert abs(values.mean()) < 0.03 * std


def run(module: object, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["tool", *words])
    return module.main()  # type: ignore[attr-defined, no-any-return]


def test_the_command_line_reaches_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, same = tmp_path / "out.gguf", tmp_path / "same.gguf"
    words = (
        "--family=qwen2moe --type=Q5_0 --override=*attn_v*=Q8_0 --override=output*=F16 --layers=1 "
        "--experts=3 --top-k=2 --dim=96 --ff=64 --shared-ff=32 --heads=3 --kv-heads=1 "
        "--head-dim=32 --vocab=260 --context=99 --skew=0 --seed=4"
    )
    assert run(maker, [*words.split(), str(out)], monkeypatch) == 0
    make_model(
        same,
        ModelShape("qwen2moe", 1, 3, 2, 96, 64, 32, 3, 1, 32, 260, 99),
        rules=[("*attn_v*", TensorType.Q8_0), ("output*", TensorType.F16), ("*", TensorType.Q5_0)],
        skew=0,
        seed=4,
    )
    assert digest(out) == digest(same)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--family=gpt2 x", "--family gpt2"),
        ("--type=Q8_K x", "type Q8_K: not known"),
        ("--override=Q8_0 x", "--override Q8_0: wanted PATTERN=TYPE"),
        ("--layers=two x", "--layers two: not a number"),
        ("--dim=100 x", "rows of 100 values"),
        ("--seed=-1 x", "seed -1"),
    ],
)
def test_the_command_line_refuses_with_one_cause_and_exit_2(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(maker, words.split(), monkeypatch) == 2
    assert said in capsys.readouterr().err


def test_routes_have_the_locality_they_claim() -> None:
    trace = make_routes(layers=1, tokens=3000)
    assert trace.shape == (3000, 1, 8)
    assert trace.dtype == np.int16
    assert all(len(set(row)) == 8 for row in trace[:, 0].tolist())
    assert trace.min() >= 0
    assert trace.max() < 128
    found = measure(trace, 128)
    assert 0.45 < found.reuse < 0.57
    assert 0.78 < found.recent < 0.87
    assert 0.50 < found.hottest_quarter < 0.65
    assert 0.76 < found.hottest_half < 0.88


def test_measured_locality_is_that_of_a_trace_made_by_hand() -> None:
    same = np.tile(np.array([[0, 1]], np.int16), (20, 1))[:, None]
    assert measure(same, 4) == (1.0, 1.0, 0.5, 1.0)
    turning = (np.arange(40).reshape(20, 2) % 40).astype(np.int16)[:, None]  # no expert twice
    assert measure(turning, 40) == pytest.approx((0.0, 0.0, 0.25, 0.5))


def test_uniform_routes_prefer_no_expert_and_no_neighbour() -> None:
    trace = make_routes(layers=2, experts=32, top_k=4, tokens=3000, uniform=True)
    assert trace.shape == (3000, 2, 4)
    assert np.all(np.diff(np.sort(trace, axis=2), axis=2) > 0)
    counts = np.bincount(trace[:, 1].ravel(), minlength=32)
    assert 300 < counts.min() <= counts.max() < 450  # 375 each
    assert measure(trace, 32).reuse == pytest.approx(4 / 32, abs=0.01)


def test_routes_are_the_same_for_the_same_seed_only() -> None:
    sizes = {"layers": 2, "experts": 16, "top_k": 2, "tokens": 50}
    trace = make_routes(**sizes, seed=1)
    np.testing.assert_array_equal(trace, make_routes(**sizes, seed=1))
    assert (trace != make_routes(**sizes, seed=2)).any()


@pytest.mark.parametrize("uniform", [False, True])
def test_routes_are_the_same_however_many_scores_are_made_at_a_time(
    uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> np.ndarray:
        return make_routes(layers=2, experts=16, top_k=2, tokens=50, topic=20, uniform=uniform)

    trace = made()
    monkeypatch.setattr(routes_maker, "PIECE_SCORES", 7 * 16)
    np.testing.assert_array_equal(trace, made())


def test_the_command_line_of_routes_writes_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "routes.npy"
    words = "--layers=2 --experts=16 --top-k=2 --tokens=50 --topic=20 --seed=1"
    assert run(routes_maker, [*words.split(), str(out)], monkeypatch) == 0
    sizes = {"layers": 2, "experts": 16, "top_k": 2, "tokens": 50, "topic": 20}
    np.testing.assert_array_equal(np.load(out), make_routes(**sizes, seed=1))
    assert run(routes_maker, ["--top-k=128", str(out)], monkeypatch) == 2
    assert "128 of 128 experts" in capsys.readouterr().err
    assert run(routes_maker, ["--tokens=-1", str(out)], monkeypatch) == 2
    assert "--tokens -1" in capsys.readouterr().err
    plain = tmp_path / "routes"  # a name without an ending is written as it stands
    assert run(routes_maker, [*words.split(), str(plain)], monkeypatch) == 0
    assert plain.read_bytes() == out.read_bytes()
    nowhere = tmp_path / "none" / "routes.npy"
    monkeypatch.setattr(routes_maker, "make_routes", pytest.fail)
    assert run(routes_maker, [*words.split(), str(nowhere)], monkeypatch) == 2
    assert f"{nowhere}: No such file or directory" in capsys.readouterr().err
