"""Judge a device: is it as near the float32 forward as llama.cpp is? Exit status 1 if it is not.

Run it from the root of the project, in an environment that also has llama-cpp-python, which is no
dependency of the project, or with --peer.

Usage:
  judge.py MODEL --text=FILE [--apart] [--device=NAME] [--tokens=N] [--threads=N] [--name=NAME]
           [--peer=FILE] [--expert-cache=SIZE]
  judge.py --random [--only=NAMES] [--device=NAME] [--tokens=N] [--threads=N] [--name=NAME]
           [--peer=FILE] [--jobs=N]
  judge.py --help

Options:
  --text=FILE    evaluate the first tokens of a text, by the model's own tokenizer
  --apart        the text holds documents, a blank line between them: read each alone, from its
                 first token
  --random       evaluate random tokens on the random models of tools/oracle_models.py, and on a
                 random mixture of experts of every type that a matrix can have but F64
  --only=NAMES   of those, the ones with these names, comma-separated; then nothing is stored
  --device=NAME  the device that is judged [default: auto]
  --tokens=N     how many; of documents, the first whole ones that have as many together
                 [default: 1000]
  --threads=N    of the device; default: its own choice
  --name=NAME    the figures go to bench/results/judge_NAME.json; default: the model's name, or
                 random
  --peer=FILE    take llama.cpp's figures from an earlier result of this program on the same model
                 and tokens, for a machine that has no llama-cpp-python
  --expert-cache=SIZE  as the commands have it [default: auto]; with few slots a card shares the
                 missed experts of single rows with the CPU
  --jobs=N       random models that are judged at a time [default: 1]

Both the device and llama.cpp read the tokens twice: as a prompt, and one by one. The criteria are
those of tools/criteria.py, over the rows of all documents together.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from criteria import Check, Figures, random_checks, row_error_median, text_checks
from docopt import docopt
from make_model import make_model
from model_shapes import LOGITS_SHAPES
from oracle_llama_cpp import PROMPT_BATCH, distance, llama_cpp_logits
from oracle_models import RANDOM_MODELS, float32_logits, random_ids, text_ids
from results import write_result

from strata_nb import Engine, Options
from strata_nb.commands.provenance import device_name
from strata_nb.formats import DEQUANTISABLE, TensorType
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.host.capability import PATH
from strata_nb.kernels.reference import Floats
from strata_nb.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
Documents = list[Ids]  # each is read alone; a text that is read as one is one document
Criteria = Callable[[Figures, Figures], list[Check]]
Result = dict[str, dict[str, object]]  # of the paths of one model

# The mixture has a matrix of every use, and rows of whole blocks whatever the type. F64 is left out
# because llama.cpp aborts on it: it has no product with such a matrix.
TYPE_MODELS = {
    f"qwen3moe_{kind.name}": partial(
        make_model, shape=LOGITS_SHAPES["qwen3moe"], rules=[("*", kind)]
    )
    for kind in sorted(DEQUANTISABLE - {TensorType.F64})
}


def main() -> int:
    """Judge what the command line names; return the exit status."""
    arguments = docopt(str(__doc__))
    count = int(arguments["--tokens"])
    threads = int(arguments["--threads"]) if arguments["--threads"] else None
    peer = Peer(arguments["--peer"])
    cache = arguments["--expert-cache"]
    judge = partial(judge_model, arguments["--device"], threads, peer, expert_cache=cache)
    print("model, path | criterion | device | llama.cpp | limit | verdict")
    print("---|---|---|---|---|---")
    if arguments["--random"]:
        results = judge_random(judge, count, arguments["--only"], int(arguments["--jobs"]))
        size = Size(1, count)
        name = "random"
    else:
        model, text = Path(arguments["MODEL"]), Path(arguments["--text"])
        with GGUFFile.open(model) as file:
            read = document_ids if arguments["--apart"] else one_document
            documents = read(file, text, count)
        results = {model.name: judge(model, documents, text_checks)}
        size = Size.of(documents)
        name = model.stem
    if arguments["--only"] is None:
        store(arguments["--name"] or name, arguments["--device"], command(arguments), size, results)
    failed = sum(not path["passed"] for paths in results.values() for path in paths.values())
    print(f"\n{size}: {failed} of {2 * len(results)} paths failed")
    return 1 if failed else 0


def judge_random(
    judge: Callable[[Path, Documents, Criteria], Result], count: int, only: str | None, jobs: int
) -> dict[str, Result]:
    """Judge random models by name, all of them or those named in `only`, `jobs` at a time."""
    makers = RANDOM_MODELS | TYPE_MODELS
    names = list(makers) if only is None else only.split(",")
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no such model; known: {', '.join(makers)}")
    one = partial(judge_random_model, judge, count)
    if jobs == 1:
        return dict(zip(names, map(one, names), strict=True))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def judge_random_model(
    judge: Callable[[Path, Documents, Criteria], Result], count: int, name: str
) -> Result:
    """Make a random model, and judge it on random tokens."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{name}.gguf"
        (RANDOM_MODELS | TYPE_MODELS)[name](path)
        with GGUFFile.open(path) as file:
            ids = random_ids(file, count)
        return judge(path, [ids], random_checks)


