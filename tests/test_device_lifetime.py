"""What a model holds of a device: nothing after it is closed, however it came to an end."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from device_world import load, random_tokens, read, same_bits

from strata_nb.backend import HostBackend
from strata_nb.device_model import DeviceModel
from strata_nb.errors import DriverError, StrataError
from strata_nb.kernels.reference import Floats

DEVICE = "host:1x16MiB@512KiB"  # few chunks, each a call that can fail
UNDOING = {  # what gives memory back; it cannot be undone where it fails
    "address_free",
    "free",
    "free_host",
    "release",
    "stream_destroy",
    "synchronize",
    "unmap",
    "unregister_host",
}
IDS = random_tokens(9)


def load_tiny(backend: HostBackend, path: Path) -> DeviceModel:
    return load(backend, path, ctx=64, rows=16)


@pytest.fixture(scope="module")
def exact(tiny: Path) -> Floats:
    with closing(HostBackend("host", 1)) as backend, closing(load_tiny(backend, tiny)) as model:
        return read(model, model.open_sequence(), IDS)


@pytest.fixture(scope="module")
def calls(tiny: Path) -> Counter[str]:
    """How often opening calls each operation."""
    with closing(HostBackend(DEVICE, 1)) as backend, closing(load_tiny(backend, tiny)):
        return Counter(backend.driver.faults.calls)


def check_usable(backend: HostBackend, tiny: Path, exact: Floats) -> None:
    """Open the model again on the same backend, run it, and close it."""
    model = load_tiny(backend, tiny)
    assert same_bits(read(model, model.open_sequence(), IDS), exact)
    model.ledger.check_integrity()
    model.close()
    assert backend.driver.live() == {}


def held_by_the_process() -> tuple[int, int]:
    """Return how many descriptors and mappings of device files this process has."""
    maps = Path("/proc/self/maps").read_text().count("strata-device")
    return len(os.listdir("/proc/self/fd")), maps


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


# Closing.


def test_two_hundred_models_leave_nothing_behind(tiny: Path, exact: Floats) -> None:
    before, threads_before = (0, 0), 0
    for turn in range(203):
        with closing(HostBackend(DEVICE, 2)) as backend:
            check_usable(backend, tiny, exact)
            assert backend.driver.account(0).charged_bytes == 0
        if turn == 2:  # what the first ones load stays loaded
            before, threads_before = held_by_the_process(), threads()
    assert held_by_the_process() == before
    # The system may still be about to end a thread that Python has joined.
    assert threads() < threads_before + 10


def test_one_backend_holds_one_model_after_the_other(tiny: Path, exact: Floats) -> None:
    with closing(HostBackend(DEVICE, 1)) as backend:
        for _ in range(20):
            check_usable(backend, tiny, exact)
        backend.close()


def nothing(model: DeviceModel) -> None:
    pass


def open_sequences(model: DeviceModel) -> None:
    for length in (0, 1, 9):
        sequence = model.open_sequence()
        if length:
            read(model, sequence, IDS[:length])


def forgotten_sequence(model: DeviceModel) -> None:
    sequence = model.open_sequence()
    read(model, sequence, IDS)
    model.forget_sequence(sequence)


def rewound_sequence(model: DeviceModel) -> None:
    sequence = model.open_sequence()
    read(model, sequence, IDS)
    model.rewind(sequence, 3)


def full_sequence(model: DeviceModel) -> None:
    sequence = model.open_sequence()
    for _ in range(8):
        read(model, sequence, IDS[:8])
    with pytest.raises(StrataError):
        read(model, sequence, IDS[:1])


def interrupted_step(model: DeviceModel) -> None:
    backend, run = model._backend, model._backend.run

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    backend.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        read(model, model.open_sequence(), IDS)
    backend.run = run  # type: ignore[method-assign]


def failed_fill(model: DeviceModel) -> None:
    faults = model._backend.driver.faults  # type: ignore[attr-defined]
    faults.plan("copy_async", 2)
    read(model, model.open_sequence(), IDS)
    assert faults.calls["copy_async"] >= 2
    faults.lift()


STATES = (
    nothing,
    open_sequences,
    forgotten_sequence,
    rewound_sequence,
    full_sequence,
    interrupted_step,
    failed_fill,
)


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_a_model_can_be_closed_in_any_state_and_twice(
    tiny: Path, exact: Floats, reach: Callable[[DeviceModel], None]
) -> None:
    with closing(HostBackend(DEVICE, 1)) as backend:
        model = load_tiny(backend, tiny)
        reach(model)
        assert backend.driver.live() != {}
        model.close()
        assert backend.driver.live() == {}
        model.close()
        model.forget_sequence(0)  # a session that is dropped only now
        with pytest.raises(StrataError, match="closed"):
            model.open_sequence()
        check_usable(backend, tiny, exact)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), BrokenPipeError()], ids=repr)
def test_what_fails_while_a_model_begins_to_close_leaves_nothing(
    tiny: Path, exact: Floats, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fails() -> None:
        raise failure

    with closing(HostBackend(DEVICE, 1)) as backend:
        model = load_tiny(backend, tiny)
        assert model._elastic is not None
        monkeypatch.setattr(model._elastic, "flush", fails)  # says what is unsaid
        with pytest.raises(type(failure)):
            model.close()
        assert backend.driver.live() == {}
        check_usable(backend, tiny, exact)


def test_ctrl_c_while_a_model_closes_comes_when_nothing_is_left(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(HostBackend(DEVICE, 1)) as backend:
        model = load_tiny(backend, tiny)
        monkeypatch.setattr(model._steps, "end", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            model.close()
        assert backend.driver.live() == {}


# Calls that fail.


def open_until_failure(backend: HostBackend, path: Path) -> str | None:
    """Open and close a model while a call is to fail; return which did, and let nothing fail."""
    try:
        load_tiny(backend, path).close()
    except DriverError as error:
        return error.call
    finally:
        backend.driver.faults.lift()
    return None


@pytest.mark.parametrize("forever", [False, True])
def test_a_call_that_fails_while_a_model_opens_leaves_nothing(
    tiny: Path, exact: Floats, calls: Counter[str], forever: bool
) -> None:
    with closing(HostBackend(DEVICE, 1)) as backend:
        for operation in sorted(set(calls) - UNDOING):
            for nth in count(1):
                backend.driver.faults.plan(operation, nth, forever=forever)
                failed = open_until_failure(backend, tiny)
                assert backend.driver.live() == {}, (operation, nth)
                assert backend.driver.account(0).charged_bytes == 0
                if failed is None:
                    break
                assert failed == operation
            assert nth == calls[operation] + 1
        check_usable(backend, tiny, exact)


@pytest.mark.parametrize("undoing", sorted(UNDOING))
def test_where_even_undoing_fails_the_backend_frees_everything(
    tiny: Path, calls: Counter[str], undoing: str
) -> None:
    for operation in ("set_access", "allocate", "stream_create"):
        with closing(HostBackend(DEVICE, 1)) as backend:
            backend.driver.faults.plan(operation, calls[operation])
            backend.driver.faults.plan(undoing, forever=True)
            with pytest.raises(DriverError):
                load_tiny(backend, tiny)
            backend.driver.faults.lift()
        assert backend.driver.live() == {}


def test_a_call_that_fails_while_a_model_closes_is_raised_and_the_backend_frees_the_rest(
    tiny: Path,
) -> None:
    for operation in sorted(UNDOING - {"unmap", "free_host"}):
        with closing(HostBackend(DEVICE, 1)) as backend:
            model = load_tiny(backend, tiny)
            read(model, model.open_sequence(), IDS)
            backend.driver.faults.plan(operation)
            with pytest.raises(DriverError, match=operation):
                model.close()
            model.close()
        assert backend.driver.live() == {}


def test_an_unmap_that_fails_once_is_tried_again(tiny: Path) -> None:
    with closing(HostBackend(DEVICE, 1)) as backend:
        model = load_tiny(backend, tiny)
        backend.driver.faults.plan("unmap")
        model.close()
        assert backend.driver.live() == {}
