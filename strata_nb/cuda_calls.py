"""Call CUDA's driver functions in the right context, and raise for every status but success.

`Calls` knows which devices there are, which have a context and which are lost; it knows nothing of
what callers create. A context is a device's primary one, shared with whatever else in the process
uses CUDA, made when a device is first named and set in each thread that calls. Nothing asks which
device is current. After an error that a device does not recover from, no function is called for
it any more, nor one that concerns no single device: the library's state is undefined then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from types import MappingProxyType

from strata_nb import cuda_table as cuda
from strata_nb.cuda_table import CudaTable, version_text
from strata_nb.errors import (
    DeviceLost,
    DriverError,
    OutOfDeviceMemory,
    RuleViolation,
    UnsupportedDevice,
)

_HOST_INSTEAD = "use --device host"
_HINTS = {
    cuda.DEVICE_UNAVAILABLE: "another program has this card for itself (nvidia-smi shows it)",
    cuda.INVALID_IMAGE: "the code is of a newer CUDA: install a newer NVIDIA driver",
    cuda.NO_BINARY_FOR_GPU: "the code was compiled for another card",
    cuda.UNSUPPORTED_PTX_VERSION: "install a newer NVIDIA driver",
}
_MEMORY_HINT = "end other programs on the card, or use a smaller --ctx-size or model"
_HOST_MEMORY_HINT = "the host lacks memory that can be locked: end programs, or use a smaller model"
_LOST_HINT = "start the program again: this process cannot use the card any more"
_PIN_HINT = "--no-pin registers no host memory, and is slower where experts have no slot"
_TAKE_DEVICE_MEMORY = ("cuMemCreate", "cuMemAlloc")
_TAKE_HOST_MEMORY = ("cuMemHostAlloc", "cuMemHostRegister")


class Calls:
    """Call functions of a table; raises UnsupportedDevice where no card can be used at all.

    table           the driver's functions
    version         of CUDA that the driver is for, as cuDriverGetVersion counts: 13000 is 13.0
    device_count    devices are 0 .. device_count - 1

    In a forked child everything raises DeviceLost: a context does not survive the fork.
    """

    def __init__(self, table: CudaTable) -> None:
        self.table = table
        self.closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()  # held while a context is made
        self._contexts: dict[int, tuple[int, int]] = {}  # device -> its CUdevice, its CUcontext
        self._lost: dict[int, tuple[int, str]] = {}  # device -> the status that said so, its name
        self._thread = threading.local()  # .device: whose context this thread has
        self.version = self._read_version()
        self.device_count = self._start()

    @property
    def forked(self) -> bool:
        return self._process != os.getpid()

    @property
    def lost_devices(self) -> int:
        return len(self._lost)

    def contexts(self) -> list[int]:
        """Return the devices with a context that can be called, in the order they got it."""
        return [device for device in self._contexts if device not in self._lost]

    def call(
        self,
        operation: str,
        device: int | None,
        function: str,
        *arguments: object,
        numbers: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Call a function in the context of `device`; raises DriverError.

        operation   what a caller knows it as, for messages; `numbers` are for them too
        device      None where no context is needed
        """
        status = self.ask(operation, device, function, *arguments)
        if status != cuda.SUCCESS:
            raise self.error(operation, device, function, status, numbers)

    def ask(self, operation: str, device: int | None, function: str, *arguments: object) -> int:
        """Call a function as `call` does and return its status."""
        self.enter(operation, device)
        return getattr(self.table, function)(*arguments)  # type: ignore[no-any-return]

    def enter(self, operation: str, device: int | None) -> None:
        """Make the context of `device` this thread's, or raise if nothing may be called for it."""
        if self.forked:
            raise DeviceLost(
                operation,
                cuda.NOT_INITIALIZED,
                f"opened by process {self._process}, used in its fork {os.getpid()}",
                device=device,
                hint="start the child with the spawn method",
            )
        if self.closed:
            raise RuleViolation(9, f"{operation}: the driver is closed")
        if self._lost:
            where = next(iter(self._lost)) if device is None else device
            if where in self._lost:
                code, name = self._lost[where]
                raise DeviceLost(operation, code, name, device=where, hint=_LOST_HINT)
        if device is not None and getattr(self._thread, "device", None) != device:
            context = self._context(operation, device)
            self._check(operation, device, "cuCtxSetCurrent", context)
            self._thread.device = device

    def home(self, operation: str) -> int:
        """Return a device whose context will do for what concerns all devices or none."""
        self.enter(operation, None)
        return next(iter(self._contexts), 0)

    def handle(self, operation: str, device: int) -> int:
        """Return the driver's own number of a device."""
        self.enter(operation, device)
        return self._contexts[device][0]

    def release_contexts(self) -> None:
        """Give the contexts back, which frees what is left in them unless others hold them too."""
        self._thread = threading.local()
        for device in list(self._contexts):
            if device not in self._lost:
                handle = self._contexts[device][0]
                self._check("close", device, "cuDevicePrimaryCtxRelease", handle)
            del self._contexts[device]

    def error(
        self,
        operation: str,
        device: int | None,
        function: str,
        status: int,
        numbers: Mapping[str, int],
    ) -> DriverError:
        """Return what to raise for a status, after noting a device that is lost."""
        name = f"{function}: {self._name(status)}"
        if status in cuda.LOST:
            for each in range(self.device_count) if device is None else (device,):
                self._lost.setdefault(each, (status, name))
            return DeviceLost(
                operation, status, name, device=device, numbers=numbers, hint=_LOST_HINT
            )
        if status == cuda.OUT_OF_MEMORY:
            if function in _TAKE_DEVICE_MEMORY:
                numbers = {**numbers, **self._memory()}
            hint = _HOST_MEMORY_HINT if function in _TAKE_HOST_MEMORY else _MEMORY_HINT
            return OutOfDeviceMemory(
                operation, status, name, device=device, numbers=numbers, hint=hint
            )
        hint = _HINTS.get(status, _PIN_HINT if function == "cuMemHostRegister" else "")
        return DriverError(operation, status, name, device=device, numbers=numbers, hint=hint)

    def _check(self, operation: str, device: int, function: str, *arguments: object) -> None:
        status = getattr(self.table, function)(*arguments)
        if status != cuda.SUCCESS:
            raise self.error(operation, device, function, status, {})

    def _read_version(self) -> int:
        version = c_int()
        status = self.table.cuDriverGetVersion(byref(version))
        needed = version_text(cuda.OLDEST_VERSION)
        if status != cuda.SUCCESS:
            raise UnsupportedDevice(
                f"the NVIDIA driver does not say its version: {self._name(status)}",
                hint=f"install a driver for CUDA {needed} or later, or {_HOST_INSTEAD}",
            )
        if version.value < cuda.OLDEST_VERSION:
            raise UnsupportedDevice(
                f"the NVIDIA driver is for CUDA {version_text(version.value)}, "
                f"{needed} or later is needed",
                hint=f"install a newer NVIDIA driver, or {_HOST_INSTEAD}",
            )
        return version.value

    def _start(self) -> int:
        """Start the driver and return the number of devices."""
        status = self.table.cuInit(0)
        count = c_int()
        if status == cuda.SUCCESS:
            status = self.table.cuDeviceGetCount(byref(count))
        if status == cuda.NO_DEVICE or (status == cuda.SUCCESS and count.value == 0):
            raise UnsupportedDevice(
                "there is an NVIDIA driver and no card that this process may use",
                hint=f"look at nvidia-smi and CUDA_VISIBLE_DEVICES, or {_HOST_INSTEAD}",
            )
        if status != cuda.SUCCESS:
            raise UnsupportedDevice(
                f"the NVIDIA driver cannot be used: {self._name(status)} (code {status})",
                hint=f"see whether nvidia-smi works, or {_HOST_INSTEAD}",
            )
        return count.value

    def _context(self, operation: str, device: int) -> int:
        """Return the context of a device, made if it has none."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self._make_context(operation, device)
            return self._contexts[device][1]

    def _make_context(self, operation: str, device: int) -> tuple[int, int]:
        if not 0 <= device < self.device_count:
            raise DriverError(
                operation,
                cuda.INVALID_DEVICE,
                f"there are {self.device_count} devices",
                device=device,
            )
        handle, context, value = c_int(), c_void_p(), c_int()
        self._check(operation, device, "cuDeviceGet", byref(handle), device)
        for attribute, what in (
            (cuda.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "move memory between addresses"),
            (cuda.UNIFIED_ADDRESSING, "use the host's addresses"),
        ):
            asked = (byref(value), attribute, handle)
            self._check(operation, device, "cuDeviceGetAttribute", *asked)
            if not value.value:
                raise UnsupportedDevice(f"device {device} cannot {what}", hint=_HOST_INSTEAD)
        self._check(operation, device, "cuDevicePrimaryCtxRetain", byref(context), handle)
        assert context.value is not None  # noqa: S101 - the driver said success
        return handle.value, context.value

    def _name(self, status: int) -> str:
        name = c_char_p()
        known = self.table.cuGetErrorName(status, byref(name)) == cuda.SUCCESS and name.value
        return name.value.decode() if known and name.value else f"unknown error {status}"

    def _memory(self) -> dict[str, int]:
        """Return the free and total bytes of this thread's device, or nothing if it fails."""
        free, total = c_size_t(), c_size_t()
        if self.table.cuMemGetInfo(byref(free), byref(total)) != cuda.SUCCESS:
            return {}
        return {"free": free.value, "total": total.value}
