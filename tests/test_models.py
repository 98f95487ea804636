"""Reading what a model is: nothing in a file is passed over, and all of it must fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFValueType
from make_model import make_model
from model_shapes import ModelShape
from rewrite_gguf import rewrite

from strata_nb import models
from strata_nb.errors import ConfigError, FileFormatError
from strata_nb.formats import TensorType
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.models import Description

U32, F32 = GGUFValueType.UINT32, GGUFValueType.FLOAT32
TEXT, BOOL = GGUFValueType.STRING, GGUFValueType.BOOL

SHAPES = {
    "llama": ModelShape(
        "llama", experts=0, top_k=0, dim=32, ff=48, heads=4, kv_heads=2, head_dim=16, vocab=258
    ),
    "mixtral": ModelShape(
        "llama", experts=4, top_k=2, dim=32, ff=24, heads=4, kv_heads=2, head_dim=8, vocab=258
    ),
    "qwen2moe": ModelShape(
        "qwen2moe", experts=4, top_k=2, dim=32, ff=24, shared_ff=40, heads=4, head_dim=8, vocab=258
    ),
    "qwen3": ModelShape(
        "qwen3", experts=0, top_k=0, dim=32, ff=48, heads=4, kv_heads=2, head_dim=16, vocab=258
    ),
    "qwen3moe": ModelShape(
        "qwen3moe", experts=4, top_k=2, dim=32, ff=24, heads=4, head_dim=16, vocab=258
    ),
    "olmoe": ModelShape(
        "olmoe", experts=4, top_k=2, dim=32, ff=24, heads=4, kv_heads=4, head_dim=8, vocab=258
    ),
}

Change = Callable[..., Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small float32 file of each family."""
    directory = tmp_path_factory.mktemp("models")
    paths = {name: directory / f"{name}.gguf" for name in SHAPES}
    for name, path in paths.items():
        make_model(path, SHAPES[name], rules=[("*", TensorType.F32)])
    return paths


@pytest.fixture
def changed(originals: dict[str, Path], tmp_path: Path) -> Change:
    """A function that copies a family's file with other keys and tensors; None leaves one out."""

    def change(
        family: str,
        keys: dict[str, tuple[Any, GGUFValueType] | None] | None = None,
        tensors: dict[str, npt.NDArray[np.generic] | None] | None = None,
    ) -> Path:
        path = tmp_path / "changed.gguf"
        rewrite(originals[family], path, keys=keys or {}, tensors=tensors or {})
        return path

    return change


def describe(path: Path) -> Description:
    with GGUFFile.open(path) as file:
        return models.describe(file)


def logits(path: Path) -> Floats:
    with GGUFFile.open(path) as file:
        model = models.open_reference(file, models.describe(file))
        return model.forward([1, 2, 3, 4, 5], model.new_state(8), "all")


def refusal(path: Path) -> str:
    """Return the message of the refusal, which must name the file and carry a remedy or a key."""
    with pytest.raises(FileFormatError) as caught:
        describe(path)
    assert str(path) in str(caught.value)
    return str(caught.value) + "\n" + caught.value.hint


def weights(*shape: int) -> Floats:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


# -- what a description says -----------------------------------------------------------------------


def test_a_dense_model_is_described_by_its_file(originals: dict[str, Path]) -> None:
    model = describe(originals["llama"])
    assert (model.architecture, model.layers, model.width) == ("llama", 2, 32)
    assert (model.heads, model.kv_heads, model.key_length, model.value_length) == (4, 2, 16, 16)
    assert (model.ff_width, model.experts, model.top_k, model.expert_width) == (48, 0, 0, 0)
    assert (model.vocab_size, model.context, model.sliding_window) == (258, 1024, None)
    assert (model.rope_dims, model.rope_style, model.rope_scale) == (16, "pairs", 1.0)
    layer = 32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32
    assert model.parameters == 2 * 258 * 32 + 32 + 2 * layer
    assert model.dense_bytes == 4 * model.parameters
    assert (model.expert_bytes, model.one_expert_bytes, model.tied_head) == (0, (), False)


