"""Measure the story model with the engine that it is made for.

Usage:
  evaluate.py [options] MODEL CORPUS --unquantised=FILE --dense=FILE
  evaluate.py --help

CORPUS is the folder with held_out.npy and new_plots.npy (vocabulary.py). The figures go to
bench/results/stories.json: perplexity of the model, of its file in F16 and of the dense network,
use of experts on held-out stories, and hit rates of small devices.

Options:
  --unquantised=FILE  the model before quantising, in F16
  --dense=FILE        the dense network of the same active size, in F16
  --stories=N         of each set [default: 500]
  --profile=FILE      write the expert profile that held-out stories teach

A story is read alone, from its first token; every further token counts, the end too.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from docopt import docopt

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb import Engine, Options, Sampling  # noqa: E402

END_OF_TEXT = 0
SHARES = (25, 50, 100)  # percent of the experts that have a slot
WRITTEN = 20  # stories that are written on each device
DEVICE = "host:1x64MiB"  # with room for all experts

Routes = npt.NDArray[np.int16]  # (tokens, layers, top_k)


def main() -> None:
    """Measure, print and store."""
    arguments = docopt(str(__doc__))
    model, corpus = Path(arguments["MODEL"]), Path(arguments["CORPUS"])
    most = int(arguments["--stories"])
    held_out = stories(corpus / "held_out.npy")[:most]
    new_plots = stories(corpus / "new_plots.npy")[:most]
    perplexities = {}
    for name, path in (
        ("model", model),
        ("unquantised", Path(arguments["--unquantised"])),
        ("dense", Path(arguments["--dense"])),
    ):
        with Engine.open(Options(path)) as engine:
            perplexities[name] = {
                "held_out": perplexity(engine, held_out),
                "new_plots": perplexity(engine, new_plots),
            }
        print(name, perplexities[name], flush=True)
    use = expert_use(routes_of(model, held_out, arguments["--profile"]))
    for layer in use["layers"]:
        print(layer, flush=True)
    budgets = hit_rates(model)
    for row in budgets:
        print(row, flush=True)
    write_result(
        "stories",
        "perplexity a token of stories that were not trained on; use of experts on held-out "
        "stories, shares of routes; hit rates of stories that are written, of the routers' choices",
        "python tools/stories/evaluate.py "
        + " ".join(re.sub("[^=]*/", "", word) for word in sys.argv[1:]),  # without folders
        {
            "model": model.name,
            "stories": len(held_out),
            "perplexity": perplexities,
            "use": use,
            "budgets": budgets,
        },
        ("numpy", "numba", "llvmlite"),
    )


def stories(path: Path) -> list[list[int]]:
    """Return the ids of each story, its end included."""
    ids = np.load(path).astype(np.int64)
    ends = np.flatnonzero(ids == END_OF_TEXT)
    return [part.tolist() for part in np.split(ids, ends + 1) if len(part)]


def perplexity(engine: Engine, texts: Sequence[Sequence[int]]) -> float:
    """Return exp of the mean loss over all tokens but the first of each text."""
    nats, count = 0.0, 0
    for ids in texts:
        logits = engine.logits(ids[:-1]).astype(np.float64)
        largest = logits.max(axis=1)
        total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        nats += float((total - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
        count += len(ids) - 1
    return math.exp(nats / count)


def routes_of(model: Path, texts: Sequence[Sequence[int]], profile: str | None) -> list[Routes]:
    """Return the experts of every token of each text; write the profile that they teach."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routes.npy"
        options = Options(
            model, DEVICE, routing_trace=path, expert_profile="none", expert_profile_save=profile
        )
        with Engine.open(options) as engine:
            for ids in texts:
                engine.logits(ids)
            engine.save_routing_trace(path)
            if profile is not None:
                engine.save_expert_profile(profile)
        routes: Routes = np.load(path)
    return np.split(routes, np.cumsum([len(ids) for ids in texts])[:-1])


def expert_use(texts: list[Routes]) -> dict[str, list[dict[str, float]]]:
    """Return figures of each layer."""
    routes = np.concatenate(texts)
    experts = int(routes.max()) + 1
    layers = []
    for layer in range(routes.shape[1]):
        counts = np.bincount(routes[:, layer].ravel(), minlength=experts)
        shares = np.sort(counts)[::-1] / counts.sum()
        again = [
            (text[1:, layer, :, None] == text[:-1, layer, None, :]).any(-1).mean() for text in texts
        ]
        layers.append(
            {
                "layer": layer,
                "hottest_quarter": float(shares[: experts // 4].sum()),
                "least": float(shares[-1]),
                "used_again_by_the_next_token": float(np.mean(again)),
            }
        )
    return {"layers": layers}


def hit_rates(model: Path) -> list[dict[str, object]]:
    """Write the same stories on devices with slots for a share of the experts."""
    rows: list[dict[str, object]] = []
    expected: list[list[int]] = []
    on_devices = [(DEVICE, share, adapt) for share in SHARES for adapt in ("insert", "off")]
    for device, share, adapt in [("host", 100, "insert"), *on_devices]:
        cache = "auto" if device == "host" else f"{share}%"
        options = Options(model, device, expert_cache=cache, adapt=adapt, deterministic=True)
        with Engine.open(options) as engine:
            prompt = engine.encode("Once upon a time")
            found = [
                [token.id for token in engine.generate(prompt, sampling=Sampling(seed=seed))]
                for seed in range(1, WRITTEN + 1)
            ]
            report = engine.describe()
        expected = expected or found
        rows.append(
            {
                "device": device,
                "adapt": adapt,
                "slots": report.slots,
                "hit_rate": report.hit_rate,
                "tokens": sum(map(len, found)),
                "same_tokens": found == expected,
            }
        )
    return rows


if __name__ == "__main__":
    main()
