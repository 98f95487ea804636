"""How well a model predicts a text, and how far two runs on the same text are apart.

The text is cut into chunks of a fixed number of tokens; each is read in a fresh context and the
second half of it is scored, so that every scored token has at least half a chunk before it (the
convention of llama.cpp's tool of the same name). With p the distribution of a base run and q that
of this run at the same place: KL(p || q) = sum p (log p - log q), in nats.

A logits file is a zip archive of .npy members: `ids.npy` (the tokens of the text), `chunk.npy` (its
length), and per chunk `logits_00000.npy`, float32 (scored rows, vocab). It is written whole or not
at all.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from strata_nb.engine import Engine
from strata_nb.errors import ConfigError, FileFormatError

Floats = npt.NDArray[np.float32]


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Return log probabilities (rows, vocab) in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(base_logits: Floats, logits: Floats) -> npt.NDArray[np.float64]:
    """Return KL(base || this) of each row (rows,), in nats, from two (rows, vocab) arrays."""
    base, ours = log_softmax(base_logits), log_softmax(logits)
    divergence: npt.NDArray[np.float64] = (np.exp(base) * (base - ours)).sum(axis=-1)
    return divergence


@dataclass(slots=True)
class Score:
    """Gather what was measured at each scored token."""

    nll: list[float] = field(default_factory=list)  # nats
    kl: list[float] = field(default_factory=list)  # nats, with a base only
    same_best: list[bool] = field(default_factory=list)  # with a base only

    def add(self, logits: Floats, following: Sequence[int], base: Floats | None) -> None:
        """Score rows of logits (rows, vocab) against the tokens that follow them (rows,)."""
        rows = np.arange(len(following))
        self.nll.extend((-log_softmax(logits)[rows, list(following)]).tolist())
        if base is not None:
            self.kl.extend(kl_divergence(base, logits).tolist())
            self.same_best.extend((base.argmax(axis=-1) == logits.argmax(axis=-1)).tolist())

    def figures(self) -> dict[str, float]:
        """Return the result as numbers; those of a comparison only where there was a base."""
        mean, error = _mean_and_error(self.nll)
        figures = {
            "scored_tokens": len(self.nll),
            "perplexity": math.exp(mean),
            "perplexity_error": math.exp(mean) * error,
        }
        if self.kl:
            mean, error = _mean_and_error(self.kl)
            figures |= {
                "kl_mean": mean,
                "kl_error": error,
                "kl_median": float(np.median(self.kl)),
                "kl_max": max(self.kl),
                "best_token_agreement": sum(self.same_best) / len(self.same_best),
            }
        return figures

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        found = self.figures()
        lines = [
            f"perplexity  {found['perplexity']:.4f} +- {found['perplexity_error']:.4f}  "
            f"({len(self.nll)} tokens)"
        ]
        if self.kl:
            lines.append(
                f"KL(base || this)  mean {found['kl_mean']:.6f} +- {found['kl_error']:.6f}, median "
                f"{found['kl_median']:.6f}, max {found['kl_max']:.6f}  (nats)"
            )
            lines.append(f"best token agrees  {100 * found['best_token_agreement']:.2f}%")
        return lines


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error (0 for one value)."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return float(np.mean(values)), spread / math.sqrt(len(values))


class LogitsWriter:
    """Write a logits file; it appears under its name when the `with` block ends well."""

    def __init__(self, path: Path, ids: Sequence[int], chunk: int) -> None:
        self._path = path
        self._unfinished = path.with_name(path.name + ".tmp")
        self._zip = zipfile.ZipFile(self._unfinished, "w")
        self._count = 0
        self._put("ids.npy", np.asarray(ids, np.int64))
        self._put("chunk.npy", np.asarray(chunk, np.int64))

    def _put(self, name: str, array: npt.NDArray[np.generic]) -> None:
        with self._zip.open(name, "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)

    def add(self, logits: Floats) -> None:
        """Append the scored rows of the next chunk."""
        self._put(f"logits_{self._count:05}.npy", logits)
        self._count += 1

    def __enter__(self) -> LogitsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._zip.close()
        if kind is None:
            self._unfinished.replace(self._path)
        else:
            self._unfinished.unlink(missing_ok=True)


class LogitsReader:
    """Read a logits file; anything else that stands under the name is refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise FileFormatError(
                path,
                None,
                f"not a logits file: {error}",
                hint="--save-logits of another run writes one",
            ) from None
        self.ids: list[int] = self._get("ids.npy").astype(np.int64).ravel().tolist()
        self.chunk = int(self._get("chunk.npy"))

    def _get(self, name: str) -> npt.NDArray[np.generic]:
        try:
            return np.load(io.BytesIO(self._zip.read(name)), allow_pickle=False)  # type: ignore[no-any-return]
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise FileFormatError(
                self._path,
                None,
                f"not a whole logits file: member {name}: {error}",
                hint="write it again with --save-logits",
            ) from None

    def logits(self, number: int, shape: tuple[int, int]) -> Floats:
        """Return the rows of chunk `number`, which must have `shape`."""
        found = self._get(f"logits_{number:05}.npy")
        if found.shape != shape or found.dtype != np.float32:
            raise FileFormatError(
                self._path,
                None,
                f"chunk {number} has logits {found.shape} of {found.dtype}, this run {shape} of "
                "float32",
                hint="compare runs of models with the same vocabulary",
            )
        return found.astype(np.float32, copy=False)

    def close(self) -> None:
        """Close the file."""
        self._zip.close()


def chunks(ids: Sequence[int], chunk: int, most: int | None) -> list[tuple[int, int]]:
    """Return (start, end) of each whole chunk of `ids`; a text shorter than one is one chunk."""
    if len(ids) <= chunk:
        return [(0, len(ids))]
    whole = [(at, at + chunk) for at in range(0, len(ids) - chunk + 1, chunk)]
    return whole[:most]


def scored_rows(
    engine: Engine, ids: Sequence[int], chunk: int, most: int | None
) -> Iterator[tuple[Floats, list[int]]]:
    """Yield, for each chunk, the logits (rows, vocab) of its second half and what follows them.

    The first token of each chunk is replaced by BOS where the model begins a text with it. Raises
    ConfigError for a text of fewer than 2 tokens.
    """
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens", hint="give at least 2 tokens of text")
    tokenizer = engine.tokenizer
    for start, end in chunks(ids, chunk, most):
        piece = list(ids[start:end])
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            piece[0] = tokenizer.bos_id
        first = (len(piece) - 1) // 2
        yield engine.logits(piece)[first:-1], list(ids[start + first + 1 : end])