def test_heads_with_norms_of_their_own_are_counted(originals: dict[str, Path]) -> None:
    model, plain = describe(originals["qwen3"]), describe(originals["llama"])
    assert (model.ff_width, model.experts, model.top_k, model.expert_width) == (48, 0, 0, 0)
    assert (model.rope_dims, model.rope_style, model.rope_base) == (16, "halves", 1e6)
    assert model.parameters == plain.parameters + 2 * 2 * 16  # 2 layers, queries and keys
    assert (model.dense_bytes, model.expert_bytes) == (4 * model.parameters, 0)


def test_a_mixture_is_described_with_the_bytes_of_its_experts(originals: dict[str, Path]) -> None:
    model = describe(originals["qwen2moe"])
    assert (model.experts, model.top_k) == (4, 2)
    assert (model.ff_width, model.expert_width, model.shared_width) == (0, 24, 40)
    assert model.rope_style == "halves"
    assert model.one_expert_bytes == (3 * 24 * 32 * 4,) * 2
    assert model.expert_bytes == 4 * sum(model.one_expert_bytes)
    assert model.dense_bytes + model.expert_bytes == 4 * model.parameters


def test_bytes_of_a_cell_follow_the_cache_types(originals: dict[str, Path]) -> None:
    model = describe(originals["llama"])  # 2 layers, 2 K/V heads of 16 values
    assert model.kv_bytes_per_cell("f32", "f32") == 2 * 2 * (64 + 64)
    assert model.kv_bytes_per_cell("f16", "int8") == 2 * 2 * (32 + 16 + 2)
    with pytest.raises(ConfigError, match="type q8_0"):
        model.kv_bytes_per_cell("f16", "q8_0")


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHAPES)
def test_a_key_that_is_not_understood_is_refused_by_name(family: str, changed: Change) -> None:
    architecture = SHAPES[family].architecture
    message = refusal(changed(family, {f"{architecture}.attention.mystery": (0, U32)}))
    assert f"1 key is not understood: {architecture}.attention.mystery" in message


def test_many_unknown_keys_are_counted_and_the_first_are_named(changed: Change) -> None:
    message = refusal(changed("olmoe", {f"olmoe.mystery.{i}": (i, U32) for i in range(9)}))
    assert "9 keys are not understood: olmoe.mystery.0, olmoe.mystery.1" in message
    assert "and 4 more" in message


def test_keys_outside_the_architecture_are_none_of_our_business(changed: Change) -> None:
    describe(changed("llama", {"quantize.imatrix.chunks": (5, U32), "general.tag": ("x", TEXT)}))


