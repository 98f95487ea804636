"""Write trained weights as a GGUF file.

Usage:
  export.py [--type=TYPE] [--name=NAME] TRAINED VOCABULARY OUT
  export.py --help

TRAINED is the folder that train.py filled, VOCABULARY the vocabulary.json beside the ids. A mixture
becomes a file of the architecture `qwen3moe`, a dense network one of `qwen3`. Matrices get the
type, norms and routers stay float32.

Options:
  --type=TYPE  F32, F16 or Q8_0 [default: Q8_0]
  --name=NAME  in the metadata [default: Strata Stories]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from docopt import docopt
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants

DESCRIPTION = (
    "Little stories for children, with a beginning, a wish and an end. Trained from scratch for "
    "strata_nb on stories drawn from plots that were written by hand; the recipe, the plots and "
    "their licence are in its tools/stories."
)
KEPT_F32 = ("norm", "ffn_gate_inp")


def main() -> None:
    """Read, quantise, write."""
    arguments = docopt(str(__doc__))
    trained, kind = Path(arguments["TRAINED"]), arguments["--type"]
    if kind not in ("F32", "F16", "Q8_0"):
        sys.exit(f"--type {kind}: not usable; give F32, F16 or Q8_0")
    shape = json.loads((trained / "shape.json").read_text())
    weights = read_weights(trained)
    vocabulary = json.loads(Path(arguments["VOCABULARY"]).read_text())
    write(Path(arguments["OUT"]), shape, weights, vocabulary, kind, arguments["--name"])


def read_weights(trained: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of all pieces, weights.0.npz, weights.1.npz, ..."""
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for path in sorted(trained.glob("weights.*.npz")):
        with np.load(path) as arrays:
            weights |= {name: arrays[name].astype(np.float32) for name in arrays.files}
    return weights


def write(
    out: Path,
    shape: dict[str, Any],
    weights: dict[str, npt.NDArray[np.float32]],
    vocabulary: dict[str, list[str]],
    kind: str,
    name: str,
) -> None:
    """Write the file, replacing one that is there once all is written."""
    mixture = shape["experts"] > 1
    architecture = "qwen3moe" if mixture else "qwen3"
    part = Path(f"{out}.part")
    writer = GGUFWriter(part, architecture)
    writer.add_name(name)
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    writer.add_quantization_version(2)
    writer.add_vocab_size(shape["vocab"])
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["width"])
    writer.add_block_count(shape["layers"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["eps"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_base"])
    # The plain width is that of a dense layer: as wide as the experts that a token uses.
    writer.add_feed_forward_length(shape["inner"] * shape["top_k"])
    if mixture:
        writer.add_expert_count(shape["experts"])
        writer.add_expert_used_count(shape["top_k"])
        writer.add_expert_feed_forward_length(shape["inner"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary["tokens"])
    kinds = [TokenType.CONTROL, *[TokenType.NORMAL] * (len(vocabulary["tokens"]) - 1)]
    writer.add_token_types(kinds)
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for tensor, rows in weights.items():
        stored = stored_name(tensor, mixture)
        values = rows if mixture or "_exps" not in tensor else rows[0]
        if any(part in tensor for part in KEPT_F32) or kind == "F32":
            if mixture or "ffn_gate_inp" not in tensor:
                writer.add_tensor(stored, np.ascontiguousarray(values))
            continue
        to = GGMLQuantizationType[kind]
        writer.add_tensor(stored, quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(out)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


def stored_name(tensor: str, mixture: bool) -> str:
    """Return the name in the file: the one expert of a dense network is its feed-forward."""
    return f"{tensor if mixture else tensor.replace('_exps', '')}.weight"


if __name__ == "__main__":
    main()
