"""Be the driver of NVIDIA's cards, through the library that comes with every installation of them.

    cuda_table.py     the library's functions, structures and constants
    cuda_calls.py     contexts, threads, statuses and what they raise
    cuda_books.py     what was made and nobody has freed
    cuda_memory.py    the operations: chunks, addresses, plain memory
    cuda_streams.py   streams, events, copies
    cuda_programs.py  kernels and graphs
    driver.py         all of them together: opening, closing, what devices there are

Each operation is one driver function and a line in a book. The books say what is there to be freed,
and on which device, so that no caller need say it. Rejected: the objects of
cuda-bindings (docs/decisions/0008-ctypes-driver.md), and contexts of our own, which other
libraries in the process would not share.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata_nb import cuda_table as cuda
from strata_nb.cuda_books import Book
from strata_nb.cuda_calls import Calls
from strata_nb.cuda_memory import CudaMemory
from strata_nb.cuda_programs import CudaPrograms
from strata_nb.cuda_table import CudaTable, LibraryTable
from strata_nb.errors import DeviceLost, StrataError, UnsupportedDevice
from strata_nb.execution import DeviceFacts

if TYPE_CHECKING:
    from strata_nb.execution import Driver, ProgramDriver

# Of a card, beside what a model asks for. Neither was measured: what the driver takes for page
# tables, modules, graphs and tables; what stays free for others, such as who draws the screen.
OUTSIDE_BYTES = 256 << 20
RESERVE_BYTES = 700 << 20

_TEXT_BYTES = 256


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Describe a card to those who compile for it.

    memory_bytes         all of its memory
    capability           compute capability: (9, 0)
    shared_block_bytes   shared memory that a block can have if it asks for it
    bus_id               its place in the machine, as nvidia-smi shows it
    is_integrated        whether its memory is the host's
    """

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    warp_size: int
    shared_block_bytes: int
    bus_id: str
    is_integrated: bool


class CudaDriver(CudaMemory, CudaPrograms):
    """Be the driver of all cards that this process sees; raises UnsupportedDevice without any.

    table   the functions of the driver library; None: of the one that is installed

    A card that is too old is refused when it is first used. Everything is freed by `close`, also
    what callers forgot. In a forked child every operation raises DeviceLost and `close` does
    nothing.
    """

    def __init__(self, table: CudaTable | None = None) -> None:
        calls = Calls(LibraryTable() if table is None else table)
        CudaMemory.__init__(self, calls)
        CudaPrograms.__init__(self, calls)

    def __del__(self) -> None:
        calls: Calls | None = getattr(self, "_calls", None)
        if calls is not None and not calls.closed and not calls.forked:
            warnings.warn("a CUDA driver was never closed", ResourceWarning, stacklevel=1)
            self.close()

    def close(self) -> None:
        """Finish all work and free everything; raises the first error that no one has seen yet.

        Does all that can be done, and what failed once more. What could not be freed even then
        stays in the books, for another call.
        """
        if self._calls.closed or self._calls.forked:
            return
        errors = list(self._free_everything())
        if self.live():
            errors += self._free_everything()
        if not self.live():
            try:
                self._calls.release_contexts()
                self._calls.closed = True
            except StrataError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def live(self) -> dict[str, int]:
        """Return how much of each kind exists; empty when nothing does."""
        return {book.kind: len(book) for book in self._books() if book}

    def _books(self) -> tuple[Book[Any], ...]:
        """Return the books in the order in which what is in them can be freed."""
        return (
            self._executables,
            self._graphs,
            self._modules,
            self._events,
            self._streams,
            self._mappings,
            self._chunks,
            self._reservations,
            self._blocks,
            self._registrations,
            self._host_blocks,
        )

    def _free_everything(self) -> Iterator[BaseException]:
        """Free what is in the books; yields every error."""
        self._abandon_captures()
        for device in self._calls.contexts():
            try:
                self._calls.call("close", device, "cuCtxSynchronize")
            except StrataError as error:
                yield error
        for book in self._books():
            for key in list(book):
                lost = self._calls.lost_devices
                try:
                    unseen = book.free(self, key)
                except DeviceLost as error:
                    del book[key]  # only the end of the process can free it now
                    if self._calls.lost_devices > lost:  # else it was said before
                        yield error
                except StrataError as error:
                    yield error
                else:
                    if unseen is not None:
                        yield unseen

    # Devices.

    @property
    def device_count(self) -> int:
        return self._calls.device_count

    @property
    def version(self) -> int:
        """The version of CUDA that the installed driver is for: 13000 is 13.0."""
        return self._calls.version

    def device_facts(self, device: int) -> DeviceFacts:
        least, highest = self._priorities("device_facts", device)
        name = self._text("device_facts", device, "cuDeviceGetName")
        return DeviceFacts(device, name, self.mem_info(device)[1], least, highest)

    def card_facts(self, device: int) -> CardFacts:
        """Return what a card is; makes its context if it has none."""

        def attribute(number: int) -> int:
            value = c_int()
            asked = ("cuDeviceGetAttribute", byref(value), number, handle)
            self._calls.call("card_facts", device, *asked)
            return value.value

        handle = self._calls.handle("card_facts", device)
        total = c_size_t()
        self._calls.call("card_facts", device, "cuDeviceTotalMem", byref(total), handle)
        return CardFacts(
            index=device,
            name=self._text("card_facts", device, "cuDeviceGetName"),
            memory_bytes=total.value,
            capability=(
                attribute(cuda.COMPUTE_CAPABILITY_MAJOR),
                attribute(cuda.COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors=attribute(cuda.MULTIPROCESSOR_COUNT),
            warp_size=attribute(cuda.WARP_SIZE),
            shared_block_bytes=attribute(cuda.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            bus_id=self._text("card_facts", device, "cuDeviceGetPCIBusId"),
            is_integrated=attribute(cuda.INTEGRATED) != 0,
        )

    def _text(self, operation: str, device: int, function: str) -> str:
        handle = self._calls.handle(operation, device)
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._calls.call(operation, device, function, text, _TEXT_BYTES, handle)
        return text.value.decode(errors="replace")


def no_such_card(number: int, count: int) -> UnsupportedDevice:
    """Return what to raise where somebody asks for another card than there are."""
    found, named = "is one card", "cuda:0"
    if count != 1:
        found, named = f"are {count} cards", f"cuda:0 to cuda:{count - 1}"
    return UnsupportedDevice(f"no card {number}, there {found}", hint=named)


if TYPE_CHECKING:
    _is_a_driver: type[Driver] = CudaDriver
    _runs_programs: type[ProgramDriver] = CudaDriver