@pytest.mark.parametrize(
    ("family", "key", "value", "kind", "named"),
    [
        ("llama", "llama.attention.clamp_kqv", 8.0, F32, "clamp"),
        ("llama", "llama.attention.scale", 0.5, F32, "attention.scale"),
        ("llama", "llama.logit_scale", 0.5, F32, "scaled logits"),
        ("llama", "llama.residual_scale", 0.5, F32, "residual"),
        ("llama", "llama.embedding_scale", 12.0, F32, "embedding"),
        ("llama", "llama.attention.causal", False, BOOL, "later tokens"),
        ("llama", "llama.use_parallel_residual", True, BOOL, "side by side"),
        ("llama", "llama.pooling_type", 1, U32, "pooled"),
        ("llama", "llama.tensor_data_layout", "reordered", TEXT, "order"),
        ("llama", "llama.final_logit_softcapping", 30.0, F32, "soft-capped"),
        ("llama", "llama.rope.scaling.attn_factor", 1.2, F32, "rotary"),
        ("llama", "llama.logit_scale", float("nan"), F32, "scaled logits"),
        ("llama", "llama.logit_scale", [0.0, 0.0], F32, "array of float32"),
        ("llama", "llama.tensor_data_layout", "x" * 999, TEXT, "x: another order"),
        ("mixtral", "llama.expert_weights_norm", False, BOOL, "add up to 1"),
        ("mixtral", "llama.expert_shared_count", 1, U32, "expert_shared_count"),
        ("mixtral", "llama.expert_shared_feed_forward_length", 8, U32, "expert_shared"),
        ("qwen2moe", "qwen2moe.expert_weights_norm", True, BOOL, "add up to 1"),
        ("qwen2moe", "qwen2moe.expert_weights_scale", 2.5, F32, "shares"),
        ("qwen2moe", "qwen2moe.leading_dense_block_count", 1, U32, "dense blocks"),
        ("qwen3", "qwen3.expert_count", 4, U32, "wanted an integer from 0 to 0"),
        ("qwen3", "qwen3.expert_used_count", 2, U32, "wanted an integer from 0 to 0"),
        ("qwen3", "qwen3.expert_shared_feed_forward_length", 8, U32, "from 0 to 0"),
        ("qwen3", "qwen3.pooling_type", 4, U32, "pooled"),  # the rerankers
        ("qwen3", "qwen3.rope.scaling.type", "yarn", TEXT, "supported are: none, linear"),
        ("qwen3moe", "qwen3moe.expert_weights_norm", False, BOOL, "add up to 1"),
        ("qwen3moe", "qwen3moe.expert_gating_func", 2, U32, "softmax"),
        ("qwen3moe", "qwen3moe.expert_group_count", 2, U32, "groups"),
        ("qwen3moe", "qwen3moe.nextn_predict_layers", 1, U32, "several tokens"),
        ("olmoe", "olmoe.expert_weights_norm", True, BOOL, "add up to 1"),
    ],
)
def test_a_feature_that_is_not_supported_is_refused_by_its_key(
    family: str, key: str, value: object, kind: GGUFValueType, named: str, changed: Change
) -> None:
    message = refusal(changed(family, {key: (value, kind)}))
    assert key in message
    assert named in message


@pytest.mark.parametrize(
    ("family", "key", "value", "kind"),
    [
        ("llama", "llama.attention.clamp_kqv", 0.0, F32),
        ("llama", "llama.attention.scale", 0.25, F32),  # 1 / sqrt(16)
        ("llama", "llama.attention.causal", True, BOOL),
        ("llama", "llama.tensor_data_layout", "Meta AI original pth", TEXT),
        ("llama", "llama.rope.scaling.finetuned", False, BOOL),
        ("llama", "llama.expert_count", 0, U32),
        ("mixtral", "llama.expert_weights_norm", True, BOOL),
        ("qwen2moe", "qwen2moe.expert_weights_norm", False, BOOL),
        ("qwen2moe", "qwen2moe.expert_weights_scale", 1.0, F32),
        ("qwen3", "qwen3.expert_count", 0, U32),
        ("qwen3", "qwen3.expert_used_count", [0, 0], U32),
        ("qwen3moe", "qwen3moe.expert_gating_func", 1, U32),
        ("qwen3moe", "qwen3moe.expert_group_count", 1, U32),
        ("olmoe", "olmoe.expert_feed_forward_length", 24, U32),
    ],
)
def test_a_feature_that_is_switched_off_changes_nothing(
    family: str,
    key: str,
    value: object,
    kind: GGUFValueType,
    changed: Change,
    originals: dict[str, Path],
) -> None:
    wanted = logits(originals[family])
    np.testing.assert_array_equal(logits(changed(family, {key: (value, kind)})), wanted)


