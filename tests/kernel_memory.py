"""Which memory each kernel of the table touches on the host: how much, whether it may be none, and
whether it is written; for tests that look through programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata_nb.device_opening import SEQUENCES
from strata_nb.fill_plans import plan_type
from strata_nb.formats import tensor_bytes
from strata_nb.kernels.choices import CHOICE
from strata_nb.kernels.host.matrices import input_row_bytes
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.runs import work_floats

CONTEXT = 128  # cells of the models whose programs are looked through

# Where the table allows "none".
MAY_BE_ZERO = {
    ("embed", "drawn"),
    ("rms_norm", "index"),
    ("rms_norm", "out"),
    ("rms_norm", "packed"),
    ("linear", "bias"),
    ("attention", "work"),
    ("router_top_k", "forced"),
    ("silu_mul", "out"),
    ("silu_mul", "packed"),
    ("expert_group", "homes"),
    ("expert_group", "seen"),
    ("expert_group", "plan"),
    ("expert_gate_up", "packed"),
}

Sizes = Callable[[dict[str, int], int, Any], dict[str, int]]

# What a kernel reads and writes at each of its addresses, in bytes: of its arguments, the number of
# rows, and its variant.
EXTENTS: dict[str, Sizes] = {
    "embed": lambda a, rows, kind: {
        "tokens": 8 * rows,
        "drawn": 8,
        "weight": tensor_bytes(kind, (a["vocabulary"], a["width"])),
        "x": 4 * rows * a["width"],
    },
    "rms_norm": lambda a, rows, _: {
        "index": 8 * rows,
        "x": 4 * rows * a["parts"] * a["width"],
        "weight": 4 * a["width"],
        "out": 4 * rows * a["parts"] * a["width"],
        "packed": rows * row_bytes(a["parts"] * a["width"]),
    },
    "quantise": lambda a, rows, _: {
        "x": 4 * rows * a["times"] * a["values"],
        "packed": rows * a["times"] * row_bytes(a["values"]),
    },
    "linear": lambda a, rows, kind: {
        "x": rows * input_row_bytes(kind, a["values"]),
        "weight": tensor_bytes(kind, (a["outputs"], a["values"])),
        "bias": 4 * a["outputs"],
        "y": 4 * rows * a["outputs"],
    },
    "rope": lambda a, rows, _: {
        "positions": 8 * rows,
        "table": CONTEXT * 2 * a["planes"] * 4,
        "x": 4 * rows * a["heads"] * a["length"],
    },
    "kv_append": lambda a, rows, _: {
        "sequences": 8 * rows,
        "positions": 8 * rows,
        "table": CONTEXT * 2 * a["planes"] * 4,
        "k": 4 * rows * a["heads"] * a["key_length"],
        "v": 4 * rows * a["heads"] * a["value_length"],
        "blocks": 8 * SEQUENCES * a["table_width"],
    },
    "attention": lambda a, rows, _: {
        "sequences": 8 * rows,
        "positions": 8 * rows,
        "q": 4 * rows * a["heads"] * a["key_length"],
        "blocks": 8 * SEQUENCES * a["table_width"],
        "out": 4 * rows * a["heads"] * a["value_length"],
        "work": 4 * rows * a["heads"] * work_floats(a["table_width"], a["value_length"]),
    },
    "silu_mul": lambda a, rows, _: {
        "gate": 4 * rows * a["values"],
        "up": 4 * rows * a["values"],
        "out": 4 * rows * a["values"],
        "packed": rows * row_bytes(a["values"]),
    },
    "router_top_k": lambda a, rows, _: {
        "logits": 4 * rows * a["experts"],
        "positions": 8 * rows,
        "forced": 2 * CONTEXT * a["top_k"],
        "chosen": 8 * rows * a["top_k"],
        "shares": 4 * rows * a["top_k"],
    },
    "expert_group": lambda a, rows, _: {
        "chosen": 8 * rows * a["top_k"],
        "tier": a["experts"],
        "use": 8 * a["experts"],
        "tally": 16,
        "starts": 8 * (a["experts"] + 1),
        "members": 8 * rows * a["top_k"],
        "places": 8 * rows * a["top_k"],
        "homes": 8 * a["experts"],
        "seen": 8 * a["experts"],
        "plan": plan_type(a["experts"]).itemsize,
    },
    "expert_gather": lambda a, rows, _: {
        "x": rows * a["row_bytes"],
        "starts": 8 * (a["experts"] + 1),
        "members": 8 * rows * a["top_k"],
        "gathered": rows * a["top_k"] * a["row_bytes"],
    },
    "expert_gate_up": lambda a, rows, _: {
        "starts": 8 * (a["experts"] + 1),
        "members": 8 * rows * a["top_k"],
        "x": rows * a["row_bytes"],
        "gathered": rows * a["top_k"] * a["row_bytes"],
        "addresses": 8 * a["experts"],
        "inner": 4 * rows * a["top_k"] * a["outputs"],
        "other": 4 * rows * a["top_k"] * a["outputs"],
        "packed": rows * a["top_k"] * row_bytes(a["outputs"]),
    },
    "expert_down": lambda a, rows, kind: {
        "starts": 8 * (a["experts"] + 1),
        "places": 8 * rows * a["top_k"],
        "inner": rows * a["top_k"] * input_row_bytes(kind, a["values"]),
        "addresses": 8 * a["experts"],
        "shares": 4 * rows * a["top_k"],
        "products": 4 * rows * a["top_k"] * a["outputs"],
        "y": 4 * rows * a["outputs"],
    },
    "gated_add": lambda a, rows, _: {
        "gate": 4 * rows,
        "x": 4 * rows * a["width"],
        "y": 4 * rows * a["width"],
    },
    "sample": lambda a, rows, _: {
        "logits": 4 * rows * a["vocabulary"],
        "choices": CHOICE.itemsize * rows,
        "work": 8 * rows * a["vocabulary"],
        "chosen": 8 * rows,
    },
}

# What a kernel writes; `linear` and `expert_down` may read it first.
WRITTEN = {
    "embed": {"x"},
    "rms_norm": {"out", "packed"},
    "quantise": {"packed"},
    "linear": {"y"},
    "rope": {"x"},
    "kv_append": set(),
    "attention": {"out", "work"},
    "silu_mul": {"out", "packed"},
    "router_top_k": {"chosen", "shares"},
    "expert_group": {"use", "tally", "starts", "members", "places", "seen"},
    "expert_gather": {"gathered"},
    "expert_gate_up": {"inner", "other", "packed"},
    "expert_down": {"products", "y"},
    "gated_add": {"y"},
    "sample": {"work", "chosen"},
}
