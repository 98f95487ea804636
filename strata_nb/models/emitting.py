"""Write a model's programs: what is launched for a step, over buffers at fixed addresses.

The `Emitter` has the parts that architectures are made of, and turns them into launches.

An architecture's `emit` says which parts follow each other, and nothing about devices. It is a pure
function of the model and the places, so that a first pass with an empty `Places` tells how many
bytes of buffers there will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from strata_nb.errors import ConfigError
from strata_nb.formats import TensorType
from strata_nb.kernels.choices import CHOICE
from strata_nb.kernels.groups import groups_at
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.runs import work_bytes
from strata_nb.kernels.table import ROWS_WORDS
from strata_nb.models.description import Description
from strata_nb.models.places import Buffers, ExpertPart, Places, Programs, StepRecord
from strata_nb.models.tensors import EXPERT_PARTS
from strata_nb.packing import PACKED, UNPACKED

_FLOAT = 4  # bytes of a float32
_WORD = 8  # bytes of an int64


class Activation(NamedTuple):
    """Hold rows as what multiplies them: addresses of float32, of quantised rows, 0 for none."""

    width: int
    floats: int
    packed: int

    def for_type(self, kind: TensorType) -> int:
        """Return the form that products with a type of weights read."""
        return self.packed if kind in PACKED else self.floats


class Emitter:
    """Collect the launches of a model.

    packed_row_bytes   bytes of a quantised row of so many values, on this backend
    bytes_beside       what buffers of such rows have behind them, for each value
    chooses_tokens     whether this backend draws tokens
    attends_in_runs    whether its attention needs work space for runs of cells
    gathers_rows       whether rows are brought into the order of experts, or read where they are
    """

    def __init__(
        self,
        model: Description,
        places: Places,
        buffers: Buffers,
        *,
        max_rows: int,
        head_rows: int,
        packed_row_bytes: Callable[[int], int],
        bytes_beside: int,
        chooses_tokens: bool,
        attends_in_runs: bool,
        gathers_rows: bool,
    ) -> None:
        self.model = model
        self._places = places
        self._buffers = buffers
        self._max_rows, self._head_rows = max_rows, head_rows
        self._packed_row_bytes = packed_row_bytes
        self._bytes_beside = bytes_beside
        self._chooses_tokens = chooses_tokens
        self._attends_in_runs = attends_in_runs
        self._gathers_rows = gathers_rows
        self._named: dict[str, tuple[int, int]] = {}  # address and bytes
        self._launches: list[Launch] = []
        self._layer_ends: list[int] = []
        self._chosen: list[int] = []
        take = buffers.take
        self._record = StepRecord(
            take(_WORD * (ROWS_WORDS + model.experts + model.experts % 2)),  # read in pairs
            take(_WORD * ROWS_WORDS),
            take(_WORD * max_rows),
            take(_WORD * max_rows),
            take(_WORD * max_rows),
            take(_WORD * head_rows),
        )
        # What is sent for a window lies together, and what comes back.
        self._choices = self._drawn = 0
        if chooses_tokens:
            self._choices = self._buffer("choices", CHOICE.itemsize * head_rows)
            self._drawn = self._buffer("drawn", _WORD * head_rows)
        for layer in range(len(places.experts)):
            self._buffer(f"blk.{layer}.chosen", _WORD * model.top_k * max_rows)
        self._rows = self._record.rows
        self._x = take(_FLOAT * model.width * max_rows)

    # The parts of a model, in the order of a step.

    def embed(self) -> None:
        """x = the embedding of the rows' tokens."""
        weight = self._places.tensors["token_embd.weight"]
        self._check_kind("token_embd", weight.kind)
        self._add(
            "embed",
            "token_embd",
            {
                "rows": self._rows,
                "tokens": self._record.tokens,
                "drawn": self._drawn,
                "weight": weight.address,
                "x": self._x,
                "width": self.model.width,
                "vocabulary": self.model.vocab_size,
            },
            variant=weight.kind,
        )

    def attention(self, layer: int, *, norms: Literal["none", "heads", "rows"] = "none") -> None:
        """x += attention of a layer; its queries and keys are normalised by head, by row or not."""
        model, kv, blk = self.model, self._places.kv, f"blk.{layer}"
        names = [f"{blk}.attn_{part}" for part in "qkv"]
        h = self._normed(f"{blk}.attn_norm", names)
        widths = (
            model.heads * model.key_length,
            model.kv_heads * model.key_length,
            model.kv_heads * model.value_length,
        )
        q, k, v = (self._floats(part, width) for part, width in zip("qkv", widths, strict=True))
        for name, target in zip(names, (q, k, v), strict=True):
            self._linear(h, name, target, waits=target == q)
        for part, target, heads in (("q", q, model.heads), ("k", k, model.kv_heads)):
            if norms != "none":
                parts, width = (heads, model.key_length)
                if norms == "rows":
                    parts, width = 1, heads * model.key_length
                self._norm(
                    f"{blk}.attn_{part}_norm",
                    {"x": target, "out": target, "packed": 0, "parts": parts, "width": width},
                    waits=part == "q",
                )
        rotation = {
            "rows": self._rows,
            "positions": self._record.positions,
            "table": self._places.rope_table,
            "planes": model.rope_dims // 2,
            "halves": int(model.rope_style == "halves"),
        }
        self._add(
            "rope",
            f"{blk}.rope",
            {**rotation, "x": q, "heads": model.heads, "length": model.key_length},
        )
        stored = {
            "blocks": kv.table,
            "table_width": kv.table_width,
            "k_offset": kv.key_offsets[layer],
            "v_offset": kv.value_offsets[layer],
            "key_length": model.key_length,
            "value_length": model.value_length,
            "sequences": self._record.sequences,
        }
        types = (kv.key_type, kv.value_type)
        self._add(
            "kv_append",
            f"{blk}.kv_append",
            {**rotation, **stored, "k": k, "v": v, "heads": model.kv_heads},
            variant=types,
            waits=False,
        )
        mixed = self._floats("mixed", model.heads * model.value_length)
        work = 0
        if self._attends_in_runs:
            size = work_bytes(self._max_rows, model.heads, kv.table_width, model.value_length)
            work = self._buffer("runs", size)
        self._add(
            "attention",
            f"{blk}.attention",
            {
                **stored,
                "rows": self._rows,
                "positions": self._record.positions,
                "q": q,
                "out": mixed,
                "work": work,
                "heads": model.heads,
                "kv_heads": model.kv_heads,
                "scale": float(model.key_length**-0.5),
            },
            variant=types,
        )
        name = f"{blk}.attn_output"
        rows = self._quantised("mixed", mixed, model.heads * model.value_length, name)
        self._linear(rows, name, self._x, adds=True)

    def feed_forward(self, layer: int) -> None:
        """x += down(silu(gate x h) * (up x h)), h the normed x of a layer."""
        blk = f"blk.{layer}"
        h = self._normed(f"{blk}.ffn_norm", [f"{blk}.ffn_gate", f"{blk}.ffn_up"])
        inner = self._gated(h, blk, "", self.model.ff_width)
        self._linear(inner, f"{blk}.ffn_down", self._x, adds=True)
        self._end_layer()

    def experts(self, layer: int, *, renormalise: bool, shared: bool = False) -> None:
        """x += the chosen experts' outputs times their shares, and the shared expert's.

        renormalise   the shares of a row are made to add up to 1
        """
        blk = f"blk.{layer}"
        gate, up, down = (self._places.experts[layer].parts[part] for part in EXPERT_PARTS)
        for name, part in zip(EXPERT_PARTS, (gate, up, down), strict=True):
            self._check_kind(f"{blk}.{name}", part.kind)
        self._check_same_form(layer, gate.kind, up.kind)
        others = [f"{blk}.ffn_gate_inp"]
        if shared:
            others += [f"{blk}.ffn_{part}_shexp" for part in ("gate", "up", "gate_inp")]
        h = self._normed(f"{blk}.ffn_norm", others, extra=[gate.kind])
        self._route(layer, h, renormalise)
        self._routed(layer, h, gate, up, down)
        if shared:
            self._shared_expert(layer, h)
        self._end_layer()

    def finish(self) -> Programs:
        """Add the head, and what draws tokens; return everything that was emitted."""
        body, self._launches = tuple(self._launches), []
        name = "output" if "output.weight" in self._places.tensors else "token_embd"
        kind = self._places.tensors[f"{name}.weight"].kind
        self._rows = self._record.wanted
        width, rows = self.model.width, self._head_rows
        h = self._activation("head", width, [kind], rows)
        self._norm(
            "output_norm",
            {
                "index": self._record.wanted_rows,
                "x": self._x,
                "out": h.floats,
                "packed": h.packed,
                "parts": 1,
                "width": width,
            },
        )
        logits = self._floats("logits", self.model.vocab_size, rows)
        self._linear(h, name, logits)
        head, self._launches = tuple(self._launches), []
        if self._chooses_tokens:
            self._choice(logits)
        return Programs(
            body,
            head,
            tuple(self._launches),
            tuple(self._layer_ends),
            self._record,
            tuple(self._chosen),
            logits,
            self._choices,
            self._drawn,
            self._max_rows,
            rows,
        )

    def _choice(self, logits: int) -> None:
        """Draw a token for each row of the head."""
        vocabulary, rows = self.model.vocab_size, self._head_rows
        work = self._buffer("choice_work", 2 * _FLOAT * vocabulary * rows)
        places = {
            "logits": logits,
            "choices": self._choices,
            "work": work,
            "chosen": self._drawn,
        }
        self._add("sample", "choice", {"rows": self._rows, **places, "vocabulary": vocabulary})

    # What the parts are made of.

    def _route(self, layer: int, h: Activation, renormalise: bool) -> None:
        """Choose the rows' experts, sort the choices by expert, and gather their rows."""
        model, blk = self.model, f"blk.{layer}"
        choices = model.top_k * self._max_rows
        logits = self._floats("router", model.experts)
        self._linear(h, f"{blk}.ffn_gate_inp", logits)
        chosen = self._buffer(f"{blk}.chosen", _WORD * choices)
        self._chosen.append(chosen)
        counts = {"rows": self._rows, "experts": model.experts, "top_k": model.top_k}
        self._add(
            "router_top_k",
            f"{blk}.router_top_k",
            {
                **counts,
                "logits": logits,
                "positions": self._record.positions,
                "forced": self._places.experts[layer].forced,
                "chosen": chosen,
                "shares": self._buffer("shares", _FLOAT * choices),
                "renormalise": int(renormalise),
            },
        )
        experts = self._places.experts[layer]
        self._add(
            "expert_group",
            f"{blk}.expert_group",
            {
                **counts,
                "chosen": chosen,
                "tier": experts.tier,
                "use": experts.use,
                "tally": experts.tally,
                "starts": self._starts,
                "members": self._buffer("members", _WORD * choices),
                "places": self._buffer("places", _WORD * choices),
                "homes": experts.homes,
                "seen": experts.seen,
                "plan": experts.plan,
            },
        )

    @property
    def _starts(self) -> int:
        return self._buffer("starts", _WORD * (self.model.experts + 1))

    def _routed(
        self, layer: int, h: Activation, gate: ExpertPart, up: ExpertPart, down: ExpertPart
    ) -> None:
        model, blk = self.model, f"blk.{layer}"
        choices, width, inner_width = model.top_k * self._max_rows, model.width, model.expert_width
        counts = {"rows": self._rows, "experts": model.experts, "top_k": model.top_k}
        x, row_bytes = h.for_type(gate.kind), self._row_bytes(gate.kind, width)
        if self._gathers_rows:
            gathered = self._buffer(f"gathered.{row_bytes}", row_bytes * choices)
        else:
            gathered = self._buffer("gathered", groups_at(0, choices, model.experts).end)
        members, addresses = self._named["members"][0], self._places.experts[layer].addresses
        source = {
            **counts,
            "x": x,
            "starts": self._starts,
            "members": members,
            "gathered": gathered,
            "row_bytes": row_bytes,
        }
        self._add("expert_gather", f"{blk}.expert_gather", source)
        inner = self._activation("inner", inner_width, [down.kind], choices, are_choices=True)
        self._add(
            "expert_gate_up",
            f"{blk}.expert_gate_up",
            {
                **source,
                "addresses": addresses,
                "inner": inner.floats,
                "other": self._buffer("other", _FLOAT * inner_width * choices),
                "packed": inner.packed,
                "gate_offset": gate.offset,
                "up_offset": up.offset,
                "values": width,
                "outputs": inner_width,
            },
            variant=(gate.kind, up.kind),
        )
        self._add(
            "expert_down",
            f"{blk}.expert_down",
            {
                **counts,
                "starts": self._starts,
                "places": self._named["places"][0],
                "inner": inner.for_type(down.kind),
                "addresses": addresses,
                "shares": self._named["shares"][0],
                "products": self._buffer("products", _FLOAT * width * choices),
                "y": self._x,
                "down_offset": down.offset,
                "values": inner_width,
                "outputs": width,
            },
            variant=down.kind,
        )

    def _shared_expert(self, layer: int, h: Activation) -> None:
        """x += sigmoid(gate_inp x h) * (the shared expert's output)."""
        blk = f"blk.{layer}"
        gate = self._floats("shared_gate", 1)
        self._linear(h, f"{blk}.ffn_gate_inp_shexp", gate)
        inner = self._gated(h, blk, "_shexp", self.model.shared_width)
        shared = self._floats("shared", self.model.width)
        self._linear(inner, f"{blk}.ffn_down_shexp", shared)
        self._add(
            "gated_add",
            f"{blk}.shared_expert",
            {
                "rows": self._rows,
                "gate": gate,
                "x": shared,
                "y": self._x,
                "width": self.model.width,
            },
        )

    def _gated(self, h: Activation, blk: str, kind: str, width: int) -> Activation:
        """Return silu(gate x h) * (up x h), `width` values, in the form that `down` reads."""
        tensors = self._places.tensors
        gate, up, down = (f"{blk}.ffn_{part}{kind}" for part in ("gate", "up", "down"))
        left, right = self._floats("gate", width), self._floats("up", width)
        self._linear(h, gate, left)
        self._linear(h, up, right, waits=False)
        inner = self._activation("gated", width, [tensors[f"{down}.weight"].kind])
        self._add(
            "silu_mul",
            f"{gate}.silu",
            {
                "rows": self._rows,
                "gate": left,
                "up": right,
                "out": inner.floats,
                "packed": inner.packed,
                "values": width,
            },
        )
        return inner

    def _normed(
        self, name: str, consumers: Iterable[str], extra: Iterable[TensorType] = ()
    ) -> Activation:
        """Return x normed, in the forms that products with the consumers' weights read."""
        kinds = [self._places.tensors[f"{one}.weight"].kind for one in consumers]
        h = self._activation("h", self.model.width, [*kinds, *extra])
        self._norm(
            name,
            {
                "x": self._x,
                "out": h.floats,
                "packed": h.packed,
                "parts": 1,
                "width": self.model.width,
            },
        )
        return h

    def _norm(self, name: str, values: Mapping[str, int], *, waits: bool = True) -> None:
        weight = self._places.tensors[f"{name}.weight"].address
        arguments = {"rows": self._rows, "index": 0, "weight": weight, **values}
        self._add("rms_norm", name, {**arguments, "eps": float(self.model.eps)}, waits=waits)

    def _quantised(self, name: str, floats: int, width: int, consumer: str) -> Activation:
        """Return float32 rows in the form that the consumer reads."""
        if self._places.tensors[f"{consumer}.weight"].kind not in PACKED:
            return Activation(width, floats, 0)
        packed = self._packed(name, width, self._max_rows, beside=self._bytes_beside)
        self._add(
            "quantise",
            f"{consumer}.quantise",
            {"rows": self._rows, "x": floats, "packed": packed, "times": 1, "values": width},
        )
        return Activation(width, floats, packed)

    def _linear(
        self, x: Activation, name: str, y: int, *, adds: bool = False, waits: bool = True
    ) -> None:
        weight = self._places.tensors[f"{name}.weight"]
        bias = self._places.tensors.get(f"{name}.bias")
        self._check_kind(name, weight.kind)
        outputs = weight.shape[0] if len(weight.shape) > 1 else 1
        self._add(
            "linear",
            name,
            {
                "rows": self._rows,
                "x": x.for_type(weight.kind),
                "weight": weight.address,
                "bias": 0 if bias is None else bias.address,
                "y": y,
                "values": x.width,
                "outputs": outputs,
                "add": int(adds),
            },
            variant=weight.kind,
            waits=waits,
        )

    def _activation(
        self,
        name: str,
        width: int,
        kinds: Sequence[TensorType],
        rows: int | None = None,
        *,
        are_choices: bool = False,
    ) -> Activation:
        """Return buffers for rows in the forms that products with these types read.

        are_choices   there are floats in any case, and nothing is kept beside quantised rows: where
                      kernels read another form, they find it in place of the floats
        """
        rows = self._max_rows if rows is None else rows
        floats = packed = 0
        if are_choices or any(kind not in PACKED for kind in kinds):
            floats = self._floats(name, width, rows)
        if any(kind in PACKED for kind in kinds):
            packed = self._packed(
                name, width, rows, beside=0 if are_choices else self._bytes_beside
            )
        return Activation(width, floats, packed)

    def _packed(self, name: str, width: int, rows: int, *, beside: int) -> int:
        """Return a buffer for quantised rows, and so many bytes a value behind them."""
        each = self._packed_row_bytes(width) + beside * width
        return self._buffer(f"{name}.packed", each * rows)

    def _row_bytes(self, kind: TensorType, width: int) -> int:
        return self._packed_row_bytes(width) if kind in PACKED else _FLOAT * width

    def _floats(self, name: str, width: int, rows: int | None = None) -> int:
        return self._buffer(name, _FLOAT * width * (self._max_rows if rows is None else rows))

    def _buffer(self, name: str, size: int) -> int:
        """Return the buffer of a name: all layers use the same, so all want the same size."""
        if name not in self._named:
            self._named[name] = self._buffers.take(size), size
        address, taken = self._named[name]
        if taken != size:
            raise AssertionError(f"buffer {name} has {taken:,} bytes, and {size:,} are wanted")
        return address

    def _add(
        self,
        kernel: str,
        label: str,
        values: Mapping[str, int | float],
        *,
        variant: object = None,
        waits: bool = True,
    ) -> None:
        self._launches.append(launch(kernel, values, variant=variant, waits=waits, label=label))

    def _end_layer(self) -> None:
        self._layer_ends.append(len(self._launches))

    def _check_kind(self, name: str, kind: TensorType) -> None:
        if kind not in PACKED and kind not in UNPACKED:
            raise ConfigError(
                f"{name}.weight is of type {kind.name}, for which devices have no kernel",
                hint="--device reference can run the file; or quantise it to another type",
            )

    def _check_same_form(self, layer: int, gate: TensorType, up: TensorType) -> None:
        if (gate in PACKED) != (up in PACKED):
            raise ConfigError(
                f"blk.{layer}: ffn_gate_exps is {gate.name} and ffn_up_exps {up.name}: only both "
                "quantised or both not are supported",
                hint="--device reference can run the file; or quantise it again",
            )
