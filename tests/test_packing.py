"""The packed layout: a bijection, with every value where the description says."""

from __future__ import annotations

import numpy as np
import packed_rows as read
import pytest
from numpy.typing import NDArray
from packed_rows import field

from strata_nb.formats import TensorType, block_layout, block_record, dequantise, row_bytes
from strata_nb.packing import GROUP_ROWS, PACKED, fields, pack, unpack
from strata_nb.quants.decoders import FP4_LEVELS, IQ4_LEVELS

T = TensorType
TYPES = sorted(PACKED)
GRID_TYPES = [T.IQ3_S, T.IQ3_XXS, T.IQ2_S, T.IQ2_XS, T.IQ2_XXS, T.IQ1_S, T.IQ1_M]
REQUIRED = {
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"),
    *("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "MXFP4"),
}
names = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


def random_rows(kind: TensorType, rows: int, values: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(rows * values)
    return rng.integers(0, 256, rows * row_bytes(kind, values), dtype=np.uint8)


def smallest_row(kind: TensorType) -> int:
    return block_layout(kind).values


def test_every_required_type_has_a_packed_form() -> None:
    assert {kind.name for kind in PACKED} == REQUIRED


@names
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 29])
@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_unpacking_gives_the_bytes_of_the_file_back(
    kind: TensorType, rows: int, blocks: int
) -> None:
    values = blocks * smallest_row(kind)
    raw = random_rows(kind, rows, values)
    packed = pack(kind, raw, rows, values)
    assert packed.size == raw.size
    assert np.array_equal(unpack(kind, packed, rows, values), raw)