@pytest.mark.parametrize(
    ("key", "value", "kind", "named"),
    [
        ("block_count", 0, U32, "block_count"),
        ("block_count", 1001, U32, "1001"),
        ("attention.head_count", 3, U32, "3 query heads cannot share 2"),
        ("attention.head_count_kv", 0, U32, "head_count_kv"),
        ("attention.head_count_kv", [2, 1], U32, "differs between layers (1 to 2)"),
        ("attention.head_count_kv", [2, 2, 2], U32, "3 values for the 2 layers"),
        ("attention.layer_norm_rms_epsilon", 0.0, F32, "epsilon"),
        ("attention.layer_norm_rms_epsilon", float("nan"), F32, "nan"),
        ("attention.layer_norm_rms_epsilon", None, F32, "epsilon"),
        ("rope.freq_base", -1.0, F32, "freq_base"),
        ("rope.freq_base", float("inf"), F32, "inf"),
        ("rope.dimension_count", 15, U32, "15 values cannot be rotated"),
        ("rope.dimension_count", 18, U32, "18"),
        ("rope.scaling.factor", -2.0, F32, "-2.0"),
        ("context_length", 0, U32, "context_length"),
        ("embedding_length", None, U32, "embedding_length"),
        ("embedding_length", 2**31 - 1, U32, "embedding_length"),
        ("embedding_length", "32", TEXT, "embedding_length"),
        ("embedding_length_out", 16, U32, "embedding_length_out"),
        ("feed_forward_length", [48, 32], U32, "differs between layers"),
        ("feed_forward_length", None, U32, "feed_forward_length"),
        ("vocab_size", 259, U32, "259, but the file lists 258 tokens"),
        ("expert_used_count", 2, U32, "2 experts are used of 0"),
    ],
)
def test_a_number_out_of_bounds_is_refused(
    key: str, value: object, kind: GGUFValueType, named: str, changed: Change
) -> None:
    entry = None if value is None else (value, kind)
    message = refusal(changed("llama", {f"llama.{key}": entry}))
    assert f"llama.{key}" in message
    assert named in message


def test_more_experts_used_than_there_are_is_refused(changed: Change) -> None:
    message = refusal(changed("qwen3moe", {"qwen3moe.expert_used_count": (5, U32)}))
    assert "5 experts are used of 4" in message
    assert "is 0 or missing" in refusal(changed("olmoe", {"olmoe.expert_count": None}))


def test_a_number_for_each_layer_is_read_where_all_are_equal(
    changed: Change, originals: dict[str, Path]
) -> None:
    arrays = {
        "llama.attention.head_count": ([4, 4], U32),
        "llama.attention.head_count_kv": ([2, 2], U32),
        "llama.feed_forward_length": ([48, 48], U32),
    }
    assert describe(changed("llama", arrays)) == describe(originals["llama"])


def test_the_width_of_an_expert_follows_from_the_dense_width(
    changed: Change, originals: dict[str, Path]
) -> None:
    missing = changed("qwen3moe", {"qwen3moe.expert_feed_forward_length": None})
    assert describe(missing) == describe(originals["qwen3moe"])
    both = {"qwen3moe.expert_feed_forward_length": None, "qwen3moe.feed_forward_length": None}
    assert "expert_feed_forward_length: missing" in refusal(changed("qwen3moe", both))


def test_what_converters_of_qwen3_leave_out_follows_from_the_rest(
    changed: Change, originals: dict[str, Path]
) -> None:
    missing = changed("qwen3", {"qwen3.rope.dimension_count": None, "qwen3.vocab_size": None})
    assert describe(missing) == describe(originals["qwen3"])


