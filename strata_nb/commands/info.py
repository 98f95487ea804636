"""`strata_nb info`: what is in a file, whether it can run, and what would fit where.

What is in the file is shown of every file that is not damaged; why it cannot run comes last. The
sums are arithmetic over the file's own sizes, not measurements: what the card must hold (dense
weights, K/V, what the driver takes, a reserve), and how many experts fit into the rest. Left out
are the buffers of a step, and the context that the driver makes before anything is planned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from strata_nb import cpu, models
from strata_nb.cache.elastic import GrowthRules
from strata_nb.commands.arguments import Arguments, options_from
from strata_nb.driver import OUTSIDE_BYTES, RESERVE_BYTES
from strata_nb.errors import ConfigError, FileFormatError
from strata_nb.gguf import GGUFFile
from strata_nb.models import Description
from strata_nb.models.description import bytes_text
from strata_nb.models.weights import Kept, tensors_to_keep, usual_budget_bytes
from strata_nb.options import DEFAULT_CONTEXT_LIMIT, Options
from strata_nb.text.vocabulary import read_vocabulary

GIB = 2**30
MIB = 2**20
CARDS_BYTES = tuple(gib * GIB for gib in (8, 12, 16, 24))
SHOWN_VALUES = 6  # of an array
USUAL_CACHE_TYPE = "f16"  # of a card; the float32 forward's own choice is f32


def run(arguments: Arguments) -> int:
    """Run the command; returns 0, also for a file that cannot run. Everything goes to stdout.

    FileFormatError for a damaged file, ConfigError for options that do not fit the model; then
    nothing was printed.
    """
    options = _options(arguments)
    card = arguments.size_bytes("--vram")
    if card is not None and card < MIB:
        raise ConfigError(f"--vram {card} bytes: not a card", hint="write --vram 12GiB, say")
    lines: list[str] = []
    with GGUFFile.open(options.model_path()) as file:
        lines += file_lines(file)
        if arguments.flag("--keys"):
            lines += (f"  {key} = {_value(value)}" for key, value in file.metadata.items())
        if arguments.flag("--tensors"):
            lines += tensor_lines(file)
        try:
            model = _understand(file)
        except FileFormatError as error:
            lines.append(f"cannot run: {error.reason}")
            lines += [f"hint: {error.hint}"] if error.hint else []
        else:
            lines += model_lines(model)
            lines += sum_lines(file, model, options, CARDS_BYTES if card is None else (card,))
    print("\n".join(lines))
    return 0


def _options(arguments: Arguments) -> Options:
    usage = "strata_nb info FILE"
    try:
        name, flag = arguments.path("FILE"), arguments.path("--model")
    except ConfigError as error:  # an empty name
        raise ConfigError(error.message, hint=usage) from None
    if name is not None and flag is not None:
        raise ConfigError("info takes one file", hint=usage)
    return options_from(arguments, model=name or flag)


def _understand(file: GGUFFile) -> Description:
    """Return what the model is; FileFormatError says why the engine would refuse the file."""
    if not file.tensors:
        held = "a vocabulary only" if "tokenizer.ggml.tokens" in file.metadata else "metadata only"
        raise FileFormatError(
            file.path, None, f"no tensors: {held}", hint="name the file with the model's weights"
        )
    model = models.describe(file)
    read_vocabulary(file)
    return model


def file_lines(file: GGUFFile) -> Iterator[str]:
    """Yield what the file says of itself; nothing of it has to be understood."""
    shards = f", {len(file.shards)} shards" if len(file.shards) > 1 else ""
    size = bytes_text(file.size_bytes)
    yield f"file          {_plain(file.path.name)}: GGUF v{file.version}, {size}{shards}"
    count: Counter[str] = Counter()
    held: defaultdict[str, int] = defaultdict(int)
    for tensor in file.tensors.values():
        count[tensor.type.name] += 1
        held[tensor.type.name] += tensor.size_bytes
    types = ", ".join(f"{count[name]} {name} ({bytes_text(held[name])})" for name in sorted(count))
    yield f"tensors       {len(file.tensors)}: {types or 'none'}"
    metadata = file.metadata
    name = _plain(metadata.get("general.name") or "unnamed")
    yield f"model         {name}, architecture {_plain(metadata.get('general.architecture'))}"
    tokens = metadata.get("tokenizer.ggml.tokens")
    parts = [
        _plain(metadata.get("tokenizer.ggml.model")),
        f"pre-tokenizer {_plain(metadata.get('tokenizer.ggml.pre'))}",
        f"{len(tokens) if isinstance(tokens, list) else 'no'} tokens",
        f"chat template {'yes' if 'tokenizer.chat_template' in metadata else 'no'}",
    ]
    yield "tokenizer     " + ", ".join(parts)


def tensor_lines(file: GGUFFile) -> Iterator[str]:
    """Yield a line for each tensor."""
    for tensor in file.tensors.values():
        shape = " x ".join(str(extent) for extent in tensor.shape)
        yield f"  {tensor.name}  {tensor.type.name}  {shape}  {bytes_text(tensor.size_bytes)}"


def model_lines(model: Description) -> Iterator[str]:
    """Yield what the model is."""
    yield f"parameters    {model.parameters:,}"
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
    if model.context == model.sliding_window:
        yield f"context       {model.context} tokens: its sliding window; more is refused"
    else:
        yield f"context       {model.context} tokens trained"


def sum_lines(
    file: GGUFFile, model: Description, options: Options, cards_bytes: tuple[int, ...]
) -> Iterator[str]:
    """Yield what host memory and each card would hold, line by line.

    ConfigError for a context that the model cannot use.
    """
    cells = options.ctx_size or min(model.context, DEFAULT_CONTEXT_LIMIT)
    model.check_context(cells)
    kv_bytes, kv_text = _kv(model, cells, options, USUAL_CACHE_TYPE)
    everything = model.dense_bytes + model.expert_bytes
    yield "what it takes"
    yield _sum_line("dense weights", model.dense_bytes)
    if model.expert_bytes:
        largest = bytes_text(max(model.one_expert_bytes))
        each = f"{model.experts * model.layers} of at most {largest}"
        yield _sum_line("experts", model.expert_bytes, each)
    yield _sum_line("K/V", kv_bytes, kv_text)
    yield _sum_line("sum", everything + kv_bytes)
    available = cpu.available_memory_bytes()
    kept = tensors_to_keep(file.tensors, usual_budget_bytes(available))
    yield from float32_lines(kept, *_kv(model, cells, options, "f32"), available)
    for card_bytes in cards_bytes:
        yield from card_lines(model, cells, kv_bytes, card_bytes)


def float32_lines(kept: Kept, kv_bytes: int, kv_text: str, available: int) -> Iterator[str]:
    """Yield what the reference device takes of the memory available, and whether that will do."""
    yield "as float32 (--device reference)"
    yield _sum_line("weights", kept.all_bytes)
    yield _sum_line("K/V", kv_bytes, kv_text)
    yield _sum_line("sum", kept.all_bytes + kv_bytes)
    yield _sum_line("memory available", available)
    left = available - kept.size_bytes - kv_bytes
    if left < 0:
        yield _sum_line("= too small by", -left)
    elif kept.everything:
        yield _sum_line("= left", left)
    else:
        yield from (f"  = slow: {warning}" for warning in kept.warnings)


def card_lines(model: Description, cells: int, kv_bytes: int, card_bytes: int) -> Iterator[str]:
    """Yield what a card would hold, and how many experts fit into the rest."""
    yield f"a card of {bytes_text(card_bytes)}"
    yield _sum_line("- reserve", RESERVE_BYTES)
    yield _sum_line("- driver", OUTSIDE_BYTES, "modules and graphs")
    yield _sum_line("- dense weights", model.dense_bytes)
    yield _sum_line("- K/V", kv_bytes)
    left = card_bytes - RESERVE_BYTES - OUTSIDE_BYTES - model.dense_bytes - kv_bytes
    if left < 0:
        yield _sum_line("= too small by", -left)
        return
    yield _sum_line("= left", left)
    if model.expert_bytes:
        yield f"  experts that fit      {_fitting_text(model, left)}"
        init = GrowthRules.of(cells, None, None).init_cells
        if init < cells:
            more = kv_bytes * (cells - init) // cells
            found = _fitting_text(model, left + more)
            yield f"  as a run begins       {found}, with {init} cells, before the K/V grows"


def _fitting_text(model: Description, left_bytes: int) -> str:
    """Return how many experts fit into what is left, the smallest first."""
    fitting = 0
    for one in sorted(one for one in model.one_expert_bytes for _ in range(model.experts)):
        left_bytes -= one
        if left_bytes < 0:
            break
        fitting += 1
    count = model.experts * model.layers
    return f"{fitting} of {count} ({100 * fitting // count}%)"


def _kv(model: Description, cells: int, options: Options, usual: str) -> tuple[int, str]:
    """Return the bytes of the K/V, and what they are for."""
    type_k, type_v = options.cache_type_k or usual, options.cache_type_v or usual
    kinds = type_k if type_k == type_v else f"{type_k} and {type_v}"
    return model.kv_bytes_per_cell(type_k, type_v) * cells, f"{cells} cells in {kinds}"


def _sum_line(label: str, count: int, remark: str = "") -> str:
    return f"  {label:<21} {bytes_text(count):>11}" + (f"   {remark}" if remark else "")


def _value(value: object) -> str:
    """Return a metadata value on one line, an array by its length and first values."""
    if isinstance(value, str):
        return repr(value if len(value) <= 100 else value[:97] + "...")
    if not hasattr(value, "__len__"):
        return str(value)
    first = ", ".join(repr(value[n]) for n in range(min(len(value), SHOWN_VALUES)))  # type: ignore[index]
    return f"[{len(value)}] {first}" + (", ..." if len(value) > SHOWN_VALUES else "")


def _plain(value: object) -> str:
    """Return a value of any type in a line of text: a file may call itself anything."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and value.isprintable() else _value(value)
