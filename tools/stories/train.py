"""Train the story model, or the dense one it is compared with, on one GPU.

Usage:
  train.py [options] CORPUS OUT
  train.py --help

CORPUS is the folder that vocabulary.py filled: train.npy, held_out.npy and new_plots.npy, uint16
ids of stories that end with token 0. OUT gets weights.0.npz, weights.1.npz, ... (float16, names of
the GGUF file), shape.json and log.json; the weights also every two minutes of the run.

Options:
  --dense           one expert as wide as those that a token of the mixture uses
  --seconds=S       stop after this time, with the learning rate run down to 0 [default: 480]
  --steps=N         stop after this many steps, whatever the time
  --batch=N         sequences of 512 tokens in a step [default: 128]
  --rate=R          highest learning rate [default: 0.003]
  --balance=B       weight of the load-balancing loss [default: 0.001]
  --device=NAME     [default: cuda]
  --seed=N          [default: 1]

A row of a batch begins with a story and is filled with the ones that follow, cut at 512 tokens.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from docopt import docopt
from network import Shape, Weights, initial_weights, losses, rope_table

END_OF_TEXT = 0
ROUTER_Z = 0.001  # weight of the router's z-loss beside that of the next token
DECAY = 0.1
WARM_UP = 200  # steps
COOL_DOWN = 0.4  # the last part of the run, in which the rate falls to 0
CHECKPOINT_SECONDS = 120
HELD_OUT_ROWS = 2048
PIECE_BYTES = 15_000_000


class Stories:
    """Cut a stream of stories into rows that begin with a story, in a new order each time round."""

    def __init__(self, path: Path, rows: int, seed: int) -> None:
        ids = np.load(path)
        ends = np.flatnonzero(ids == END_OF_TEXT)
        self._ids = np.concatenate([ids, ids[: rows + 1]])  # the last rows go on from the front
        self._starts = np.concatenate([[0], ends[:-1] + 1])
        self._rows = rows
        self._rng = np.random.default_rng(seed)
        self._order = self._rng.permutation(self._starts)
        self._next = 0
        self.tokens = len(ids)

    def batch(self, count: int) -> npt.NDArray[np.int64]:
        """Return ids (count, rows + 1)."""
        if self._next + count > len(self._order):
            self._order = self._rng.permutation(self._starts)
            self._next = 0
        starts = self._order[self._next : self._next + count]
        self._next += count
        return self._ids[starts[:, None] + np.arange(self._rows + 1)].astype(np.int64)


def main() -> None:
    """Train, save and evaluate."""
    arguments = docopt(str(__doc__))
    corpus, out = Path(arguments["CORPUS"]), Path(arguments["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    vocab = json.loads((corpus / "ids.json").read_text())["vocab"]
    shape = Shape(vocab)
    if arguments["--dense"]:
        shape = Shape(vocab, experts=1, top_k=1, inner=shape.top_k * shape.inner)
    (out / "shape.json").write_text(json.dumps(asdict(shape)))
    train(shape, corpus, out, arguments)


def train(shape: Shape, corpus: Path, out: Path, arguments: dict[str, Any]) -> None:
    """Train for the time or the steps given; the log has the loss on held-out stories."""
    device, seed = arguments["--device"], int(arguments["--seed"])
    seconds, batch = float(arguments["--seconds"]), int(arguments["--batch"])
    balance_weight = float(arguments["--balance"])
    last_step = int(arguments["--steps"]) if arguments["--steps"] else None
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    stories = Stories(corpus / "train.npy", shape.context, seed)
    w = initial_weights(shape, seed, device)
    table = rope_table(shape, shape.context, device)
    decayed = [value for value in w.values() if value.ndim > 1]
    others = [value for value in w.values() if value.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device != "cpu")

    def loss_of(ids: Any) -> tuple[Any, Any, Any]:
        with torch.autocast(device, torch.bfloat16):
            return losses(shape, w, ids, table)

    compiled = torch.compile(loss_of) if device != "cpu" else loss_of
    log: list[dict[str, float]] = []
    step, started, saved = 0, time.monotonic(), time.monotonic()
    spent = 0.0
    while True:
        ids = torch.from_numpy(stories.batch(batch)).to(device)
        if last_step is not None:
            done = step / last_step
        else:
            done = spent / seconds
        if done >= 1:
            break
        rate = float(arguments["--rate"]) * min(1.0, (step + 1) / WARM_UP)
        rate *= min(1.0, (1 - done) / COOL_DOWN)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, balance, z = compiled(ids)
        (loss + balance_weight * balance + ROUTER_Z * z).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:  # compiling is over
            loss.item()
            started = time.monotonic()
        if step % 100 == 0:
            entry = {"step": step, "loss": loss.item(), "balance": balance.item(), "rate": rate}
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if step % 20 == 0:
            torch.cuda.synchronize() if device != "cpu" else None
            spent = time.monotonic() - started
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save(w, out)
            saved = time.monotonic()
    save(w, out)
    tokens = step * batch * shape.context
    perplexities = {
        name: math.exp(loss_on(shape, w, corpus / f"{name}.npy", table, device))
        for name in ("held_out", "new_plots")
    }
    figures = {
        "steps": step,
        "tokens": tokens,
        "epochs": tokens / stories.tokens,
        "tokens_per_second": tokens / (time.monotonic() - started),
        "perplexity": perplexities,
        "weights": sum(value.numel() for value in w.values()),
    }
    print(json.dumps(figures), flush=True)
    (out / "log.json").write_text(json.dumps({"figures": figures, "log": log}))


def loss_on(shape: Shape, w: Weights, path: Path, table: tuple[Any, Any], device: str) -> float:
    """Return the mean loss in nats over rows of stories that were not trained on."""
    stories = Stories(path, shape.context, 0)
    rows = min(HELD_OUT_ROWS, stories.tokens // shape.context)
    total = 0.0
    for start in range(0, rows, 32):
        ids = torch.from_numpy(stories.batch(min(32, rows - start))).to(device)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            total += losses(shape, w, ids, table)[0].item() * len(ids)
    return total / rows


def save(w: Weights, out: Path) -> None:
    """Write the weights as float16, in pieces that are easy to carry."""
    pieces: list[dict[str, Any]] = [{}]
    for name, value in w.items():
        array = value.detach().cpu().numpy().astype(np.float16)
        if sum(other.nbytes for other in pieces[-1].values()) + array.nbytes > PIECE_BYTES:
            pieces.append({})
        pieces[-1][name] = array
    for number, arrays in enumerate(pieces):
        part = out / "part.npz"
        np.savez(part, **arrays)
        part.replace(out / f"weights.{number}.npz")


if __name__ == "__main__":
    main()
