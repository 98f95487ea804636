"""The contract between models and backends: every kernel, its arguments, and what it computes.

A model says what is to be computed as a list of launches of these kernels (`program.py`); each
backend has a function for every one. Arguments are plain words: addresses, integers, and one kind
of float, so that a launch can be packed once and repeated.

Buffers. Rows come first and lie one behind the other without gaps: `x` (rows, width) is float32. A
*packed* buffer holds the same rows quantised for products with quantised weights, in the form of
the backend. `rows` is the address of a number of rows (int64), because a program is made once for
all steps: a kernel works on as many rows as that says when it runs. The words behind it, up to
`ROWS_WORDS` in all, are 0 when a launch begins and when it has ended: in between backends count
there. Behind them are as many words as a layer has experts, 0 when a step begins, which are
backends' own. A zero address means "none" where the text allows it.

Variants. A kernel that reads weights exists once for each type of weights, one that reads or writes
the K/V once for each pair of types of keys and values.

Bits. What a row becomes depends on that row alone (in attention: and on the cells it sees): never
on other rows of the step, their number, or the number of threads. Sums have a fixed order.

To add a kernel: its line here, its function in each backend, and its plain form in numpy
(`tests/kernel_references.py`; in `reference.py` where the judge needs the formula too).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["address", "integer", "float"]
Axis = Literal["weights", "keys_values", "gate_up"]

ROWS_WORDS = 16


class Argument(NamedTuple):
    """Name an argument; in the table `*name` is an address, `name` an integer, `~name` a float."""

    name: str
    kind: Kind


class Kernel(NamedTuple):
    """Describe a kernel: what it exists in variants of, and its arguments in order."""

    name: str
    axis: Axis | None
    arguments: tuple[Argument, ...]


def _kernel(name: str, arguments: str, axis: Axis | None = None) -> Kernel:
    kinds: dict[str, Kind] = {"*": "address", "~": "float"}
    words = arguments.split()
    found = tuple(Argument(word.lstrip("*~"), kinds.get(word[0], "integer")) for word in words)
    return Kernel(name, axis, found)


_KERNELS = (
    # x[row] = row tokens[row] of weight (vocabulary, width): tokens int64 (rows,), x float32 (rows,
    # width), to the bit what `formats.dequantise` gives. A token -1 - n stands for drawn[n], int64:
    # what the last `sample` drew, or token 0 where it could draw none; drawn 0: no such tokens.
    _kernel("embed", "*rows *tokens *drawn *weight *x width vocabulary", "weights"),
    # Each row is cut into `parts` of `width` values, and each part divided by its root mean square
    # and multiplied by weight float32 (width,):
    #   out[row] = norm(x[index[row]])        index int64 (rows,), 0: row itself
    # out float32 (rows, parts * width), may be x where there is no index; 0: not wanted. packed,
    # 0: not wanted.
    _kernel("rms_norm", "*rows *index *x *weight *out *packed parts width ~eps"),
    # packed = x quantised, x float32 (rows * times, values).
    _kernel("quantise", "*rows *x *packed times values"),
    # y[row] = x[row] @ weight.T + bias, or y[row] += that where `add` is 1. weight (outputs,
    # values); x is packed for quantised weights, float32 (rows, values) for others; bias float32
    # (outputs,) or 0; y float32 (rows, outputs).
    _kernel("linear", "*rows *x *weight *bias *y values outputs add", "weights"),
    # Rotate the first 2 * planes values of each head of x float32 (rows, heads, length), in place,
    # by the angles of positions int64 (rows,). table float32 (positions, 2, planes): cosines, then
    # sines. halves 1: a plane is values (i, i + planes), 0: (2i, 2i + 1).
    _kernel("rope", "*rows *positions *table *x heads length planes halves"),
    # Rotate k float32 (rows, heads, key_length) like `rope` (k itself keeps its values) and store
    # it and v float32 (rows, heads, value_length) as cell positions[row] of sequences[row].
    # blocks int64 (sequences, table_width) are addresses of K/V blocks of 64 cells; in a block the
    # planes of this layer's keys begin at k_offset, of its values at v_offset, one plane a head
    # (`cache/kv_layout.py`).
    _kernel(
        "kv_append",
        "*rows *sequences *positions *table *k *v *blocks table_width k_offset v_offset heads "
        "key_length value_length planes halves",
        "keys_values",
    ),
    # out[row, head] = sum over the cells 0 .. positions[row] of softmax(scale * q . k) * v, as
    # stored; q float32 (rows, heads, key_length), out float32 (rows, heads, value_length); head h
    # reads K/V head h // (heads / kv_heads). Cells behind positions[row] are selected away. work
    # float32 (rows, heads, runs, value_length + 2) is work space of backends that split a row's
    # cells into runs (`runs.py`), as many as the table has room for; 0 for others.
    _kernel(
        "attention",
        "*rows *sequences *positions *q *blocks *out *work table_width k_offset v_offset heads "
        "kv_heads key_length value_length ~scale",
        "keys_values",
    ),
    # y = gate * sigmoid(gate) * up, all float32 (rows, values); out and packed as in rms_norm.
    _kernel("silu_mul", "*rows *gate *up *out *packed values"),
    # Choose the top_k largest of logits float32 (rows, experts), equal ones by lower number:
    # chosen int64 (rows, top_k) in ascending order of number, shares float32 (rows, top_k): the
    # softmax over all experts, divided by the sum of the chosen where `renormalise` is 1.
    # A row with a logit that is NaN chooses as if that were -infinity, and has shares NaN.
    # forced int16 (context, top_k), different numbers in each line, or 0: where it is given, row
    # chooses what line positions[row] says, whatever its logits are; shares as above.
    _kernel(
        "router_top_k",
        "*rows *logits *positions *forced *chosen *shares experts top_k renormalise",
    ),
    # Sort the choices by expert: starts int64 (experts + 1,), members int64 (rows * top_k,): the
    # choices row * top_k + place of expert e are members[starts[e] : starts[e + 1]], ascending;
    # places (rows * top_k,) is the inverse, where a choice stands in members. Counts them too:
    # use int64 (experts,) grows by how often each was chosen, tally int64 (2,) by the choices whose
    # tier uint8 (experts,) is 0 (a slot: a hit) and by the others (misses). A device may give
    # missed experts slots as the record `plan` says (`fill_plans.py`): homes int64 (experts,) are
    # their addresses in host memory, seen int64 (experts,) the windows that used them last.
    # addresses are those of expert_gate_up, and changed here. Elsewhere the last three are 0.
    _kernel(
        "expert_group",
        "*rows *chosen *tier *use *tally *starts *members *places experts top_k *homes *seen *plan",
    ),
    # Bring the rows of x (of row_bytes bytes each, packed or float32) into the order of members:
    # gathered (rows * top_k,). An expert with a single row is left out: it is read where it is.
    _kernel("expert_gather", "*rows *x *starts *members *gathered experts top_k row_bytes"),
    # inner[i] = silu(gate @ x) * (up @ x) for member i, x being its row; addresses int64
    # (experts,) are those of the experts' blobs, in which gate and up (outputs, values) begin at
    # their offsets. x and gathered as in expert_gather. Results float32 (rows * top_k, outputs) in
    # `inner`, with `other` of the same size as work space, and quantised in `packed` unless 0.
    _kernel(
        "expert_gate_up",
        "*rows *starts *members *x *gathered *addresses *inner *other *packed gate_offset "
        "up_offset experts top_k values outputs row_bytes",
        "gate_up",
    ),
    # y[row] += sum over its choices, in ascending order of expert, of share * (down @ inner); inner
    # packed or float32 (rows * top_k, values) in the order of members; products float32 (rows *
    # top_k, outputs) is work space; y float32 (rows, outputs).
    _kernel(
        "expert_down",
        "*rows *starts *places *inner *addresses *shares *products *y down_offset experts top_k "
        "values outputs",
        "weights",
    ),
    # y[row] += sigmoid(gate[row]) * x[row]; gate float32 (rows, 1), x and y float32 (rows, width).
    _kernel("gated_add", "*rows *gate *x *y width"),
    # chosen[row] = the token that `sampling.sample` draws from logits float32 (rows, vocabulary),
    # which stay as they are, by choices[row], a record of `choices.py`; -1 where the logits hold a
    # NaN or +infinity, or leave none. chosen int64 (rows,); work int32 (rows, 2, vocabulary) is
    # work space. Of cards alone: the host has the logits at hand and calls `sampling.sample`.
    _kernel("sample", "*rows *logits *choices *work *chosen vocabulary"),
)
KERNELS = {kernel.name: kernel for kernel in _KERNELS}
