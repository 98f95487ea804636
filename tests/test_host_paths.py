"""Every way to multiply bytes gives the same integers, and the cache of machine code is safe."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any

import numba
import numpy as np
import pytest
from make_model import make_model
from model_shapes import LOGITS_SHAPES

from strata_nb import compiling
from strata_nb.errors import ConfigError
from strata_nb.kernels.host import instructions, vectors
from strata_nb.kernels.host.capability import Path, choose
from strata_nb.raw_memory import store

AVX2 = {"avx2": True, "f16c": True, "fma": True}
AVX512 = {**AVX2, "avx512bw": True, "avx512vl": True, "avx512vnni": True}


def runnable() -> list[Path]:
    """Return the paths of this processor."""
    features = compiling.llvmlite.binding.get_host_cpu_features()
    paths = []
    for path in Path:
        try:
            paths.append(choose(features, path.value))
        except ConfigError:
            continue
    return paths


paths = pytest.mark.parametrize("path", runnable(), ids=lambda path: path.value)


def test_the_fastest_path_that_the_processor_has_is_chosen() -> None:
    assert choose(AVX512) is Path.AVX512_VNNI
    assert choose({**AVX2, "avxvnni": True}) is Path.AVX_VNNI
    assert choose(AVX2) is Path.AVX2
    assert choose({**AVX2, "fma": False}) is Path.GENERIC
    assert choose({}) is Path.GENERIC
    assert choose(AVX512, "avx2") is Path.AVX2


def test_a_path_that_the_processor_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="STRATA_NB_CPU_PATH=avx512_vnni") as caught:
        choose(AVX2, "avx512_vnni")
    assert caught.value.hint == "it can run avx2, generic"
    with pytest.raises(ConfigError, match="STRATA_NB_CPU_PATH=fast"):
        choose(AVX2, "fast")


@paths
@pytest.mark.parametrize("narrow", [True, False])
def test_products_of_bytes_are_exact_on_every_path(
    path: Path, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "PATH", path)
    dot = instructions.dot_narrow if narrow else instructions.dot_wide
    load_bytes, load_integers = vectors.load_bytes, vectors.load_integers

    @numba.njit
    def run(sums, unsigned, signed, out):  # type: ignore[no-untyped-def]
        store(out, dot(load_integers(sums), load_bytes(unsigned), load_bytes(signed)))

    largest = 127 if narrow else 255
    rng = np.random.default_rng(0)
    cases = [
        (np.full(64, u, np.uint8), np.full(64, s, np.int8))
        for u in (0, largest)
        for s in (-127, 127)
    ]
    for _ in range(50):
        unsigned = rng.integers(0, largest + 1, 64, dtype=np.uint8)
        cases.append((unsigned, rng.integers(-127, 128, 64).astype(np.int8)))
    for unsigned, signed in cases:
        sums = rng.integers(-(2**30), 2**30, 16).astype(np.int32)
        out = np.zeros(16, np.int32)
        run(*(array.ctypes.data for array in (sums, unsigned, signed, out)))
        products = unsigned.astype(np.int32) * signed
        assert np.array_equal(out, sums + products.reshape(16, 4).sum(axis=1))


@paths
def test_levels_are_looked_up_on_every_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "PATH", path)
    levels = [7, 255, 0, 128, 1, 2, 3, 250, 9, 10, 127, 12, 13, 200, 15, 99]
    look_up, load_bytes = instructions.look_up(levels), vectors.load_bytes

    @numba.njit
    def run(numbers, out):  # type: ignore[no-untyped-def]
        store(out, look_up(load_bytes(numbers)))

    numbers = np.random.default_rng(0).integers(0, 16, 64, dtype=np.uint8)
    out = np.zeros(64, np.uint8)
    run(numbers.ctypes.data, out.ctypes.data)
    assert np.array_equal(out, np.array(levels, np.uint8)[numbers])


@paths
def test_every_float16_is_widened_exactly_on_every_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "PATH", path)
    load, widen = vectors.loader(vectors.Vector("u16", 16)), instructions.floats_of_halves

    @numba.njit
    def run(halves, out, count):  # type: ignore[no-untyped-def]
        for number in range(0, count, 16):
            store(out + 4 * number, widen(load(halves + 2 * number)))

    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    out = np.zeros(65536, np.float32)
    run(halves.ctypes.data, out.ctypes.data, 65536)
    assert np.array_equal(out, halves.astype(np.float32), equal_nan=True)


# -- whole kernels, each in a program of its own --------------------------------------------------

PROGRAM = """
import sys
import numpy as np
from random_blocks import random_blocks
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.host.array_products import multiply, quantise
from strata_nb.packing import PACKED, pack
x = quantise(np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32))
names = sys.argv[2].split(",")
for kind in sorted(PACKED) if names == ["all"] else [TensorType[name] for name in names]:
    rng = np.random.default_rng(int(kind))
    raw = random_blocks(kind, 19 * 512 // block_layout(kind).values, 0.02, rng)
    y = np.zeros((5, 19), np.float32)
    multiply(kind, pack(kind, raw, 19, 512), x, y)
    with open(sys.argv[1], "ab") as file:
        file.write(y.tobytes())
"""


def start(out: FilePath, types: str, **variables: str) -> subprocess.Popen[bytes]:
    root = FilePath(__file__).parent.parent
    places = os.pathsep.join([str(root), str(root / "tools")])
    environment = {**os.environ, "PYTHONPATH": places, **variables}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(out), types], env=environment)


def bits_on(path: Path, types: str, folder: FilePath) -> bytes:
    out = folder / f"{path.value}.bin"
    with start(out, types, STRATA_NB_CPU_PATH=path.value) as process:
        assert process.wait() == 0
    return out.read_bytes()


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_NL"])
def test_the_portable_path_gives_the_bits_of_the_fastest(kind: str, tmp_path: FilePath) -> None:
    fastest = bits_on(runnable()[0], kind, tmp_path)
    assert len(fastest) == 5 * 19 * 4
    assert bits_on(Path.GENERIC, kind, tmp_path) == fastest


@pytest.mark.slow
def test_all_paths_give_the_same_bits_for_all_types(tmp_path: FilePath) -> None:
    fastest, *others = runnable()
    expected = bits_on(fastest, "all", tmp_path)
    assert len(expected) == 20 * 5 * 19 * 4
    for path in others:
        assert bits_on(path, "all", tmp_path) == expected, path


MODEL_PROGRAM = """
import sys
import numpy as np
from strata_nb import Engine, Options
with Engine.open(Options(sys.argv[1], "host", ctx_size=256, prefill=32, cache_type_v="int8")) as e:
    ids = np.random.default_rng(0).integers(0, e.description.vocab_size, 70).tolist()
    sys.stdout.buffer.write(e.logits(ids).tobytes())
"""


@pytest.mark.slow
def test_a_model_has_the_same_logits_on_all_paths(tmp_path: FilePath) -> None:
    model = tmp_path / "model.gguf"
    make_model(model, LOGITS_SHAPES["qwen3moe"])
    found = {
        path: subprocess.run(
            [sys.executable, "-c", MODEL_PROGRAM, str(model)],
            env={**os.environ, "STRATA_NB_CPU_PATH": path.value},
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        for path in runnable()
    }
    fastest = found[runnable()[0]]
    assert len(fastest) == 70 * LOGITS_SHAPES["qwen3moe"].vocab * 4
    assert [path for path, logits in found.items() if logits != fastest] == []


def test_programs_share_a_cache_and_do_not_mix_up_its_parts(tmp_path: FilePath) -> None:
    # The first two start at once with an empty cache, and compile different kernels, whose parts
    # have the same names in the source. The third takes both from the cache.
    cache = tmp_path / "cache"
    types = ["Q8_0", "Q4_0", "Q8_0,Q4_0"]
    outs = [tmp_path / f"{number}.bin" for number in range(3)]
    programs = [
        start(out, names, STRATA_NB_CACHE_DIR=str(cache))
        for out, names in zip(outs[:2], types[:2], strict=True)
    ]
    assert [program.wait() for program in programs] == [0, 0]
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert before
    with start(outs[2], types[2], STRATA_NB_CACHE_DIR=str(cache)) as program:
        assert program.wait() == 0
    assert outs[2].read_bytes() == outs[0].read_bytes() + outs[1].read_bytes()
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}
    assert after == before  # the third compiled nothing
    assert not list(cache.rglob("*.tmp*"))


DOUBLE = "def double(x):\n    return x + x\n"


def double(folder: FilePath, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compile a small function with its cache in a folder; return what it makes of 21."""
    monkeypatch.setattr(compiling, "cache_folder", lambda: folder)
    names = {"__name__": __name__}
    exec(compile(DOUBLE, "<double>", "exec"), names)
    return compiling.compiled("int64(int64)")(names["double"])(21)  # type: ignore[arg-type, no-any-return]


def test_a_file_of_the_cache_that_was_cut_short_is_made_again(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert double(tmp_path, monkeypatch) == 42
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        whole = file.read_bytes()
        for size in (0, len(whole) // 2):
            file.write_bytes(whole[:size])
            assert double(tmp_path, monkeypatch) == 42
            assert len(file.read_bytes()) == len(whole)


def test_a_function_is_compiled_when_it_is_used_and_once_for_all_threads(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    made: list[str] = []
    compile_now = compiling._compile

    def counted(signature: str, function: Any) -> Any:
        made.append(signature)
        return compile_now(signature, function)

    monkeypatch.setattr(compiling, "_compile", counted)
    names = {"__name__": __name__}
    exec(compile(DOUBLE, "<double>", "exec"), names)
    function = compiling.compiled("int64(int64)")(names["double"])
    assert made == []
    assert not function.is_on_disk()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(function, range(8))) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert compiling.address_of(function) == compiling.address_of(function.made())
    assert made == ["int64(int64)"]
    assert function.is_on_disk()


@pytest.mark.parametrize("content", ["flipped", "foreign"])
def test_a_file_of_the_cache_that_was_damaged_is_made_again(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    assert double(tmp_path, monkeypatch) == 42
    (code,) = tmp_path.glob("*.nbc")
    whole = code.read_bytes()
    middle = len(whole) // 2
    flipped = bytes(byte ^ 0xFF for byte in whole[middle : middle + 200])
    foreign = pickle.dumps((1, 2, 3))
    code.write_bytes(
        foreign if content == "foreign" else whole[:middle] + flipped + whole[middle + 200 :]
    )
    assert double(tmp_path, monkeypatch) == 42
    assert double(tmp_path, monkeypatch) == 42


def test_a_cache_that_cannot_be_written_is_refused_with_a_remedy(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="machine code cannot be kept on disk") as caught:
        double(tmp_path / "file" / "cache", monkeypatch)
    assert "STRATA_NB_CACHE_DIR=FOLDER" in caught.value.hint


def test_a_cache_that_may_not_be_looked_into_is_refused_with_a_remedy(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path / ("x" * 300))  # too long
    with pytest.raises(ConfigError, match="machine code cannot be kept on disk") as caught:
        compiling.compiled("int64(int64)")(lambda x: x).is_on_disk()
    assert "STRATA_NB_CACHE_DIR=FOLDER" in caught.value.hint


def test_the_cache_is_another_one_when_a_source_or_the_path_changes(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernel.py").write_text("import numba\n")
    monkeypatch.setenv("STRATA_NB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("STRATA_NB_CPU_PATH", raising=False)
    monkeypatch.setattr(compiling, "_PACKAGE", package)

    def name() -> str:
        return compiling.cache_folder.__wrapped__().name  # type: ignore[no-any-return]

    first = name()
    assert name() == first
    monkeypatch.setenv("STRATA_NB_CPU_PATH", "avx2")
    assert name() != first
    monkeypatch.delenv("STRATA_NB_CPU_PATH")
    assert name() == first
    (package / "kernel.py").write_text("import numba  # changed\n")
    assert name() != first