@pytest.mark.parametrize("kind", ["yarn", "longrope", "mystery"])
def test_rope_scaling_other_than_linear_is_refused_by_name(kind: str, changed: Change) -> None:
    keys = {
        "llama.rope.scaling.type": (kind, TEXT),
        "llama.rope.scaling.factor": (4.0, F32),
        "llama.rope.scaling.original_context_length": (256, U32),
    }
    message = refusal(changed("llama", keys))
    assert f"rope scaling '{kind}' is not supported" in message
    assert "none, linear" in message


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_linear_rope_scaling_divides_positions_under_both_names(
    family: str, changed: Change, originals: dict[str, Path]
) -> None:
    plain = logits(originals[family])
    factor = {f"{family}.rope.scaling.factor": (4.0, F32)}
    linear = logits(changed(family, factor | {f"{family}.rope.scaling.type": ("linear", TEXT)}))
    assert np.abs(linear - plain).max() > 0.01
    np.testing.assert_array_equal(linear[0], plain[0])  # position 0 stays where it is
    old_name = logits(changed(family, {f"{family}.rope.scale_linear": (4.0, F32)}))
    np.testing.assert_array_equal(old_name, linear)
    none = logits(changed(family, factor | {f"{family}.rope.scaling.type": ("none", TEXT)}))
    np.testing.assert_array_equal(none, plain)


def test_partial_rotation_turns_the_start_of_a_head_only(
    changed: Change, originals: dict[str, Path]
) -> None:
    partial = logits(changed("qwen3moe", {"qwen3moe.rope.dimension_count": (8, U32)}))
    assert np.abs(partial - logits(originals["qwen3moe"])).max() > 0.01


def test_a_context_beyond_the_sliding_window_is_refused(
    changed: Change, originals: dict[str, Path]
) -> None:
    path = changed("llama", {"llama.attention.sliding_window": (6, U32)})
    assert describe(path).context == 6
    with GGUFFile.open(path) as file:
        model = models.open_reference(file, models.describe(file))
        within = model.forward([1, 2, 3, 4, 5], model.new_state(6), "all")
        np.testing.assert_array_equal(within, logits(originals["llama"]))
        with pytest.raises(ConfigError, match=r"context of 7 cells: .* over the last 6"):
            model.new_state(7)
    off = changed("llama", {"llama.attention.sliding_window": (0, U32)})
    assert describe(off).sliding_window is None


def test_another_architecture_is_named_with_those_that_are_supported(changed: Change) -> None:
    message = refusal(changed("llama", {"general.architecture": ("mamba", TEXT)}))
    assert "architecture 'mamba' is not supported" in message
    for name in models.SUPPORTED:
        assert name in message


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "vocab"])
def test_a_file_that_holds_no_model_is_refused(kind: str, changed: Change) -> None:
    assert f"holds a {kind}" in refusal(changed("llama", {"general.type": (kind, TEXT)}))


# -- tensors ---------------------------------------------------------------------------------------


def test_a_tensor_that_is_not_understood_is_refused_by_name(changed: Change) -> None:
    extra = {"blk.0.attn_sinks.weight": weights(4), "blk.1.attn_sinks.weight": weights(4)}
    message = refusal(changed("llama", None, extra))
    assert "2 tensors are not understood in a model of architecture llama" in message
    assert "blk.0.attn_sinks.weight, blk.1.attn_sinks.weight" in message


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "blk.1.attn_v.weight"),
        ("llama", "output_norm.weight"),
        ("mixtral", "blk.0.ffn_gate_inp.weight"),
        ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight"),
        ("qwen3", "blk.1.attn_k_norm.weight"),
        ("qwen3", "blk.0.ffn_up.weight"),
        ("qwen3moe", "blk.1.attn_q_norm.weight"),
        ("olmoe", "blk.1.attn_k_norm.weight"),
        ("qwen2moe", "blk.1.attn_k.bias"),  # layer 0 has one
    ],
)
def test_a_missing_tensor_is_refused_by_name(family: str, name: str, changed: Change) -> None:
    assert f"1 tensor is missing: {name}" in refusal(changed(family, None, {name: None}))


