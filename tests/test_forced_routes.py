"""Routes that are forced on a model: every device follows them, and takes no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_world import SHAPE, make_tiny, opened, random_tokens, read_in, same_bits
from make_model import make_model
from make_routes import make_routes
from numpy.typing import NDArray

from strata_nb import Engine, Options, Sampling, device_layout, models
from strata_nb.cache.routing import forced_routes
from strata_nb.errors import ConfigError, FileFormatError
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.reference import Floats

LINES = 20  # of the trace; texts are longer
IDS = random_tokens(30)
Routes = NDArray[np.int16]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forced") / "model.gguf"
    make_model(path, SHAPE)
    return path


@pytest.fixture(scope="module")
def trace(path: Path) -> tuple[Path, Routes]:
    routes = make_routes(layers=3, experts=16, top_k=3, tokens=LINES)
    file = path.with_name("routes.npy")
    np.save(file, routes)
    return file, routes


def judged(path: Path, file: Path | None) -> Floats:
    """Return the judge's logits (len(IDS), vocab), which reads them one by one and many at once."""
    options = Options(path, "reference", ctx_size=64, prefill=8, force_routes=file)
    with Engine.open(options) as engine, engine.open_session() as session:
        session.extend(IDS[:-1])
        session.append(IDS[-1])
        return session.next_logits()


@pytest.mark.parametrize("device", ["host", "host:1x64MiB"])
def test_a_device_takes_the_routes_of_the_file_and_comes_near_the_judge_with_them(
    device: str, path: Path, trace: tuple[Path, Routes], tmp_path: Path
) -> None:
    file, routes = trace
    taken = tmp_path / "taken.npy"
    with opened(path, device, routing_trace=taken, force_routes=file) as model:
        whole = read_in(model, IDS, len(IDS))
        one_by_one = read_in(model, IDS, 1)
        model.save_trace(taken)
    wanted = np.sort(routes[np.arange(len(IDS)) % LINES], axis=2)
    assert np.array_equal(np.load(taken), np.concatenate([wanted, wanted]))
    assert same_bits(whole, one_by_one)
    expected, free = judged(path, file), judged(path, None)
    assert np.abs(whole[-1] - expected).max() < 0.1 * np.abs(expected - free).max()


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_whatever_a_card_launches_to_choose_experts_is_given_the_routes(
    path: Path, trace: tuple[Path, Routes], rows: int
) -> None:
    for file, layer_bytes in ((None, 0), (trace[0], 64 * SHAPE.top_k * 2)):
        with opened(path, ctx=64, rows=8, force_routes=file) as model:
            body = model._programs.body
            given = [
                (one.arguments["forced"], one.arguments["positions"])
                for one in card_launches(body, rows)
                if "renormalise" in one.arguments
            ]
            (first, positions), record = given[0], model._programs.record
        assert positions == record.positions
        assert bool(first) is bool(file)
        layers = range(SHAPE.layers)
        assert given == [(first + layer_bytes * layer, positions) for layer in layers]


def test_a_text_takes_the_routes_again_that_it_took_before_it_was_rewound(
    path: Path, trace: tuple[Path, Routes]
) -> None:
    options = Options(path, "host", ctx_size=64, threads=1, force_routes=trace[0])
    with Engine.open(options) as engine, engine.open_session() as session:
        texts = []
        for _ in range(2):
            session.rewind(0)
            session.append(IDS[0])
            texts.append(
                [one.id for one in session.generate(max_tokens=5, sampling=Sampling(temperature=0))]
            )
    assert texts[0] == texts[1]


def test_routes_of_another_model_are_refused_with_their_numbers(tmp_path: Path) -> None:
    routes = np.tile(np.array([1, 6], np.int16), (5, 2, 1))
    routes[3, 1] = [7, 2]
    file = tmp_path / "routes.npy"
    np.save(file, routes)
    assert forced_routes(file, 2, 8, 2, 7).shape == (2, 7, 2)
    with pytest.raises(
        ConfigError, match=r"2 experts in each of 2 layers, where .* 3 in each of 4"
    ):
        forced_routes(file, 4, 8, 3, 7)
    with pytest.raises(ConfigError, match="token 3, layer 1: expert 7, where the model has 7"):
        forced_routes(file, 2, 7, 2, 7)
    with pytest.raises(ConfigError, match="no experts"):
        forced_routes(file, 2, 0, 0, 7)
    with pytest.raises(ConfigError, match=r"none\.npy: No such file"):
        forced_routes(tmp_path / "none.npy", 2, 8, 2, 7)
    routes[2, 0] = [5, 5]
    np.save(file, routes)
    with pytest.raises(FileFormatError, match=r"token 2, layer 0: experts \[5, 5\]"):
        forced_routes(file, 2, 8, 2, 7)
    file.write_bytes(b"routes")
    with pytest.raises(FileFormatError, match="no numpy array"):
        forced_routes(file, 2, 8, 2, 7)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i2', 'fortran_order': False, 'shape': (1, 2, 2",
        "{[]: 1}",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (True, 2, 2), }",
        "{'descr': ('<i2',), 'fortran_order': False, 'shape': (1, 2, 2), }",
        "{'descr': '<i2', 'fortran_order': False, 'shape': (1" + 30 * "0" + ", 2, 2), }",
        "-" * 5000 + "1",
    ],
)
def test_a_file_whose_header_is_damaged_is_refused_as_no_array(tmp_path: Path, header: str) -> None:
    file = tmp_path / "routes.npy"
    magic = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    file.write_bytes(magic + header.encode() + bytes(64))
    with pytest.raises(FileFormatError, match="no numpy array"):
        forced_routes(file, 2, 8, 2, 7)


def test_a_model_is_not_loaded_for_routes_of_another(
    tmp_path: Path, trace: tuple[Path, Routes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tmp_path / "tiny.gguf"
    make_tiny(tiny)
    monkeypatch.setattr(models, "open_reference", pytest.fail)
    monkeypatch.setattr(device_layout, "dense_layout", pytest.fail)
    for device in ("host", "reference"):
        with pytest.raises(ConfigError, match=r"--force-routes .* 2 in each of 2"):
            Engine.open(Options(tiny, device, ctx_size=64, force_routes=trace[0]))
