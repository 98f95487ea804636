"""Block layouts and dequantising, against the `gguf` package."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from strata_nb.errors import ConfigError
from strata_nb.formats import (
    CACHE_TYPES,
    DEQUANTISABLE,
    PIECE_VALUES,
    REMOVED,
    TensorType,
    block_layout,
    block_record,
    cache_type,
    dequantise,
    row_bytes,
    tensor_bytes,
)

REQUIRED = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"),
    *("IQ1_M", "MXFP4"),
]
LAYOUTS = sorted(set(TensorType) - REMOVED)


def random_blocks(kind: TensorType, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random bytes of as many blocks: every scale, also infinite ones and NaN, can occur."""
    size = blocks * block_layout(kind).size_bytes
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def by_the_gguf_package(kind: TensorType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return what the `gguf` package makes of the same bytes."""
    rows = raw.reshape(-1, block_layout(kind).size_bytes)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(kind)))
    return values.reshape(-1)


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return bit patterns, one for every NaN (which of two NaN an operation keeps is free)."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def test_types_have_the_numbers_of_ggml() -> None:
    for theirs in gguf.GGMLQuantizationType:
        assert TensorType[theirs.name] == theirs.value


def test_layouts_agree_with_the_gguf_package() -> None:
    # The package gives Q8_1 two float32 numbers; ggml's block has had two float16 since 2023.
    disputed = {gguf.GGMLQuantizationType.Q8_1}
    for theirs, (values, size_bytes) in GGML_QUANT_SIZES.items():
        if theirs not in disputed:
            assert block_layout(TensorType(theirs.value)) == (values, size_bytes), theirs.name
    assert block_layout(TensorType.Q8_1) == (32, 2 + 2 + 32)
    assert block_layout(TensorType.Q2_0) == (64, 2 + 64 // 4)


def test_every_required_type_can_be_dequantised() -> None:
    assert {kind.name for kind in DEQUANTISABLE} == {*REQUIRED, "F64"}


@pytest.mark.parametrize("name", REQUIRED)
def test_random_blocks_decode_bit_by_bit_as_in_the_gguf_package(name: str) -> None:
    kind = TensorType[name]
    # 10,007 values or blocks: more than one piece for the large blocks, and an odd tail.
    raw = random_blocks(kind, 10_007)
    np.testing.assert_array_equal(bits(dequantise(kind, raw)), bits(by_the_gguf_package(kind, raw)))


@pytest.mark.parametrize("name", REQUIRED)
def test_extreme_scales_decode_bit_by_bit(name: str) -> None:
    kind = TensorType[name]
    record = block_record(kind)
    blocks = random_blocks(kind, 64).view(record)
    extremes = np.array([6e-8, -6e-8, 0.0, -0.0, 65504, -65504, 1], np.float16)
    for field in {"value", "scale", "minimum"} & set(record.names or ()):
        blocks[field] = np.resize(extremes, 64)
    raw = blocks.view(np.uint8)
    np.testing.assert_array_equal(bits(dequantise(kind, raw)), bits(by_the_gguf_package(kind, raw)))


def test_every_exponent_of_mxfp4_decodes_bit_by_bit() -> None:
    blocks = random_blocks(TensorType.MXFP4, 256).view(block_record(TensorType.MXFP4))
    blocks["exponent"] = np.arange(256)
    raw = blocks.view(np.uint8)
    values = dequantise(TensorType.MXFP4, raw)
    np.testing.assert_array_equal(bits(values), bits(by_the_gguf_package(TensorType.MXFP4, raw)))


def test_a_block_of_q4_k_decodes_as_its_drawing_says() -> None:
    block = np.zeros(1, block_record(TensorType.Q4_K))
    block["scale"], block["minimum"] = 0.5, 0.25
    block["group_scales"][0, 0] = 3  # scale of group 0
    block["group_scales"][0, 5] = 2  # minimum of group 1
    block["group_scales"][0, 8] = 0x15  # group 4: low bits of scale 5, of minimum 1
    block["group_scales"][0, 4] = 0x80  # group 4: its minimum's upper bits, 2
    block["quants"][0, 0] = 0x9F  # first values of groups 0 and 1: 15 and 9
    block["quants"][0, 64] = 0x07  # first value of group 4
    values = dequantise(TensorType.Q4_K, block.view(np.uint8)).reshape(8, 32)
    assert values[0, 0] == 0.5 * 3 * 15
    assert values[0, 1] == 0
    assert values[1, 0] == -0.25 * 2  # scale 0: only the minimum counts
    assert values[4, 0] == 0.5 * 5 * 7 - 0.25 * (1 + 2 * 16)


def test_doubles_are_rounded_to_float32() -> None:
    doubles = np.array([1 / 3, -1e300, 0.0, 2**-149])
    values = dequantise(TensorType.F64, doubles.view(np.uint8))
    expected = np.array([1 / 3, -np.inf, 0.0, 2**-149], np.float32)
    np.testing.assert_array_equal(values, expected)


def test_blocks_at_an_odd_address_decode_the_same() -> None:
    kind = TensorType.Q5_K
    raw = random_blocks(kind, 9)
    shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    np.testing.assert_array_equal(bits(dequantise(kind, shifted)), bits(dequantise(kind, raw)))


def test_input_that_may_not_be_written_is_read_and_stays_as_it_was() -> None:
    for kind in sorted(DEQUANTISABLE):
        raw = random_blocks(kind, 3)
        before = raw.tobytes()
        raw.flags.writeable = False
        dequantise(kind, raw)
        assert raw.tobytes() == before


def test_out_is_filled_and_returned() -> None:
    raw = random_blocks(TensorType.Q8_0, 4)
    out = np.full(128, np.nan, np.float32)
    assert dequantise(TensorType.Q8_0, raw, out) is out
    np.testing.assert_array_equal(bits(out), bits(by_the_gguf_package(TensorType.Q8_0, raw)))


def test_no_bytes_give_no_values() -> None:
    assert dequantise(TensorType.Q4_K, np.empty(0, np.uint8)).shape == (0,)


@pytest.mark.parametrize("name", REQUIRED)
def test_temporaries_stay_small_beside_the_result(name: str) -> None:
    kind = TensorType[name]
    values = 16 * PIECE_VALUES
    raw = random_blocks(kind, values // block_layout(kind).values)
    out = np.empty(values, np.float32)
    tracemalloc.start()
    try:
        dequantise(kind, raw, out)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 2**20


@pytest.mark.parametrize(
    ("raw", "out", "said"),
    [
        (np.zeros(145, np.uint8), None, "145 elements of uint8 are not contiguous whole Q4_K"),
        (np.zeros(144, np.float32), None, "144 elements of float32"),
        (np.zeros(288, np.uint8)[::2], None, "144 elements of uint8 are not contiguous"),
        (np.zeros(144, np.uint8), np.empty(255, np.float32), r"out is float32 \(255,\)"),
        (np.zeros(144, np.uint8), np.empty(256), r"out is float64 \(256,\)"),
        (np.zeros(144, np.uint8), np.empty(512, np.float32)[::2], "contiguous float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_their_numbers(
    raw: NDArray[Any], out: NDArray[Any] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        dequantise(TensorType.Q4_K, raw, out)


def test_a_type_without_a_decoder_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Q8_K"):
        dequantise(TensorType.Q8_K, random_blocks(TensorType.Q8_K, 1))


@pytest.mark.parametrize("kind", sorted(REMOVED))
def test_a_removed_type_has_a_name_and_no_layout(kind: TensorType) -> None:
    with pytest.raises(ValueError, match=rf"{kind.name} \({kind.value}\) was removed"):
        block_layout(kind)
    with pytest.raises(ValueError, match=kind.name):
        tensor_bytes(kind, (1, 256))
    with pytest.raises(ValueError, match=kind.name):
        dequantise(kind, np.zeros(18, np.uint8))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_sizes_of_tensors_are_exact_for_any_number_of_rows(kind: TensorType) -> None:
    values, size_bytes = block_layout(kind)
    assert row_bytes(kind, 3 * values) == 3 * size_bytes
    assert tensor_bytes(kind, (2**40, 2**40, 2 * values)) == 2**81 * size_bytes
    assert tensor_bytes(kind, (7, 0, values)) == 0


def test_a_shape_of_no_dimensions_is_one_value() -> None:
    assert tensor_bytes(TensorType.F32, ()) == 4


def test_sizes_do_not_wrap_for_numpy_integers() -> None:
    shape = np.array([2**63, 2], np.uint64)
    assert tensor_bytes(TensorType.F32, list(shape)) == 2**66


@pytest.mark.parametrize("values", [255, 257, 32, -256])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(values: int) -> None:
    with pytest.raises(ValueError, match=rf"{values} values .* Q6_K blocks \(256"):
        row_bytes(TensorType.Q6_K, values)
    with pytest.raises(ValueError, match=rf"{values} values"):
        tensor_bytes(TensorType.Q6_K, (256, values))


@pytest.mark.parametrize(
    ("name", "length", "groups", "size_bytes"),
    [
        ("f32", 80, 80, 320),
        ("f16", 80, 80, 160),
        ("int8", 64, 1, 64 + 2),
        ("int8", 80, 2, 80 + 4),
        ("int8", 128, 2, 128 + 4),
        ("int8", 129, 3, 129 + 6),
    ],
)
def test_a_head_in_a_cache_takes_its_values_and_a_scale_for_each_group(
    name: str, length: int, groups: int, size_bytes: int
) -> None:
    layout = cache_type(name)
    assert layout.head_bytes(length) == size_bytes
    assert layout.groups(length) == groups


def test_a_cache_type_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="a K/V cache of type q8_0: not known") as caught:
        cache_type("q8_0")
    assert caught.value.hint == "one of: f32, f16, int8"
    assert list(CACHE_TYPES) == ["f32", "f16", "int8"]
