"""Measure how far llama.cpp is from the float32 forward: the yardstick for faster backends.

Run it from the root of the project, in an environment that also has llama-cpp-python, which is no
dependency of the project.

Usage:
  oracle_llama_cpp.py MODEL --name=NAME --text=FILE [--tokens=N]
  oracle_llama_cpp.py --random [--tokens=N]
  oracle_llama_cpp.py --help

Options:
  --name=NAME   the figures go to bench/results/kl_llama_cpp_NAME.json
  --text=FILE   evaluate the first tokens of a text, by the model's own tokenizer
  --tokens=N    how many [default: 1000]
  --random      evaluate random tokens on the random models of tools/oracle_models.py

llama.cpp runs with its defaults (float16 K/V), once reading all tokens as a prompt in batches of
512 and once one by one. KL is in nats, between the distributions of the next token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from docopt import docopt
from oracle_models import RANDOM_MODELS, float32_logits, random_ids, text_ids
from results import write_result

from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.perplexity import kl_divergence

PROMPT_BATCH = 512


def main() -> None:
    """Evaluate the float32 forward and both paths of llama.cpp, store and print the distances."""
    arguments = docopt(str(__doc__))
    count = int(arguments["--tokens"])
    if not arguments["--random"]:
        path, text = Path(arguments["MODEL"]), Path(arguments["--text"])
        with GGUFFile.open(path) as file:
            ids = text_ids(file, text, count)
            rows = measure(file, ids)
        options = f"{path.name} --name={arguments['--name']} --text={text.name} --tokens={count}"
        store(arguments["--name"], path.name, text.name, options, len(ids), rows)
        return
    with tempfile.TemporaryDirectory() as directory:
        for name, make in RANDOM_MODELS.items():
            path = Path(directory) / f"{name}.gguf"
            make(path)
            with GGUFFile.open(path) as file:
                rows = measure(file, random_ids(file, count))
            store(
                f"random_{name}", path.name, "random ids", f"--random --tokens={count}", count, rows
            )


Rows = dict[str, dict[str, float]]


def measure(file: GGUFFile, ids: npt.NDArray[np.int64]) -> Rows:
    """Return the distances between the float32 forward and both paths of llama.cpp."""
    judge = float32_logits(file, ids)
    prompt = llama_cpp_logits(file.path, ids, PROMPT_BATCH)
    decode = llama_cpp_logits(file.path, ids, 1)
    return {
        "float32, llama.cpp prompt": distance(judge, prompt),
        "float32, llama.cpp decode": distance(judge, decode),
        "llama.cpp decode, llama.cpp prompt": distance(decode, prompt),
    }


def store(name: str, model: str, source: str, options: str, tokens: int, rows: Rows) -> None:
    """Write the figures with all that they depend on, and print them as a table."""
    write_result(
        f"kl_llama_cpp_{name}",
        "KL(first || second) in nats over the distributions after each token",
        f"python tools/oracle_llama_cpp.py {options}",
        {"model": model, "tokens": tokens, "source": source, "rows": rows},
        ("numpy", "llama_cpp_python"),
    )
    print(markdown(model, source, tokens, rows), end="\n\n", flush=True)


def llama_cpp_logits(path: Path, ids: npt.NDArray[np.int64], batch: int) -> Floats:
    """Return the logits (tokens, vocab) of llama.cpp, reading `batch` tokens at a time."""
    import llama_cpp  # here, because its figures may also come from a file (judge.py)

    model = llama_cpp.Llama(
        str(path), n_ctx=len(ids), n_batch=PROMPT_BATCH, logits_all=True, verbose=False
    )
    for at in range(0, len(ids), batch):
        model.eval(ids[at : at + batch].tolist())
    logits: Floats = np.array(model.scores[: len(ids)], np.float32)
    model.close()
    return logits


def distance(first: Floats, second: Floats) -> dict[str, float]:
    """Compare two arrays of logits (tokens, vocab) row by row, in float64."""
    divergence = kl_divergence(first, second)
    agree = np.argmax(first, axis=-1) == np.argmax(second, axis=-1)
    best_two = np.partition(first, -2, axis=-1)[:, -2:]
    margins = np.ptp(best_two, axis=-1)[~agree]
    return {
        "kl_mean": float(divergence.mean()),
        "kl_standard_error": float(divergence.std(ddof=1) / len(divergence) ** 0.5),
        "kl_median": float(np.median(divergence)),
        "kl_99_percent": float(np.quantile(divergence, 0.99)),
        "kl_max": float(divergence.max()),
        "best_token_agreement": float(agree.mean()),
        "largest_margin_where_they_differ": float(margins.max(initial=0.0)),
        "largest_logit_difference": float(np.abs(first - second).max()),
    }


def markdown(model: str, source: str, tokens: int, rows: Rows) -> str:
    """Return the figures as a table."""
    lines = [
        f"{model}, {tokens} tokens, {source}:",
        "",
        "| KL of | mean | standard error | median | 99% | best token agrees | margin where not |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['kl_mean']:.5f} | {row['kl_standard_error']:.5f} | "
        f"{row['kl_median']:.5f} | {row['kl_99_percent']:.5f} | "
        f"{row['best_token_agreement']:.1%} | {row['largest_margin_where_they_differ']:.3f} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