def one_document(file: GGUFFile, text: Path, count: int) -> Documents:
    """Return the first `count` tokens of a text file as one document."""
    return [text_ids(file, text, count)]


def document_ids(file: GGUFFile, text: Path, count: int) -> Documents:
    """Return the first documents of a text file, so many that they have `count` tokens or more.

    A document is a paragraph: a blank line ends it. It is encoded by itself.
    """
    tokenizer = Tokenizer.from_gguf(file)
    documents: Documents = []
    tokens = 0
    for paragraph in re.split(r"\n\s*\n", text.read_text(encoding="utf-8")):
        if tokens >= count:
            break
        if paragraph.strip():
            documents.append(np.array(tokenizer.encode(paragraph.strip("\n"))))
            tokens += len(documents[-1])
    if tokens < count:
        raise SystemExit(f"{text} has {Size.of(documents)}, wanted {count} tokens")
    return documents


@dataclass(frozen=True, slots=True)
class Size:
    """Say how much was read. Figures are compared only where it is the same."""

    documents: int
    tokens: int  # of all documents together

    @classmethod
    def of(cls, documents: Documents) -> Size:
        """Count documents and their tokens."""
        return cls(len(documents), sum(map(len, documents)))

    def __str__(self) -> str:
        documents = "1 document" if self.documents == 1 else f"{self.documents} documents"
        return f"{self.tokens} tokens in {documents}"


class Peer:
    """Give llama.cpp's figures: measured now, or from an earlier result."""

    def __init__(self, result: str | None) -> None:
        self._result = result
        self._stored: dict[str, Result] | None = None
        if result is not None:
            stored = json.loads(Path(result).read_text())
            # Results that do not count documents are of one.
            self._size = Size(stored.get("documents", 1), stored["tokens"])
            self._stored = stored["models"]

    def check(self, documents: Documents) -> None:
        """Exit where the earlier result is not of as many documents and tokens."""
        if self._stored is not None and self._size != Size.of(documents):
            raise SystemExit(f"--peer {self._result}: {self._size}, not {Size.of(documents)}")

    def figures(
        self, path: Path, documents: Documents, exact: Floats, way: str
    ) -> dict[str, float]:
        """Return the figures of one way through a model: prompt or decode."""
        if self._stored is None:
            batch = PROMPT_BATCH if way == "prompt" else 1
            return figures(
                exact, read_apart(lambda ids: llama_cpp_logits(path, ids, batch), documents)
            )
        found = self._stored.get(path.name, self._stored.get(path.stem))
        if found is None:
            raise SystemExit(f"--peer: no model {path.name} among {', '.join(self._stored)}")
        stored: dict[str, float] = found[way]["llama.cpp"]  # type: ignore[assignment]
        return stored


