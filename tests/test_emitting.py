"""Programs that models emit, looked through launch by launch; nothing is compiled or run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from emitted_models import CASES, MAX_ROWS, SHAPES, make
from kernel_memory import CONTEXT, EXTENTS, MAY_BE_ZERO, WRITTEN
from make_model import make_model
from numpy.typing import NDArray

from strata_nb import device_layout, device_opening, models
from strata_nb.addresses import memory_view
from strata_nb.device_model import DeviceModel
from strata_nb.device_sizes import ROPE_FACTORS
from strata_nb.errors import ConfigError
from strata_nb.fill_plans import plan_type
from strata_nb.formats import TensorType, tensor_bytes
from strata_nb.gguf import GGUFFile
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.kernels.gpu.early_choice import posts_at
from strata_nb.kernels.host.threads import PreparedProgram
from strata_nb.kernels.program import Launch, Program
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.table import KERNELS
from strata_nb.models.places import Buffers, Places, Programs
from strata_nb.models.tensors import EXPERT_PARTS, is_expert
from strata_nb.options import Options
from strata_nb.shared_tables import SharedTable

T = TensorType


class RecordingBackend:
    """Keep programs instead of compiling and running them."""

    name, device, has_slots, threads = "recording", 0, False, 1
    of_host, most_rows, outside_bytes, reserve_bytes = True, None, 0, 0
    batches_apart, gathers_rows, pools = False, True, False
    warnings: Sequence[str] = ()
    bytes_beside = 0

    def __init__(self, *, chooses_tokens: bool = True, attends_in_runs: bool = True) -> None:
        self.chooses_tokens, self.attends_in_runs = chooses_tokens, attends_in_runs
        self.fills = chooses_tokens
        self.driver = HostDriver(parse_host_devices("host"))

    def packed_row_bytes(self, values: int) -> int:
        return row_bytes(values)

    def compile(
        self, programs: Sequence[Program], progress: object, say: object, **_: object
    ) -> None:
        pass

    def prepare(self, programs: Sequence[Program]) -> list[PreparedProgram]:
        return [PreparedProgram([]) for _ in programs]

    def share(self, table: SharedTable, *, is_written: bool = False) -> int:
        return int(table.array.ctypes.data)

    def send(self, address: int, array: NDArray[Any]) -> None:
        memory_view(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        raise AssertionError("nothing is run here")

    def run(
        self, program: PreparedProgram, rows: int, first: int = 0, last: int | None = None
    ) -> None:
        raise AssertionError("nothing is run here")

    def wait(self) -> None:
        raise AssertionError("nothing is run here")

    def flights(self, sent_bytes: int, fetched_bytes: int) -> Any:
        return object()

    def close(self) -> None:
        self.driver.close()


class RecordedBuffers(Buffers):
    """Remember each buffer: its address and the bytes that were asked for."""

    def __init__(self, base: int = 0) -> None:
        super().__init__(base)
        self.taken: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        address = super().take(size)
        self.taken.append((address, size))
        return address


class Emission(NamedTuple):
    """One call of `emit_programs`: what it was given and what it returned."""

    places: Places
    buffers: RecordedBuffers
    programs: Programs


class Emitted(NamedTuple):
    """A model that was opened: its emissions, the dry one first, and where its things are."""

    model: DeviceModel
    file: GGUFFile
    emissions: list[Emission]

    @property
    def places(self) -> Places:
        return self.emissions[-1].places

    @property
    def buffers(self) -> RecordedBuffers:
        return self.emissions[-1].buffers

    @property
    def programs(self) -> Programs:
        return self.emissions[-1].programs

    @property
    def launches(self) -> Program:
        return self.programs.body + self.programs.head + self.programs.choice

    def rows(self, one: Launch) -> int:
        """Return the most rows that a launch may be for."""
        places = {
            self.programs.record.rows: self.programs.max_rows,
            self.programs.record.wanted: self.programs.head_rows,
        }
        return places[one.arguments[0]]


@contextmanager
def opened(path: Path, **asked: bool) -> Iterator[Emitted]:
    """Open a model on a recording backend."""
    with ExitStack() as stack:
        emissions: list[Emission] = []
        real = models.emit_programs

        def recorded(description: Any, places: Places, buffers: Any, **sizes: Any) -> Programs:
            programs = real(description, places, buffers, **sizes)
            emissions.append(Emission(places, buffers, programs))
            return programs

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(models, "emit_programs", recorded)
        for module in (device_layout, device_opening):
            patch.setattr(module, "Buffers", RecordedBuffers)
        file = stack.enter_context(GGUFFile.open(path))
        backend = RecordingBackend(**asked)
        stack.callback(backend.close)
        model = DeviceModel(
            file,
            models.describe(file),
            Options(path),
            CONTEXT,
            MAX_ROWS,
            backend,
            progress=None,
            say=lambda line: None,
        )
        stack.callback(model.close)
        yield Emitted(model, file, emissions)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def emitted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Emitted]:
    path = make(tmp_path_factory.mktemp("model"), *request.param)
    with opened(path) as found:
        yield found


def arguments_of(one: Launch) -> dict[str, int]:
    names = [argument.name for argument in KERNELS[one.kernel].arguments]
    return dict(zip(names, one.arguments, strict=True))


def addresses_of(one: Launch) -> dict[str, int]:
    """Return the arguments that are addresses, but those that are 0."""
    words = arguments_of(one)
    return {
        argument.name: words[argument.name]
        for argument in KERNELS[one.kernel].arguments
        if argument.kind == "address" and words[argument.name]
    }


def test_a_first_emission_over_no_places_takes_the_bytes_of_the_real_one(emitted: Emitted) -> None:
    dry, real = emitted.emissions
    assert dry.buffers.size_bytes == real.buffers.size_bytes > 0
    base = real.buffers.taken[0][0]
    moved = [(address + base, size) for address, size in dry.buffers.taken]
    assert moved == real.buffers.taken


def test_buffers_are_aligned_and_do_not_overlap(emitted: Emitted) -> None:
    taken = sorted(emitted.buffers.taken)
    assert all(address % 256 == 0 and size > 0 for address, size in taken)
    ends = [address + size for address, size in taken]
    assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
    assert ends[-1] <= taken[0][0] + emitted.buffers.size_bytes


def test_an_address_is_zero_only_where_the_table_allows_it(emitted: Emitted) -> None:
    for one in emitted.launches:
        words = arguments_of(one)
        for argument in KERNELS[one.kernel].arguments:
            if argument.kind == "address" and (one.kernel, argument.name) not in MAY_BE_ZERO:
                assert words[argument.name], (one.label, argument.name)
        if one.kernel in ("rms_norm", "silu_mul"):
            assert words["out"] or words["packed"], one.label


def regions(emitted: Emitted) -> dict[int, int]:
    """Return the bytes at every address that a launch may name: buffers, tensors, tables."""
    found = dict(emitted.buffers.taken)
    for tensor in emitted.places.tensors.values():
        found[tensor.address] = tensor_bytes(tensor.kind, tensor.shape)
    arena = emitted.model.arena
    tables = [emitted.model.kv.table, arena.tally]
    for layer in range(emitted.model.description.layers if emitted.places.experts else 0):
        tables += [arena.expert_address[layer], arena.expert_tier[layer], arena.use[layer]]
    found |= {table.ctypes.data: table.nbytes for table in tables}
    experts = emitted.model.description.experts
    for layer in emitted.places.experts:
        found |= {layer.homes: 8 * experts, layer.seen: 8 * experts}
        found[layer.plan] = plan_type(experts).itemsize
    return found


def test_launches_reach_no_further_than_their_buffers_tensors_and_tables(emitted: Emitted) -> None:
    places = regions(emitted)
    for one in emitted.launches:
        sizes = EXTENTS[one.kernel](arguments_of(one), emitted.rows(one), one.variant)
        for name, address in addresses_of(one).items():
            size = 8 if name == "rows" else sizes[name]
            assert 0 < size <= places[address], (one.label, one.kernel, name)


def written_by(one: Launch) -> set[int]:
    names = WRITTEN[one.kernel]
    return {address for name, address in addresses_of(one).items() if name in names}


def test_only_buffers_and_counts_are_written(emitted: Emitted) -> None:
    may_be = {address for address, _ in emitted.buffers.taken}
    for experts in emitted.places.experts:
        may_be |= {experts.use, experts.tally, experts.seen}
    record = set(emitted.programs.record)
    for one in emitted.launches:
        assert written_by(one) <= may_be - record - {emitted.places.rope_table}, one.label


def test_launches_that_do_not_wait_touch_nothing_that_those_beside_them_write(
    emitted: Emitted,
) -> None:
    programs = emitted.programs
    for program in (programs.body, programs.head, programs.choice):
        beside: list[Launch] = []
        for one in program:
            beside = [] if one.waits else beside
            for other in beside:
                both = (one, other), (other, one)
                for left, right in both:
                    clash = written_by(left) & set(addresses_of(right).values())
                    assert not clash, (left.label, right.label)
                kinds = {one.kernel, other.kernel}
                assert kinds != {"kv_append", "attention"}, one.label
            beside.append(one)


def test_a_buffer_is_written_before_it_is_read(emitted: Emitted) -> None:
    buffers = {address for address, _ in emitted.buffers.taken}
    known = {*emitted.programs.record, emitted.places.rope_table}
    known |= {emitted.programs.choices, emitted.programs.drawn}
    known |= {place for one in emitted.places.experts for place in (one.homes, one.seen, one.plan)}
    for one in emitted.launches:
        words, names = addresses_of(one), WRITTEN[one.kernel]
        reads = {address for name, address in words.items() if name not in names}
        if one.kernel in ("rope", "expert_down", "gated_add") or arguments_of(one).get("add"):
            reads |= {words[name] for name in ("x", "y") if name in words}
        assert reads & buffers <= known, one.label
        known |= written_by(one)
    # No buffer is taken for nothing.
    assert known >= buffers
    used = {address for one in emitted.launches for address in addresses_of(one).values()}
    assert used >= buffers


def test_behind_a_number_of_rows_are_words_in_which_a_card_counts_and_posts(
    emitted: Emitted,
) -> None:
    sizes, record = dict(emitted.buffers.taken), emitted.programs.record
    experts = emitted.model.description.experts
    for counted in {addresses_of(one)["rows"] for one in emitted.launches}:
        posts = experts + experts % 2  # they are read in pairs
        end = posts_at(counted) + (8 * posts if counted == record.rows else 0)
        assert counted in (record.rows, record.wanted)
        assert counted + sizes[counted] == end


def test_every_dense_tensor_is_named_once_and_a_tied_head_twice(emitted: Emitted) -> None:
    named = Counter(
        address for one in emitted.launches for address in set(addresses_of(one).values())
    )
    tied = emitted.model.description.tied_head
    tensors = emitted.places.tensors
    wanted = {name for name in emitted.file.tensors if not is_expert(name)} - {ROPE_FACTORS}
    assert set(tensors) == wanted
    found = {name: named[tensor.address] for name, tensor in tensors.items()}
    assert found == {name: 2 if tied and name == "token_embd.weight" else 1 for name in tensors}


def test_a_tensor_is_launched_under_its_own_name_and_type(emitted: Emitted) -> None:
    for one in emitted.launches:
        words = arguments_of(one)
        if one.kernel in ("linear", "embed"):
            tensor = emitted.places.tensors[f"{one.label}.weight"]
            assert (words["weight"], one.variant) == (tensor.address, tensor.kind)


def test_every_stack_of_experts_is_read_once_and_lies_within_its_blob(emitted: Emitted) -> None:
    stacks = {name for name in emitted.file.tensors if is_expert(name)}
    arena = emitted.model.arena
    layers = {arena.expert_address[n].ctypes.data: n for n in range(len(arena.expert_address))}
    found = Counter[str]()
    for one in emitted.launches:
        words = arguments_of(one)
        for part, kernel in zip(EXPERT_PARTS, ("gate", "up", "down"), strict=True):
            if f"{kernel}_offset" not in words:
                continue
            layer = layers[words["addresses"]]
            assert one.label.startswith(f"blk.{layer}.")
            place = emitted.places.experts[layer].parts[part]
            kinds = one.variant if isinstance(one.variant, tuple) else (None, None, one.variant)
            assert place.kind is kinds[EXPERT_PARTS.index(part)]
            assert words[f"{kernel}_offset"] == place.offset
            size = tensor_bytes(place.kind, (words["outputs"], words["values"]))
            assert place.offset + size <= arena.layout.blob_bytes[layer]
            found[f"blk.{layer}.{part}.weight"] += 1
    assert found == Counter(stacks)


def test_each_layer_stores_and_reads_its_own_part_of_a_block(emitted: Emitted) -> None:
    layout, layers = emitted.model.kv.layout, emitted.model.description.layers
    for kernel in ("kv_append", "attention"):
        places = [
            (arguments_of(one)["k_offset"], arguments_of(one)["v_offset"])
            for one in emitted.launches
            if one.kernel == kernel
        ]
        assert places == [
            (layout.part_offset(n, "k"), layout.part_offset(n, "v")) for n in range(layers)
        ]


def test_the_body_is_cut_at_the_ends_of_its_layers(emitted: Emitted) -> None:
    programs = emitted.programs
    ends = programs.layer_ends
    assert len(ends) == emitted.model.description.layers
    assert list(ends) == sorted(set(ends))
    assert ends[-1] == len(programs.body)
    starts = (1, *ends)  # the embedding comes before the first layer
    for layer, (first, last) in enumerate(zip(starts, ends, strict=False)):
        labels = {one.label for one in programs.body[first:last]}
        assert all(label.startswith(f"blk.{layer}.") for label in labels)
    assert [one.kernel for one in programs.head] == ["rms_norm", "linear"]


def test_choices_of_all_layers_are_kept_until_the_end_of_a_step(emitted: Emitted) -> None:
    chosen = emitted.programs.chosen
    layers = emitted.model.description.layers if emitted.model.description.experts else 0
    assert len(set(chosen)) == len(chosen) == layers
    writers = [one for one in emitted.launches if set(chosen) & written_by(one)]
    assert [arguments_of(one)["chosen"] for one in writers] == list(chosen)


def test_logits_are_where_the_head_writes_them(emitted: Emitted) -> None:
    assert arguments_of(emitted.programs.head[-1])["y"] == emitted.programs.logits
    assert (emitted.programs.max_rows, emitted.programs.head_rows) == (MAX_ROWS, 32)


def test_tokens_are_drawn_from_the_logits_of_the_head(emitted: Emitted) -> None:
    (one,) = emitted.programs.choice
    words = arguments_of(one)
    assert one.kernel == "sample"
    assert words["rows"] == emitted.programs.record.wanted
    places = words["logits"], words["choices"], words["chosen"]
    programs = emitted.programs
    assert places == (programs.logits, programs.choices, programs.drawn)
    assert words["vocabulary"] == emitted.model.description.vocab_size


def test_where_the_host_draws_tokens_nothing_is_emitted_for_it(tmp_path: Path) -> None:
    path, sizes = make(tmp_path, *CASES[0]), []
    for chooses_tokens in (False, True):
        with opened(path, chooses_tokens=chooses_tokens) as found:
            programs = found.programs
            there = [bool(one) for one in (programs.choice, programs.choices, programs.drawn)]
            assert there == [chooses_tokens] * 3
            sizes.append(found.buffers.size_bytes)
    assert sizes[0] < sizes[1]


def test_only_a_backend_that_attends_in_runs_gets_space_for_them(tmp_path: Path) -> None:
    path, sizes = make(tmp_path, *CASES[0]), []
    for attends_in_runs in (False, True):
        with opened(path, attends_in_runs=attends_in_runs) as found:
            places = [
                arguments_of(one)["work"] for one in found.launches if one.kernel == "attention"
            ]
            assert [bool(place) for place in places] == [attends_in_runs] * len(places)
            assert len(set(places)) == 1  # all layers use the same
            sizes.append(found.buffers.size_bytes)
    assert sizes[0] < sizes[1]


def test_what_is_kept_beside_quantised_rows_keeps_no_row_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "qwen3moe", "packed")
    with opened(path) as found:
        of_rows = found.buffers.size_bytes
    monkeypatch.setattr(RecordingBackend, "bytes_beside", 2)
    with opened(path) as found:
        assert found.buffers.size_bytes > of_rows
        model = found.model.description
        # Before products of a layer, before `attn_output`, and before the head; not within experts.
        kept = (model.width + model.heads * model.value_length) * MAX_ROWS + model.width * 32
        assert found.buffers.size_bytes - of_rows <= 2 * kept + 3 * 256  # each may be rounded up
        of_experts = [one for one in found.launches if one.kernel == "expert_gate_up"]
        assert of_experts
        for one in of_experts:
            given = arguments_of(one)
            assert given["row_bytes"] == row_bytes(given["values"])


def test_models_use_every_kernel_of_the_table(emitted: Emitted) -> None:
    used = {one.kernel for one in emitted.launches}
    dense = {"embed", "rms_norm", "linear", "rope", "kv_append", "attention", "sample"}
    routed = {kernel for kernel in KERNELS if kernel.startswith(("router_", "expert_"))}
    expected = dense | (routed if emitted.model.description.experts else {"silu_mul"})
    if emitted.model.description.shared_width:
        expected |= {"silu_mul", "gated_add"}
    assert used - {"quantise"} == expected
    packed = emitted.places.tensors["blk.0.attn_output.weight"].kind is not T.F32
    assert ("quantise" in used) == packed


def test_experts_whose_gate_and_up_read_different_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_model(path, SHAPES["qwen3moe"], rules=[("*ffn_up*", T.F16), ("*", T.Q4_0)])
    said = "ffn_gate_exps is Q4_0 and ffn_up_exps F16: only both quantised or both not"
    with pytest.raises(ConfigError, match=said), opened(path):
        pass
