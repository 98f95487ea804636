"""Compare the float32 forward with the transformers library, and store what that one computes.

The model class of transformers gets the weights as this project dequantises them, so the two differ
only in the formula. Run it from the root of the project, in an environment that also has torch and
transformers, which are no dependencies of the project.

Usage:
  oracle_transformers.py MODEL --name=NAME --text=FILE [--tokens=N]
  oracle_transformers.py --random
  oracle_transformers.py --help

Options:
  --name=NAME   the figures go to tests/data/oracle/NAME.npz
  --text=FILE   evaluate the first tokens of a text, by the model's own tokenizer
  --tokens=N    how many [default: 500]
  --random      evaluate random tokens on the random models of tools/oracle_models.py

The differences go to bench/results/transformers_NAME.json. A file of the oracle holds: weights, a
digest of the tensors; ids; norms (tokens,), the length of each row of logits; positions, a few of
them, with best_ids and best_logits (positions, 16) there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers  # type: ignore[import-not-found]
from docopt import docopt
from oracle_models import (
    RANDOM_MODELS,
    RANDOM_TOKENS,
    float32_logits,
    random_ids,
    text_ids,
    weights_digest,
)
from results import write_result

from strata_nb import models
from strata_nb.formats import dequantise
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.models import Description

ORACLE_DIRECTORY = Path("tests/data/oracle")
BEST = 16  # logits stored at each position
POSITIONS = 12  # spread over the tokens


def main() -> None:
    """Evaluate both forwards, store the oracle's figures and print the differences."""
    arguments = docopt(str(__doc__))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    if not arguments["--random"]:
        with GGUFFile.open(arguments["MODEL"]) as file:
            ids = text_ids(file, arguments["--text"], int(arguments["--tokens"]))
            text = Path(arguments["--text"]).name
            options = f"{file.path.name} --name={arguments['--name']} --text={text}"
            compare(arguments["--name"], file, ids, f"{options} --tokens={len(ids)}")
        return
    with tempfile.TemporaryDirectory() as directory:
        for name, make in RANDOM_MODELS.items():
            path = Path(directory) / f"{name}.gguf"
            make(path)
            with GGUFFile.open(path) as file:
                compare(name, file, random_ids(file, RANDOM_TOKENS), "--random")


def compare(name: str, file: GGUFFile, ids: npt.NDArray[np.int64], options: str) -> None:
    """Evaluate one model both ways, store and print."""
    theirs = transformers_logits(file, models.describe(file), ids)
    ours = float32_logits(file, ids)
    store(ORACLE_DIRECTORY / f"{name}.npz", weights_digest(file), ids, theirs)
    difference = np.abs(ours - theirs)
    figures = {
        "tokens": len(ids),
        "largest_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "largest_logit": float(np.abs(theirs).max()),
    }
    write_result(
        f"transformers_{name}",
        "differences of the float32 forward's logits from those of transformers",
        f"python tools/oracle_transformers.py {options}",
        figures,
        ("numpy", "torch", "transformers"),
    )
    print(f"{name}: {figures}")


def transformers_logits(file: GGUFFile, model: Description, ids: npt.NDArray[np.int64]) -> Floats:
    """Return the logits (tokens, vocab) of the transformers library."""
    shared: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.key_length,
        "rms_norm_eps": model.eps,
        "max_position_embeddings": model.context,
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": model.rope_base,
            "factor": model.rope_scale,
        },
        "tie_word_embeddings": model.tied_head,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    if model.experts:
        shared |= {"num_experts_per_tok": model.top_k, "experts_implementation": "eager"}
    if model.architecture == "llama" and model.experts:
        config = transformers.MixtralConfig(
            intermediate_size=model.expert_width, num_local_experts=model.experts, **shared
        )
    elif model.architecture == "llama":
        config = transformers.LlamaConfig(
            intermediate_size=model.ff_width,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            **shared,
        )
    elif model.architecture == "qwen2moe":
        config = transformers.Qwen2MoeConfig(
            num_experts=model.experts,
            moe_intermediate_size=model.expert_width,
            shared_expert_intermediate_size=model.shared_width,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            norm_topk_prob=False,
            **shared,
        )
    elif model.architecture == "qwen3":
        config = transformers.Qwen3Config(
            intermediate_size=model.ff_width,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            **shared,
        )
    elif model.architecture == "qwen3moe":
        config = transformers.Qwen3MoeConfig(
            num_experts=model.experts,
            moe_intermediate_size=model.expert_width,
            norm_topk_prob=True,
            **shared,
        )
    else:
        config = transformers.OlmoeConfig(
            intermediate_size=model.expert_width,
            num_experts=model.experts,
            norm_topk_prob=False,
            **shared,
        )
    torch.set_grad_enabled(False)
    oracle = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    oracle.load_state_dict(state_dict(file, model), strict=not model.tied_head)
    if "rope_freqs.weight" in file.tensors:
        oracle.model.rotary_emb.inv_freq /= tensor(file, "rope_freqs.weight")
    logits: Floats = oracle(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits


def state_dict(file: GGUFFile, model: Description) -> dict[str, torch.Tensor]:
    """Return the file's weights, dequantised, under the names of transformers."""
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_down_exps": "mlp.experts.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
    renamed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    result: dict[str, torch.Tensor] = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        if name in renamed:
            result[renamed[name]] = tensor(file, name)
            continue
        _, layer, part, kind = name.split(".")
        place = f"model.layers.{layer}."
        if part == "ffn_up_exps":
            continue
        if part == "ffn_gate_exps":
            up = tensor(file, name.replace("ffn_gate_exps", "ffn_up_exps"))
            result[place + "mlp.experts.gate_up_proj"] = torch.cat([tensor(file, name), up], dim=1)
            continue
        value = tensor(file, name)
        if model.architecture == "llama" and part in ("attn_q", "attn_k"):
            value = pairs_to_halves(value, model.key_length)
        if part == "ffn_gate_inp_shexp":
            value = value.reshape(1, -1)
        suffix = "" if part == "ffn_down_exps" else f".{kind}"
        result[place + names[part] + suffix] = value
    return result


def tensor(file: GGUFFile, name: str) -> torch.Tensor:
    """Return one dequantised tensor in the file's shape."""
    info = file.tensors[name]
    return torch.from_numpy(dequantise(info.type, file.raw(name)).reshape(info.shape).copy())


def pairs_to_halves(value: torch.Tensor, head_length: int) -> torch.Tensor:
    """Reorder the rows of each head: llama files rotate neighbours, transformers rotates halves."""
    heads = value.reshape(-1, head_length // 2, 2, *value.shape[1:])
    return heads.transpose(1, 2).reshape(value.shape)


def store(path: Path, digest: str, ids: npt.NDArray[np.int64], logits: Floats) -> None:
    """Write the figures that the tests read."""
    positions = np.unique(np.linspace(0, len(ids) - 1, POSITIONS).astype(np.int64))
    rows = logits[positions]
    best = np.argsort(-rows, axis=-1, kind="stable")[:, :BEST]
    np.savez_compressed(
        path,
        weights=np.array(digest),
        ids=ids.astype(np.int32),
        norms=np.linalg.norm(logits.astype(np.float64), axis=-1),
        positions=positions,
        best_ids=best.astype(np.int32),
        best_logits=np.take_along_axis(rows, best, axis=-1),
    )


if __name__ == "__main__":
    main()