def judge_model(
    device: str,
    threads: int | None,
    peers: Peer,
    path: Path,
    documents: Documents,
    criteria: Criteria,
    expert_cache: str = "auto",
) -> Result:
    """Return figures and checks of both paths through a model, and print the checks."""
    peers.check(documents)
    with GGUFFile.open(path) as file:
        exact = read_apart(partial(float32_logits, file), documents)
    longest = max(map(len, documents))
    options = Options(
        model=path, device=device, ctx_size=longest, threads=threads, expert_cache=expert_cache
    )
    with Engine.open(options) as engine:
        logits = {
            "prompt": read_apart(lambda ids: engine.logits(ids.tolist()), documents),
            "decode": read_apart(partial(decode_logits, engine), documents),
        }
        by_cpu = engine.describe().cpu_experts
    result: Result = {}
    if by_cpu:
        print(f"{path.stem} | {by_cpu:,} missed experts were computed by the CPU")
    for name in ("prompt", "decode"):
        ours = figures(exact, logits[name])
        peer = peers.figures(path, documents, exact, name)
        checks = criteria(ours, peer)
        for check in checks:
            print(f"{path.stem}, {name} | {check.row()}", flush=True)
        result[name] = {
            "passed": all(check.passed for check in checks),
            "checks": [asdict(check) for check in checks],
            "device": ours,
            "llama.cpp": peer,
            "computed_by_cpu": by_cpu if name == "decode" else 0,
        }
    return result


def read_apart(logits_of: Callable[[Ids], Floats], documents: Documents) -> Floats:
    """Return the logits (tokens of all documents, vocab); `logits_of` reads one in a new context.

    Figures over these rows weigh every token alike, however long its document.
    """
    return np.concatenate([logits_of(ids) for ids in documents])


def decode_logits(engine: Engine, ids: Ids) -> Floats:
    """Return the logits (tokens, vocab) of a session that reads one token at a time."""
    logits = np.empty((len(ids), engine.description.vocab_size), np.float32)
    with engine.open_session() as session:
        for row, token in zip(logits, ids.tolist(), strict=True):
            session.extend([token])
            row[:] = session.next_logits()
    return logits


def figures(exact: Floats, logits: Floats) -> dict[str, float]:
    """Return how far `logits` are from the judge's, both (tokens, vocab)."""
    return distance(exact, logits) | {"row_error_median": row_error_median(exact, logits)}


def command(arguments: Mapping[str, str | None]) -> str:
    """Return the command that makes the figures again, without where things lie on this machine."""
    words = ["python tools/judge.py"]
    if arguments["MODEL"] and arguments["--text"]:
        words += [Path(arguments["MODEL"]).name, f"--text={Path(arguments['--text']).name}"]
    else:
        words.append("--random")
    if arguments["--apart"]:
        words.append("--apart")
    flags = ["--device", "--tokens", "--threads", "--name", "--peer"]
    if arguments["--expert-cache"] != "auto":
        flags.append("--expert-cache")
    return " ".join(words + [f"{flag}={arguments[flag]}" for flag in flags if arguments[flag]])


def store(name: str, device: str, command: str, size: Size, results: Mapping[str, Result]) -> None:
    """Write the figures with all that they depend on."""
    peer_packages = () if "--peer" in command else ("llama_cpp_python",)
    write_result(
        f"judge_{name}",
        "how far a device and llama.cpp are from the float32 forward, and the criteria: KL in "
        "nats, agreement of the best token, median over rows of |logits - float32| / |float32|",
        command,
        {
            "device": device_name(device),
            "cpu_path": PATH.value,
            **asdict(size),
            "models": results,
        },
        ("numpy", "numba", "llvmlite", *peer_packages),
    )


if __name__ == "__main__":
    sys.exit(main())
