"""Make a GGUF model of random weights, for tests and benchmarks.

Usage:
  make_model.py [options] [--override=RULE]... OUT
  make_model.py --help

Options:
  --family=NAME      llama, mixtral, qwen2moe, qwen3, qwen3moe or olmoe (default qwen3moe)
  --preset=NAME      logits: a tiny model whose every layer shows in the logits;
                     bench: a real model's size and spread of experts (default logits)
  --type=TYPE        of the matrices: Q4_K, IQ2_S, F16, ... (default Q4_K_M, a mix of Q4_K and Q6_K)
  --override=RULE    PATTERN=TYPE for tensors whose name fits, such as *attn_v*=Q8_0; the first wins
  --layers=N         sizes; the default is the preset's for the family
  --experts=N        per layer; 0 for a dense llama and for qwen3
  --top-k=N          experts that a token uses
  --dim=N            width of a hidden row
  --ff=N             inner width of an expert, or of the dense feed-forward
  --shared-ff=N      inner width of the shared expert (qwen2moe)
  --heads=N          of queries
  --kv-heads=N       of keys and values
  --head-dim=N       width of a head
  --vocab=N          tokens, at least 258
  --context=N        tokens that the model claims to be trained for
  --tied-head        the embedding is also the head (llama, mixtral, qwen3, qwen3moe)
  --skew=S           router rows are scaled by exp(S * z); 0 is uniform (default 0.4)
  --vocab-gguf=FILE  take the vocabulary of that file
  --seed=N           (default 0)

The bench preset makes Qwen3-30B-A3B by default, 17.3 GiB. Rows are whole blocks: of 256 values for
the K and IQ types, of 32 for the other quantised ones. The same arguments give the same bytes (by
the same numpy), and a tensor does not depend on the others, so that models that differ in their
number of layers have the common ones in common.

At a skew of 0.4 the hottest 3, 10, 25, 50 and 75% of 128 experts get about 9, 30, 60, 87 and 98% of
the routes. Routes have no locality in time: for caches use the traces of make_routes.py.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from model_shapes import (
    LOGITS_SHAPES,
    Q4_K_M,
    SHAPES,
    SPREADS,
    ModelShape,
    PlannedTensor,
    Rule,
    architecture_keys,
    plan_tensors,
)
from numpy.typing import NDArray
from random_blocks import random_blocks
from rewrite_gguf import Entry, add_entry, entry_of

from strata_nb.errors import ConfigError, StrataError
from strata_nb.formats import DEQUANTISABLE, TensorType, block_layout, row_bytes
from strata_nb.gguf import GGUFFile
from strata_nb.gguf_table import DEFAULT_ALIGNMENT
from strata_nb.text.merging import BYTE_OF_SYMBOL

# Larger tensors repeat this many random values, shifted by a step that is prime to their number of
# blocks: 17 GiB of fresh random bytes would take minutes.
TILE_VALUES = 2**24
TILE_STEP = 7919

Tiles = dict[tuple[TensorType, float], NDArray[np.uint8]]


def make_model(
    path: str | os.PathLike[str],
    shape: ModelShape,
    *,
    rules: Sequence[Rule] = Q4_K_M,
    preset: str = "logits",
    skew: float = 0.4,
    seed: int = 0,
    vocab_gguf: str | os.PathLike[str] | None = None,
) -> None:
    """Write the model to `path`, replacing a file that is there once all is written.

    Matrices have the type of the first rule that fits their name, norms, biases and routers are
    F32. A vocabulary taken from `vocab_gguf` sets the number of tokens. ConfigError if a row is
    not a whole number of blocks of its type; FileFormatError if `vocab_gguf` cannot be read.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed}: not usable", hint="give 0 or more")
    vocabulary = _byte_vocabulary(shape.vocab) if vocab_gguf is None else _vocabulary_of(vocab_gguf)
    shape = replace(shape, vocab=len(vocabulary["tokenizer.ggml.tokens"].value))
    plan = list(plan_tensors(shape, rules, SPREADS[preset], skew))
    part = Path(f"{os.fspath(path)}.part")
    writer = GGUFWriter(part, shape.architecture)
    try:
        _add_keys(writer, shape, vocabulary)
        for tensor in plan:
            stored = (*tensor.shape[:-1], row_bytes(tensor.kind, tensor.shape[-1]))
            kind = GGMLQuantizationType(int(tensor.kind))
            writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), tensor.size_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        tiles: Tiles = {}
        with open(part, "ab") as out:
            for tensor in plan:
                out.write(bytes(-out.tell() % DEFAULT_ALIGNMENT))
                for piece in _pieces(tensor, seed, tiles):
                    out.write(piece.data)  # a large one is not copied on its way
            out.write(bytes(-out.tell() % DEFAULT_ALIGNMENT))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _pieces(tensor: PlannedTensor, seed: int, tiles: Tiles) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a tensor; `tiles` keeps what large tensors of a type have in common."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    if tensor.normal:
        rows = tensor.mean + tensor.std * rng.standard_normal(tensor.shape)
        rows *= np.exp(tensor.row_skew * rng.standard_normal((*tensor.shape[:-1], 1)))
        yield rows.astype(np.float32)
        return
    layout = block_layout(tensor.kind)
    blocks = tensor.size_bytes // layout.size_bytes
    tile_blocks = TILE_VALUES // layout.values
    if blocks <= tile_blocks:
        yield random_blocks(tensor.kind, blocks, tensor.std, rng)
        return
    key = tensor.kind, tensor.std
    if key not in tiles:
        tile_rng = np.random.default_rng([seed, tensor.kind, int(tensor.std * 2**32)])
        tiles[key] = random_blocks(tensor.kind, tile_blocks, tensor.std, tile_rng)
    tile = tiles[key].reshape(tile_blocks, -1)
    shift = int(rng.integers(tile_blocks))
    for start in range(0, blocks, tile_blocks):
        count = min(tile_blocks, blocks - start)
        shift = (shift + TILE_STEP) % tile_blocks
        yield tile[shift : shift + count]
        yield tile[: max(0, shift + count - tile_blocks)]