@names
def test_every_bit_has_a_place_of_its_own(kind: TensorType) -> None:
    # Two bits with one place would lose a bit; unpack(pack(x)) = x then fails for one of them.
    values, rows = smallest_row(kind), 3
    bits = 8 * rows * row_bytes(kind, values)
    places = set()
    for bit in range(bits):
        raw = np.zeros(bits // 8, np.uint8)
        raw[bit // 8] = 1 << bit % 8
        (place,) = np.flatnonzero(np.unpackbits(pack(kind, raw, rows, values)))
        places.add(int(place))
    assert len(places) == bits


@names
def test_a_group_lies_where_its_rows_lay(kind: TensorType) -> None:
    values, rows = 2 * smallest_row(kind), 21
    raw = random_rows(kind, rows, values)
    whole = pack(kind, raw, rows, values)
    size = GROUP_ROWS * row_bytes(kind, values)
    for start in range(0, raw.size, size):
        part = raw[start : start + size]
        packed = pack(kind, part, part.size // row_bytes(kind, values), values)
        assert np.array_equal(whole[start : start + size], packed)


@names
def test_fields_fill_a_group_and_start_at_multiples_of_sixteen_bytes(kind: TensorType) -> None:
    values = max(64, smallest_row(kind))
    blocks = values // smallest_row(kind)
    end = 0
    for part in fields(kind).values():
        assert part.start(blocks) == end
        assert end % 16 == 0, part.name
        end += GROUP_ROWS * blocks * part.pieces * part.width
    assert end == GROUP_ROWS * row_bytes(kind, values)
    assert end % 16 == 0


def test_packing_reads_a_read_only_view_and_writes_where_it_is_told() -> None:
    raw = random_rows(T.Q6_K, 24, 512)
    before = raw.copy()
    raw.flags.writeable = False
    out = np.zeros(raw.size + 64, np.uint8)
    assert pack(T.Q6_K, raw, 24, 512, out[32:-32]).base is out
    assert np.array_equal(raw, before)
    assert not out[:32].any()
    assert not out[-32:].any()
    assert np.array_equal(out[32:-32], pack(T.Q6_K, raw, 24, 512))


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16])
def test_types_without_blocks_stay_as_they_are(kind: TensorType) -> None:
    raw = random_rows(kind, 5, 33)
    assert np.array_equal(pack(kind, raw, 5, 33), raw)
    assert np.array_equal(unpack(kind, raw, 5, 33), raw)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    raw = random_rows(T.Q4_K, 8, 256)
    with pytest.raises(ValueError, match="contiguous uint8 \\(1296,\\) is needed"):
        pack(T.Q4_K, raw, 9, 256)
    with pytest.raises(ValueError, match="whole number of Q4_K blocks"):
        pack(T.Q4_K, raw, 8, 255)
    with pytest.raises(ValueError, match="out has 1151"):
        pack(T.Q4_K, raw, 8, 256, np.empty(1151, np.uint8))
    with pytest.raises(ValueError, match="source has"):
        unpack(T.Q4_K, raw.reshape(2, -1)[:, ::2], 4, 256)


# -- values where the description says -----------------------------------------------------------


def described(
    kind: TensorType, packed: NDArray[np.uint8], rows: int, values: int
) -> NDArray[np.float32]:
    """Return the values of packed rows of a type without a grid: (rows, values)."""

    def part(name: str) -> NDArray[np.uint8]:
        return field(kind, packed, rows, values, name)

    def of_groups(scales: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.repeat(scales, values // scales.shape[1], axis=1)

    def with_high(low_bits: int, high_bits: int) -> NDArray[np.int64]:
        high = read.integers(part("high"), high_bits)
        return read.integers(part("low"), low_bits) | high << low_bits

    def pair(name: str = "scale+minimum") -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        both = read.halves(part(name)).reshape(rows, -1, 2)
        return both[..., 0], both[..., 1]

    def blocks_to_groups(
        scales: NDArray[np.float32], steps: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        spread = np.repeat(scales, steps.shape[1] // scales.shape[1], axis=1)
        return spread * steps.astype(np.float32)

    def minus(
        quants: NDArray[np.int64], scales: NDArray[np.float32], minima: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        return quants.astype(np.float32) * of_groups(scales) - of_groups(minima)

    if kind in (T.Q4_1, T.Q5_1):
        scale, minimum = pair()
        quants = read.integers(part("quants"), 4) if kind is T.Q4_1 else with_high(4, 1)
        return quants.astype(np.float32) * of_groups(scale) + of_groups(minimum)
    if kind in (T.Q4_K, T.Q5_K):
        scale, minimum = pair()
        steps, minima = read.six_bit_pairs(part("group_scales"))
        quants = read.integers(part("quants"), 4) if kind is T.Q4_K else with_high(4, 1)
        return minus(quants, blocks_to_groups(scale, steps), blocks_to_groups(minimum, minima))
    if kind is T.Q2_K:
        scale, minimum = pair()
        steps = part("group_scales").reshape(rows, -1).astype(np.int64)
        quants = read.integers(part("quants"), 2)
        scales = blocks_to_groups(scale, steps & 15)
        return minus(quants, scales, blocks_to_groups(minimum, steps >> 4))
    if kind is T.MXFP4:
        exponents = part("exponent").reshape(rows, -1).astype(np.int32)
        scale = np.ldexp(np.float32(1), exponents - 128)
        return np.array(FP4_LEVELS)[read.integers(part("quants"), 4)] * of_groups(scale)
    scale = read.halves(part("scale"))
    if kind is T.Q3_K:
        pairs = np.stack(read.six_bit_pairs(part("group_scales")), axis=-1).reshape(rows, -1)
        return (with_high(2, 1) - 4) * of_groups(blocks_to_groups(scale, pairs - 32))
    if kind is T.Q6_K:
        steps = part("group_scales").view(np.int8).reshape(rows, -1).astype(np.int64)
        return (with_high(4, 2) - 32) * of_groups(blocks_to_groups(scale, steps))
    if kind is T.IQ4_XS:
        low = read.words(part("scales_low"))[..., None] >> np.arange(0, 32, 4) & 15
        high = part("scales_high").copy().view("<u2").astype(np.int64) >> np.arange(0, 16, 2) & 3
        steps = (low | high << 4).reshape(rows, -1) - 32
        levels = np.array(IQ4_LEVELS)[read.integers(part("quants"), 4)]
        return levels * of_groups(blocks_to_groups(scale, steps))
    quants = {
        T.Q4_0: lambda: read.integers(part("quants"), 4) - 8,
        T.Q5_0: lambda: with_high(4, 1) - 16,
        T.Q8_0: lambda: part("quants").view(np.int8).reshape(rows, -1),
        T.IQ4_NL: lambda: np.array(IQ4_LEVELS)[read.integers(part("quants"), 4)],
    }[kind]()
    return quants * of_groups(scale)


@pytest.mark.parametrize(
    "kind", [kind for kind in TYPES if kind not in GRID_TYPES], ids=lambda kind: kind.name
)
def test_values_lie_where_the_description_says(kind: TensorType) -> None:
    rows, values = 11, 3 * smallest_row(kind)
    raw = random_rows(kind, rows, values)
    packed = pack(kind, raw, rows, values)
    with np.errstate(all="ignore"):  # random scales may be infinite or NaN
        found = described(kind, packed, rows, values).astype(np.float32)
    expected = dequantise(kind, raw).reshape(rows, values)
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", GRID_TYPES, ids=lambda kind: kind.name)
def test_fields_of_grid_types_keep_the_bytes_of_the_file(kind: TensorType) -> None:
    rows, values = 11, 3 * smallest_row(kind)
    raw = random_rows(kind, rows, values)
    packed = pack(kind, raw, rows, values)
    blocks = raw.view(block_record(kind)).reshape(rows, -1)
    for name, place in fields(kind).items():
        theirs = np.ascontiguousarray(blocks[name]).view(np.uint8).reshape(rows, -1, place.width)
        assert np.array_equal(field(kind, packed, rows, values, name), theirs), name
