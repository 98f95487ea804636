"""Run llama.cpp for bench/beside_llama_cpp.py: orders come in as lines of JSON, answers go out so.

Usage:
  llama_cpp_worker.py MODEL CELLS THREADS

  {"do": "load", "mapped": true, "repacked": true}     open the model, forget the contexts
  {"do": "context", "flash": true, "rows": 512}        choose a context, made once; rows: n_ubatch
  {"do": "prompt", "ids": [...]}                       read a prompt
  {"do": "decode", "ids": [...], "tokens": 128}        read ids, then generate greedily
  {"do": "rest"}                                       nothing; answers CPU seconds so far

An answer is {"s": seconds}, without what comes before the clock: of a decode, reading its ids.
It needs only llama-cpp-python and numpy, so that it runs in an environment of its own. The loop is
llama.cpp's bare one: `llama_decode`, the last row's logits, numpy's argmax.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np

MOST_BATCH_ROWS = 2048  # n_batch: ids of one llama_decode
WARM_UP_ROWS = 64
ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR


def quiet(level: int, text: bytes, data: object) -> None:
    """Take a line of the log and drop it, unless it is an error."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode("utf-8", "replace"))


class Peer:
    """Hold the open model and its contexts; what a call returns are seconds."""

    def __init__(self, path: str, cells: int, threads: int) -> None:
        self._path, self._cells, self._threads = path, cells, threads
        self._model: Any = None
        self._contexts: dict[tuple[bool, int], Any] = {}
        self._context: Any = None
        self._vocab_size = 0

    def load(self, mapped: bool, repacked: bool) -> float:
        """Open the model; `repacked`: llama.cpp may copy weights into layouts of its own."""
        for context in self._contexts.values():
            llama_cpp.llama_free(context)
        self._contexts.clear()
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
        options = llama_cpp.llama_model_default_params()
        options.load_mode = (
            llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
        )
        options.use_extra_bufts = repacked
        options.n_gpu_layers = 0
        start = time.perf_counter()
        self._model = llama_cpp.llama_model_load_from_file(self._path.encode(), options)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot open {self._path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        return time.perf_counter() - start

    def context(self, flash: bool, rows: int) -> float:
        """Choose a context for what follows; a new one reads a few tokens, to be warm."""
        start = time.perf_counter()
        key = flash, rows
        made = key not in self._contexts
        if made:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = self._cells
            options.n_batch = MOST_BATCH_ROWS
            options.n_ubatch = rows
            options.n_threads = options.n_threads_batch = self._threads
            options.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
                if flash
                else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            context = llama_cpp.llama_init_from_model(self._model, options)
            if not context:
                raise SystemExit(f"llama.cpp makes no context of {self._cells} cells")
            self._contexts[key] = context
        self._context = self._contexts[key]
        if made:
            self.prompt([0] * min(WARM_UP_ROWS, self._cells - 1))
            self.decode([0], 1)
        return time.perf_counter() - start

    def prompt(self, ids: list[int]) -> float:
        """Read ids into an empty context, until the logits of the last one are there."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        batches = [
            (llama_cpp.llama_token * len(some))(*some)
            for some in (
                ids[at : at + MOST_BATCH_ROWS] for at in range(0, len(ids), MOST_BATCH_ROWS)
            )
        ]
        start = time.perf_counter()
        for batch in batches:
            self._read(batch, len(batch))
        self._best()
        return time.perf_counter() - start

    def decode(self, ids: list[int], tokens: int) -> float:
        """Read ids, then choose and read `tokens` tokens, one after the other."""
        self.prompt(ids)
        batch = (llama_cpp.llama_token * 1)()
        start = time.perf_counter()
        for _ in range(tokens):
            batch[0] = self._best()
            self._read(batch, 1)
        return time.perf_counter() - start

    def _read(self, ids: Any, count: int) -> None:
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(ids, count))
        if status != 0:
            raise SystemExit(f"llama_decode of {count} tokens: status {status}")

    def _best(self) -> int:
        """Return the best token after the last one; waits until it was computed."""
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def main() -> None:
    """Answer orders until there are no more."""
    # Whatever a library prints goes to stderr, answers alone to the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    log = llama_cpp.llama_log_callback(quiet)  # held here as long as the library may call it
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    path, cells, threads = sys.argv[1:]
    peer = Peer(path, int(cells), int(threads))
    orders: dict[str, Callable[..., float]] = {
        "load": peer.load,
        "context": peer.context,
        "prompt": peer.prompt,
        "decode": peer.decode,
        "rest": time.process_time,
    }
    about = {
        "llama_cpp_python": version("llama_cpp_python"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "system": llama_cpp.llama_print_system_info().decode(),
    }
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"s": orders[order.pop("do")](**order)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