def _add_keys(writer: GGUFWriter, shape: ModelShape, vocabulary: Mapping[str, Entry]) -> None:
    writer.add_name(f"random {shape.architecture}")
    writer.add_quantization_version(2)
    for key, number in architecture_keys(shape).items():
        kind = GGUFValueType.FLOAT32 if isinstance(number, float) else GGUFValueType.UINT32
        writer.add_key_value(key, number, kind)
    for key, entry in vocabulary.items():
        add_entry(writer, key, entry)


def _byte_vocabulary(size: int) -> dict[str, Entry]:
    """Return a vocabulary of the 256 byte symbols of GPT-2, one merge, placeholders and an end."""
    tokens = [*BYTE_OF_SYMBOL, "he", *(f"<pad{i}>" for i in range(size - 258)), "<end>"]
    normal, control = 1, 3
    types = [normal] * (size - 1) + [control]
    return {
        "tokenizer.ggml.model": Entry("gpt2", GGUFValueType.STRING),
        "tokenizer.ggml.pre": Entry("gpt-2", GGUFValueType.STRING),
        "tokenizer.ggml.tokens": Entry(tokens, GGUFValueType.ARRAY, GGUFValueType.STRING),
        "tokenizer.ggml.token_type": Entry(types, GGUFValueType.ARRAY, GGUFValueType.INT32),
        "tokenizer.ggml.merges": Entry(["h e"], GGUFValueType.ARRAY, GGUFValueType.STRING),
        "tokenizer.ggml.eos_token_id": Entry(size - 1, GGUFValueType.UINT32),
        "tokenizer.ggml.add_bos_token": Entry(False, GGUFValueType.BOOL),
    }


def _vocabulary_of(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Return everything about the tokenizer that a file says."""
    with GGUFFile.open(path) as file:
        metadata = file.metadata
        metadata.texts("tokenizer.ggml.tokens")  # refuses a file without tokens
        return {key: entry_of(metadata, key) for key in metadata if key.startswith("tokenizer.")}


# -- command line ----------------------------------------------------------------------------------


def _number(flag: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{flag} {text}: not a number") from None


def _type(name: str) -> TensorType:
    if name not in TensorType.__members__ or TensorType[name] not in DEQUANTISABLE:
        names = " ".join(kind.name for kind in sorted(DEQUANTISABLE))
        raise ConfigError(f"type {name}: not known", hint=f"one of {names}")
    return TensorType[name]


def _rule(text: str) -> Rule:
    pattern, separator, name = text.rpartition("=")
    if not separator:
        raise ConfigError(f"--override {text}: wanted PATTERN=TYPE")
    return pattern, _type(name)


def _run(arguments: dict[str, Any]) -> None:
    preset = arguments["--preset"] or "logits"
    family = arguments["--family"] or "qwen3moe"
    if preset not in SHAPES or family not in SHAPES[preset]:
        raise ConfigError(
            f"--preset {preset} --family {family}: not known",
            hint=f"presets: {' '.join(SHAPES)}; families: {' '.join(LOGITS_SHAPES)}",
        )
    sizes = {
        name: _number(flag, arguments[flag], int)
        for name in ModelShape.__dataclass_fields__
        if (flag := "--" + name.replace("_", "-")) not in ("--architecture", "--tied-head")
        and arguments[flag] is not None
    }
    shape = replace(SHAPES[preset][family], **sizes, tied_head=arguments["--tied-head"])
    rules = [_rule(text) for text in arguments["--override"]]
    rules += (
        Q4_K_M if arguments["--type"] in (None, "Q4_K_M") else [("*", _type(arguments["--type"]))]
    )
    make_model(
        arguments["OUT"],
        shape,
        rules=rules,
        preset=preset,
        skew=_number("--skew", arguments["--skew"] or "0.4", float),
        seed=_number("--seed", arguments["--seed"] or "0", int),
        vocab_gguf=arguments["--vocab-gguf"],
    )
    print(f"{arguments['OUT']}: {os.path.getsize(arguments['OUT']) / 2**20:.1f} MiB")


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        _run(docopt(str(__doc__)))
    except StrataError as error:
        print(error, f"hint: {error.hint}" if error.hint else "", sep="\n", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
