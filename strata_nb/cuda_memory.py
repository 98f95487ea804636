"""Do CUDA's memory operations: chunks and addresses, plain memory, the host's memory.

`vmm.MemoryDriver` and `execution.ExecutionDriver` say what each operation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

from strata_nb import cuda_table as cuda
from strata_nb.cuda_books import Book
from strata_nb.cuda_calls import Calls
from strata_nb.errors import RuleViolation, StrataError, UnsupportedDevice
from strata_nb.vmm import Granularity

SMALLEST_CHUNK_BYTES = 2 << 20  # some cards take multiples of 4 KiB and charge this for each


@dataclass(frozen=True, slots=True)
class _Mapping:
    size: int
    device: int


class CudaMemory:
    """Move, take and free memory of cards, and let them use the host's."""

    chunk_granularity: Granularity = "minimum"

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._mappings: Book[_Mapping] = Book("mappings", CudaMemory._unmap_whole)  # by address
        self._chunks: Book[int] = Book("chunks", CudaMemory.release)  # handle -> device
        self._reservations: Book[int] = Book(  # address -> size
            "reservations", CudaMemory._free_reservation
        )
        self._blocks: Book[int] = Book("blocks", CudaMemory.free)  # address -> device
        self._host_blocks: Book[int] = Book("host blocks", CudaMemory.free_host)  # address -> size
        self._registrations: Book[int] = Book(  # address -> size
            "registrations", CudaMemory.unregister_host
        )

    # Chunks and addresses.

    def granularity(self, device: int, kind: Granularity) -> int:
        flag = cuda.GRANULARITY_MINIMUM if kind == "minimum" else cuda.GRANULARITY_RECOMMENDED
        size, memory = c_size_t(), cuda.device_memory(device)
        asked = ("cuMemGetAllocationGranularity", byref(size), byref(memory), flag)
        self._calls.call("granularity", device, *asked)
        return max(size.value, SMALLEST_CHUNK_BYTES)

    def reserve(self, size: int) -> int:
        address = c_uint64()
        asked = ("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        self._calls.call("reserve", None, *asked, numbers={"size": size})
        return self._reservations.enter(address, size)

    def address_free(self, address: int, size: int) -> None:
        reserved = self._reservations.find(address, rule=1)
        if size != reserved:
            raise RuleViolation(1, f"free {size:,} of {reserved:,} reserved bytes")
        numbers = {"address": address, "size": size}
        self._calls.call("address_free", None, "cuMemAddressFree", address, size, numbers=numbers)
        del self._reservations[address]

    def create(self, size: int, device: int) -> int:
        handle, memory = c_uint64(), cuda.device_memory(device)
        asked = ("cuMemCreate", byref(handle), size, byref(memory), 0)
        self._calls.call("create", device, *asked, numbers={"size": size})
        return self._chunks.enter(handle, device)

    def release(self, handle: int) -> None:
        self._calls.call("release", self._chunks.find(handle), "cuMemRelease", handle)
        del self._chunks[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        device = self._chunks.find(handle)
        numbers = {"address": address, "size": size}
        self._calls.call("map", device, "cuMemMap", address, size, 0, handle, 0, numbers=numbers)
        self._mappings[address] = _Mapping(size, device)

    def unmap(self, address: int, size: int) -> None:
        mapping = self._mappings.find(address)
        if size != mapping.size:
            raise RuleViolation(11, f"unmap {size:,} bytes, a chunk has {mapping.size:,}")
        numbers = {"address": address, "size": size}
        self._calls.call("unmap", mapping.device, "cuMemUnmap", address, size, numbers=numbers)
        del self._mappings[address]

    def set_access(self, address: int, size: int, devices: Sequence[int]) -> None:
        owner = self._mappings.find(address, rule=4).device
        for device in devices:
            self._calls.enter("set_access", device)  # access is given to a context that exists
        rights = (cuda.AccessDesc * len(devices))(*map(cuda.read_write, devices))
        asked = ("cuMemSetAccess", address, size, rights, len(devices))
        numbers = {"address": address, "size": size, "devices": len(devices)}
        self._calls.call("set_access", owner, *asked, numbers=numbers)

    def retire(self, address: int, size: int) -> None:
        """Do nothing: the driver does not know what tables name."""

    def reinstate(self, address: int, size: int) -> None:
        """Do nothing, as `retire`."""

    def mem_info(self, device: int) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._calls.call("mem_info", device, "cuMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def can_access(self, device: int, owner: int) -> bool:
        handles = [self._calls.handle("can_access", each) for each in (device, owner)]
        yes = c_int(1)
        if device != owner:
            self._calls.call("can_access", device, "cuDeviceCanAccessPeer", byref(yes), *handles)
        return yes.value != 0

    # Plain memory.

    def allocate(self, size: int, device: int) -> int:
        address = c_uint64()
        asked = ("cuMemAlloc", byref(address), size)
        self._calls.call("allocate", device, *asked, numbers={"size": size})
        return self._blocks.enter(address, device)

    def free(self, address: int) -> None:
        device = self._blocks.find(address)
        self._calls.call("free", device, "cuCtxSynchronize")  # cuda.h does not say that it waits
        self._calls.call("free", device, "cuMemFree", address, numbers={"address": address})
        del self._blocks[address]

    def allocate_host(self, size: int) -> int:
        home, address = self._calls.home("allocate_host"), c_void_p()
        asked = ("cuMemHostAlloc", byref(address), size, cuda.MEMHOSTALLOC_PORTABLE_DEVICEMAP)
        self._calls.call("allocate_host", home, *asked, numbers={"size": size})
        return self._host_blocks.enter(address, size)

    def free_host(self, address: int) -> None:
        numbers = {"address": address, "size": self._host_blocks.find(address)}
        home = self._drained_home("free_host")
        self._calls.call("free_host", home, "cuMemFreeHost", address, numbers=numbers)
        del self._host_blocks[address]

    def register_host(self, address: int, size: int) -> None:
        home = self._calls.home("register_host")
        flags, numbers = cuda.MEMHOSTREGISTER_PORTABLE_DEVICEMAP, {"address": address, "size": size}
        asked = ("cuMemHostRegister", address, size, flags)
        self._calls.call("register_host", home, *asked, numbers=numbers)
        self._registrations[address] = size
        try:
            self._check_seen_at(home, address, size)
        except StrataError:
            self.unregister_host(address)
            raise

    def unregister_host(self, address: int) -> None:
        numbers = {"address": address, "size": self._registrations.find(address)}
        home = self._drained_home("unregister_host")
        self._calls.call("unregister_host", home, "cuMemHostUnregister", address, numbers=numbers)
        del self._registrations[address]

    # What the operations share.

    def _unmap_whole(self, address: int) -> None:
        self.unmap(address, self._mappings[address].size)

    def _free_reservation(self, address: int) -> None:
        self.address_free(address, self._reservations[address])

    def _check_seen_at(self, device: int, address: int, size: int) -> None:
        """Raise UnsupportedDevice unless cards see the host's memory at the host's addresses."""
        seen = c_uint64()
        asked = ("cuMemHostGetDevicePointer", byref(seen), address, 0)
        numbers = {"address": address, "size": size}
        self._calls.call("register_host", device, *asked, numbers=numbers)
        if seen.value != address:
            raise UnsupportedDevice(
                f"device {device} sees the host's {address:#x} at {seen.value:#x}",
                hint="use --device host",
            )

    def _drained_home(self, operation: str) -> int:
        """Wait for the work of every device, as all of them can use the host's memory."""
        home = self._calls.home(operation)
        for device in self._calls.contexts():
            self._calls.call(operation, device, "cuCtxSynchronize")
        return home
