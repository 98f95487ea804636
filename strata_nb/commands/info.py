"""`strata_nb info`: what is in a file, and what would fit where, as a sum line by line.

The sum is arithmetic over the file's own sizes, not a measurement: what the card must hold (dense
weights, K/V of the context, a reserve), and how many experts fit into the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from strata_nb import cpu, models
from strata_nb.commands.arguments import Arguments, options_from
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.models import Description
from strata_nb.options import DEFAULT_CONTEXT_LIMIT

GIB = 2**30
MIB = 2**20
RESERVE_BYTES = 700 * MIB  # left free on a card for other programs and the driver's own needs
CARDS_BYTES = tuple(gib * GIB for gib in (8, 12, 16, 24))
SHOWN_VALUES = 6  # of an array


def size(count: int) -> str:
    """Return a number of bytes in the unit that people read."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB"


def _value(value: object) -> str:
    """Return a metadata value on one line, an array by its length and first values."""
    if isinstance(value, str):
        return repr(value if len(value) <= 100 else value[:97] + "...")
    if not hasattr(value, "__len__"):
        return str(value)
    first = ", ".join(repr(value[n]) for n in range(min(len(value), SHOWN_VALUES)))  # type: ignore[index]
    return f"[{len(value)}] {first}" + (", ..." if len(value) > SHOWN_VALUES else "")


def file_lines(file: GGUFFile) -> Iterator[str]:
    """Yield what the file is: shards, version, tensors by type."""
    shards = f", {len(file.shards)} shards" if len(file.shards) > 1 else ""
    yield f"file          {file.path.name}: GGUF v{file.version}, {size(file.size_bytes)}{shards}"
    count: Counter[str] = Counter()
    held: defaultdict[str, int] = defaultdict(int)
    for tensor in file.tensors.values():
        count[tensor.type.name] += 1
        held[tensor.type.name] += tensor.size_bytes
    types = ", ".join(f"{count[name]} {name} ({size(held[name])})" for name in sorted(count))
    yield f"tensors       {len(file.tensors)}: {types or 'none'}"


def model_lines(model: Description) -> Iterator[str]:
    """Yield what the model is."""
    name = model.name or "unnamed"
    yield f"model         {name}: {model.architecture}, {model.parameters:,} values"
    yield (
        f"layers        {model.layers} of width {model.width}; attention {model.heads} heads, "
        f"{model.kv_heads} for K/V, of {model.key_length}"
    )
    if model.experts:
        shared = f", and a shared one of {model.shared_width}" if model.shared_width else ""
        yield (
            f"experts       {model.experts} a layer, {model.top_k} used by a token, inner width "
            f"{model.expert_width}{shared}"
        )
    else:
        yield f"feed-forward  inner width {model.ff_width}, no experts"
    head = "tied to the embedding" if model.tied_head else "of its own"
    yield f"vocabulary    {model.vocab_size} tokens, head {head}"
    yield f"context       {model.context} tokens trained"


def sum_lines(
    model: Description, cells: int, type_k: str, type_v: str, cards_bytes: tuple[int, ...]
) -> Iterator[str]:
    """Yield what host memory and each card would hold, line by line."""
    kv = model.kv_bytes_per_cell(type_k, type_v) * cells
    everything = model.dense_bytes + model.expert_bytes
    single = max(model.one_expert_bytes, default=0)
    yield "what it takes"
    yield f"  dense weights         {size(model.dense_bytes):>11}"
    if model.expert_bytes:
        count = model.experts * model.layers
        each = f"{count} of at most {size(single)}"
        yield f"  experts               {size(model.expert_bytes):>11}   {each}"
    kinds = type_k if type_k == type_v else f"{type_k} and {type_v}"
    yield f"  K/V                   {size(kv):>11}   {cells} cells in {kinds}"
    yield f"  sum                   {size(everything + kv):>11}"
    yield "as float32 (--device reference)"
    yield f"  weights               {size(4 * model.parameters):>11}"
    yield f"  host memory available {size(cpu.available_memory_bytes()):>11}"
    for card in cards_bytes:
        yield f"a card of {size(card)}"
        free = card
        for label, taken in (
            ("reserve", RESERVE_BYTES),
            ("dense weights", model.dense_bytes),
            ("K/V", kv),
        ):
            free -= taken
            yield f"  - {label:<19} {size(taken):>11}"
        if free < 0:
            yield f"  = too small by        {size(-free):>11}"
            continue
        yield f"  = left                {size(free):>11}"
        if model.expert_bytes:
            fitting = 0
            for one in sorted(one for one in model.one_expert_bytes for _ in range(model.experts)):
                free -= one
                if free < 0:
                    break
                fitting += 1
            count = model.experts * model.layers
            yield f"  experts that fit      {fitting} of {count} ({100 * fitting / count:.0f}%)"


def run(arguments: Arguments) -> int:
    """Run the command; returns 0. Everything goes to stdout."""
    name, flag = arguments.path("FILE"), arguments.path("--model")
    if (name is None) == (flag is None):
        raise ConfigError("info needs one file", hint="strata_nb info FILE")
    options = options_from(arguments, model=name or flag)
    card = arguments.size_bytes("--vram")
    with GGUFFile.open(options.model) as file:
        for line in file_lines(file):
            print(line)
        if arguments.flag("--keys"):
            for key, value in file.metadata.items():
                print(f"  {key} = {_value(value)}")
        if arguments.flag("--tensors"):
            for tensor in file.tensors.values():
                shape = " x ".join(str(extent) for extent in tensor.shape)
                print(f"  {tensor.name}  {tensor.type.name}  {shape}  {size(tensor.size_bytes)}")
        model = models.describe(file)
    for line in model_lines(model):
        print(line)
    cells = options.ctx_size or min(model.context, DEFAULT_CONTEXT_LIMIT)
    cards = CARDS_BYTES if card is None else (card,)
    type_k, type_v = options.cache_type_k or "f16", options.cache_type_v or "f16"
    for line in sum_lines(model, cells, type_k, type_v, cards):
        print(line)
    return 0