def test_fused_tensors_are_named_beside_those_they_replace(changed: Change) -> None:
    fused: dict[str, npt.NDArray[np.generic] | None] = {}
    for layer in range(2):
        fused |= {f"blk.{layer}.attn_{part}.weight": None for part in "qkv"}
        fused[f"blk.{layer}.attn_qkv.weight"] = weights(128, 32)
    message = refusal(changed("llama", None, fused))
    assert "6 tensors are missing: blk.0.attn_q.weight" in message
    assert "2 tensors are not understood: blk.0.attn_qkv.weight" in message


def test_a_layer_more_than_the_metadata_say_is_refused(changed: Change) -> None:
    message = refusal(changed("llama", {"llama.block_count": (1, U32)}))
    assert "blk.1." in message
    assert "not understood" in message


@pytest.mark.parametrize(
    ("family", "name", "shape", "wanted"),
    [
        ("llama", "blk.0.ffn_down.weight", (48, 32), "shape 48 x 32, wanted 32 x 48"),
        ("llama", "blk.1.attn_k.weight", (64, 32), "shape 64 x 32, wanted 32 x 32"),
        ("llama", "output.weight", (257, 32), "wanted 258 x 32"),
        ("mixtral", "blk.0.ffn_up_exps.weight", (3, 24, 32), "wanted 4 x 24 x 32"),
        ("qwen3", "blk.0.attn_k_norm.weight", (32,), "shape 32, wanted 16"),  # olmoe's
        ("qwen3", "blk.1.ffn_gate.weight", (32, 48), "shape 32 x 48, wanted 48 x 32"),
        ("qwen3moe", "blk.0.attn_q_norm.weight", (64,), "shape 64, wanted 16"),  # olmoe's
        ("olmoe", "blk.0.attn_q_norm.weight", (8,), "shape 8, wanted 32"),  # qwen3moe's
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(
    family: str, name: str, shape: tuple[int, ...], wanted: str, changed: Change
) -> None:
    message = refusal(changed(family, None, {name: weights(*shape)}))
    assert name in message
    assert wanted in message


def test_a_vocabulary_of_another_size_than_the_weights_is_refused(changed: Change) -> None:
    message = refusal(changed("llama", None, {"token_embd.weight": weights(260, 32)}))
    assert "token_embd.weight has 260 rows for a vocabulary of 258 tokens" in message


def test_experts_that_are_not_stacked_are_refused_with_the_remedy(changed: Change) -> None:
    tensors: dict[str, npt.NDArray[np.generic] | None] = {}
    for layer in range(2):
        for part in ("gate", "up", "down"):
            shape = (32, 24) if part == "down" else (24, 32)
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = None
            for number in range(4):
                tensors[f"blk.{layer}.ffn_{part}.{number}.weight"] = weights(*shape)
    message = refusal(changed("mixtral", None, tensors))
    assert "24 tensors are not understood: each expert is a tensor of its own" in message
    assert "blk.0.ffn_gate.0.weight" in message
    assert "convert the model again" in message


def test_a_type_that_cannot_be_dequantised_is_named_with_its_tensors(changed: Change) -> None:
    integers = np.ones((32, 32), np.int8)
    message = refusal(changed("llama", None, {"blk.0.attn_k.weight": integers}))
    assert "1 tensor is of a type that is not supported (I8): blk.0.attn_k.weight" in message


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_without_a_head_uses_the_embedding(
    family: str, changed: Change, originals: dict[str, Path]
) -> None:
    tied = changed(family, None, {"output.weight": None})
    assert describe(tied).tied_head
    with GGUFFile.open(originals[family]) as file:
        embedding = file.raw("token_embd.weight").view(np.float32).reshape(258, 32).copy()
    wanted = logits(tied)
    explicit = changed(family, None, {"output.weight": embedding})
    assert not describe(explicit).tied_head
    np.testing.assert_array_equal(logits(explicit), wanted)


def test_rotary_factors_are_used_in_llama_and_refused_elsewhere(
    changed: Change, originals: dict[str, Path]
) -> None:
    ones = changed("llama", None, {"rope_freqs.weight": np.ones(8, np.float32)})
    np.testing.assert_array_equal(logits(ones), logits(originals["llama"]))
    other = changed("llama", None, {"rope_freqs.weight": np.full(8, 3, np.float32)})
    assert np.abs(logits(other) - logits(originals["llama"])).max() > 0.01
    wrong = changed("llama", None, {"rope_freqs.weight": np.ones(16, np.float32)})
    assert "shape 16, wanted 8" in refusal(wrong)
    elsewhere = changed("qwen3moe", None, {"rope_freqs.weight": np.ones(8, np.float32)})
    assert "rope_freqs.weight" in refusal(elsewhere)


@pytest.mark.parametrize(
    ("family", "name", "size"),
    [
        ("llama", "attn_q", 64),
        ("llama", "attn_k", 32),
        ("llama", "attn_v", 32),
        ("llama", "attn_output", 32),
        ("llama", "ffn_gate", 48),
        ("llama", "ffn_up", 48),
        ("llama", "ffn_down", 32),
        ("qwen3", "attn_k", 32),
        ("qwen3", "ffn_down", 32),
        ("qwen3moe", "attn_q", 64),
        ("olmoe", "attn_v", 32),
    ],
)
def test_every_bias_is_added(
    family: str, name: str, size: int, changed: Change, originals: dict[str, Path]
) -> None:
    biases = {f"blk.{layer}.{name}.bias": weights(size) for layer in range(2)}
    moved = logits(changed(family, None, biases)) - logits(originals[family])
    assert np.abs(moved).max() > 0.01
    zeros = {name: np.zeros_like(bias) for name, bias in biases.items()}
    np.testing.assert_allclose(
        logits(changed(family, None, zeros)), logits(originals[family]), rtol=0, atol=1e-5
    )


def test_a_shared_gate_may_be_stored_as_a_matrix_of_one_row(
    changed: Change, originals: dict[str, Path]
) -> None:
    tensors: dict[str, npt.NDArray[np.generic] | None] = {}
    with GGUFFile.open(originals["qwen2moe"]) as file:
        for layer in range(2):
            name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
            tensors[name] = file.raw(name).view(np.float32).reshape(1, 32).copy()
    np.testing.assert_array_equal(
        logits(changed("qwen2moe", None, tensors)), logits(originals["qwen2moe"])
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.layer_norm_rms_epsilon", 1e300),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
        ("llama.rope.freq_base", 1e300),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.scaling.factor", 1e-320),
        ("llama.rope.scaling.factor", -2.0),
    ],
)
def test_numbers_that_float32_cannot_compute_with_are_refused(
    key: str, value: float, changed: Change
) -> None:
    message = refusal(changed("llama", {key: (value, GGUFValueType.FLOAT64)}))
    assert key in message
    assert "wanted a number from" in message


def test_tensors_of_hostile_shapes_are_refused(changed: Change) -> None:
    scalar = np.float32(1).reshape(())
    assert "0 rows" in refusal(changed("llama", tensors={"token_embd.weight": scalar}))
    stack = weights(1, 4, 24, 32)
    message = refusal(changed("mixtral", tensors={"blk.0.ffn_gate_exps.weight": stack}))
    assert "blk.0.ffn_gate_exps.weight has shape 1 x 4 x" in message


def test_weights_that_are_no_numbers_show_in_the_logits_without_warnings(changed: Change) -> None:
    norm = np.full(32, np.inf, np.float32)
    assert not np.isfinite(logits(changed("llama", tensors={"output_norm.weight": norm}))).any()


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan])
def test_frequency_factors_must_be_numbers_above_0(value: float, changed: Change) -> None:
    factors = np.array([1, 1, value, 1, 1, 1, 1, 1], np.float32)
    message = refusal(changed("llama", tensors={"rope_freqs.weight": factors}))
    assert f"rope_freqs.weight: value 2 is {value}" in message
