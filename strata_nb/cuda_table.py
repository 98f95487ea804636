"""Name the functions of NVIDIA's driver library: what C declares, and how ctypes calls it.

The only file that knows libcuda's binary interface. A function is looked up when it is first
called, so that a driver without it fails there, by name, and nowhere else. Whatever has the same
attributes can stand in for the library (`CudaTable`): tests put one made of host memory, or one
that fails on request, under the unmodified driver.

Signatures, structures and constants are those of cuda.h of CUDA 13.5 (CUDA_VERSION 13050, package
nvidia-cuda-runtime); `since` is the version in the names of cudaTypedefs.h. A structure keeps its
layout for ever there: a new layout comes with a new symbol.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
    py_object,
)
from dataclasses import dataclass
from typing import Any, Protocol

from strata_nb.errors import UnsupportedDevice

LIBRARY = "libcuda.so.1"
# CUDA 13.0, as cuDriverGetVersion counts: the toolkit of the extra `cuda` makes code for it.
OLDEST_VERSION = 13000

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
STUB_LIBRARY = 34
DEVICE_UNAVAILABLE = 46
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_IMAGE = 200
NO_BINARY_FOR_GPU = 209
UNSUPPORTED_PTX_VERSION = 222
NOT_READY = 600
PEER_ACCESS_UNSUPPORTED = 217
# After these every further call would answer the same until the process ends: cuda.h says so of
# all but three. Those say that the context (709), the driver (4) or the allocations of the
# context (710, a kernel's assert) are gone.
LOST = frozenset((4, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))

# CUdevice_attribute
WARP_SIZE = 10
MULTIPROCESSOR_COUNT = 16
INTEGRATED = 18
UNIFIED_ADDRESSING = 41
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102

# CUfunction_attribute
SHARED_SIZE_BYTES = 1
LOCAL_SIZE_BYTES = 3
NUM_REGS = 4
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

GRANULARITY_MINIMUM, GRANULARITY_RECOMMENDED = 0, 1
MEMHOSTALLOC_PORTABLE_DEVICEMAP = 0x01 | 0x02
MEMHOSTREGISTER_PORTABLE_DEVICEMAP = 0x01 | 0x02
STREAM_NON_BLOCKING = 0x1
EVENT_DEFAULT, EVENT_DISABLE_TIMING = 0x0, 0x2
STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
LAUNCH_PARAM_END, LAUNCH_PARAM_BUFFER_POINTER, LAUNCH_PARAM_BUFFER_SIZE = 0, 1, 2
JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6

_ALLOCATION_TYPE_PINNED = 1
_LOCATION_TYPE_DEVICE = 1
_ACCESS_FLAGS_PROT_READWRITE = 3


class Location(ctypes.Structure):
    """Be a CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(ctypes.Structure):
    """Be the `allocFlags` of a CUmemAllocationProp: all zero, we ask for plain memory."""

    _fields_ = [
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AllocationProp(ctypes.Structure):
    """Be a CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", AllocationFlags),
    ]


class AccessDesc(ctypes.Structure):
    """Be a CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class LaunchAttribute(ctypes.Structure):
    """Be a CUlaunchAttribute whose value is an integer, the first bytes of a union of 64."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_ubyte * 60)]


class LaunchConfig(ctypes.Structure):
    """Be a CUlaunchConfig."""

    _fields_ = [
        *((f"{part}Dim{axis}", c_uint) for part in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    ]


# sizeof() and offsetof() of a C program over the same header.
for _structure, _size, _field, _offset in (
    (LaunchAttribute, 72, "value", 8),
    (LaunchConfig, 56, "attrs", 40),
    (Location, 8, "id", 4),
    (AllocationProp, 32, "allocFlags", 24),
    (AccessDesc, 12, "flags", 8),
):
    assert ctypes.sizeof(_structure) == _size  # noqa: S101 - our own bug
    assert getattr(_structure, _field).offset == _offset  # noqa: S101 - our own bug


def device_memory(device: int) -> AllocationProp:
    """Return the properties of memory that stays on `device`."""
    return AllocationProp(
        type=_ALLOCATION_TYPE_PINNED, location=Location(_LOCATION_TYPE_DEVICE, device)
    )


def read_write(device: int) -> AccessDesc:
    """Return the right of `device` to read and write."""
    return AccessDesc(Location(_LOCATION_TYPE_DEVICE, device), _ACCESS_FLAGS_PROT_READWRITE)


# What cuLaunchHostFunc calls. C declares void (*)(void *userData); a Python object is such a
# pointer, and ctypes hands the object itself to the function.
HostFunction = ctypes.CFUNCTYPE(None, py_object)


@dataclass(frozen=True, slots=True)
class Prototype:
    """Say how a function is found and called.

    symbol      its name in the library; ours has no version (`_v2`)
    since       the first CUDA version that has it, as cuDriverGetVersion counts
    arguments   the ctypes of its arguments; every function returns a CUresult (int)
    """

    symbol: str
    since: int
    arguments: tuple[Any, ...]


_Device = c_int
_Pointer = c_uint64  # CUdeviceptr
_Handle = c_uint64  # CUmemGenericAllocationHandle
_Object = c_void_p  # CUcontext, CUstream, CUevent, CUmodule, CUfunction, CUgraph, CUgraphExec
_Flags64 = c_uint64  # unsigned long long

_ROWS = (
    # (unsigned int flags)
    Prototype("cuInit", 2000, (c_uint,)),
    # (int *driverVersion)
    Prototype("cuDriverGetVersion", 2020, (POINTER(c_int),)),
    # (CUresult error, const char **pStr)
    Prototype("cuGetErrorName", 6000, (c_int, POINTER(c_char_p))),
    # Devices and contexts.
    # (int *count)
    Prototype("cuDeviceGetCount", 2000, (POINTER(c_int),)),
    # (CUdevice *device, int ordinal)
    Prototype("cuDeviceGet", 2000, (POINTER(_Device), c_int)),
    # (char *name, int len, CUdevice dev)
    Prototype("cuDeviceGetName", 2000, (c_char_p, c_int, _Device)),
    # (char *pciBusId, int len, CUdevice dev)
    Prototype("cuDeviceGetPCIBusId", 4010, (c_char_p, c_int, _Device)),
    # (size_t *bytes, CUdevice dev)
    Prototype("cuDeviceTotalMem_v2", 3020, (POINTER(c_size_t), _Device)),
    # (int *pi, CUdevice_attribute attrib, CUdevice dev)
    Prototype("cuDeviceGetAttribute", 2000, (POINTER(c_int), c_int, _Device)),
    # (int *canAccessPeer, CUdevice dev, CUdevice peerDev)
    Prototype("cuDeviceCanAccessPeer", 4000, (POINTER(c_int), _Device, _Device)),
    # (CUcontext *pctx, CUdevice dev)
    Prototype("cuDevicePrimaryCtxRetain", 7000, (POINTER(_Object), _Device)),
    # (CUdevice dev)
    Prototype("cuDevicePrimaryCtxRelease_v2", 11000, (_Device,)),
    # (CUcontext ctx)
    Prototype("cuCtxSetCurrent", 4000, (_Object,)),
    # (void)
    Prototype("cuCtxSynchronize", 2000, ()),
    # (int *leastPriority, int *greatestPriority)
    Prototype("cuCtxGetStreamPriorityRange", 5050, (POINTER(c_int), POINTER(c_int))),
    # Physical memory and addresses.
    # (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags
    #  option)
    Prototype(
        "cuMemGetAllocationGranularity", 10020, (POINTER(c_size_t), POINTER(AllocationProp), c_int)
    ),
    # (CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
    Prototype(
        "cuMemAddressReserve", 10020, (POINTER(_Pointer), c_size_t, c_size_t, _Pointer, _Flags64)
    ),
    # (CUdeviceptr ptr, size_t size)
    Prototype("cuMemAddressFree", 10020, (_Pointer, c_size_t)),
    # (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned
    #  long long flags)
    Prototype(
        "cuMemCreate", 10020, (POINTER(_Handle), c_size_t, POINTER(AllocationProp), _Flags64)
    ),
    # (CUmemGenericAllocationHandle handle)
    Prototype("cuMemRelease", 10020, (_Handle,)),
    # (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned
    #  long long flags)
    Prototype("cuMemMap", 10020, (_Pointer, c_size_t, c_size_t, _Handle, _Flags64)),
    # (CUdeviceptr ptr, size_t size)
    Prototype("cuMemUnmap", 10020, (_Pointer, c_size_t)),
    # (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
    Prototype("cuMemSetAccess", 10020, (_Pointer, c_size_t, POINTER(AccessDesc), c_size_t)),
    # (size_t *free, size_t *total)
    Prototype("cuMemGetInfo_v2", 3020, (POINTER(c_size_t), POINTER(c_size_t))),
    # Plain memory of a device and of the host.
    # (CUdeviceptr *dptr, size_t bytesize)
    Prototype("cuMemAlloc_v2", 3020, (POINTER(_Pointer), c_size_t)),
    # (CUdeviceptr dptr)
    Prototype("cuMemFree_v2", 3020, (_Pointer,)),
    # (void **pp, size_t bytesize, unsigned int Flags)
    Prototype("cuMemHostAlloc", 2020, (POINTER(c_void_p), c_size_t, c_uint)),
    # (void *p)
    Prototype("cuMemFreeHost", 2000, (c_void_p,)),
    # (void *p, size_t bytesize, unsigned int Flags)
    Prototype("cuMemHostRegister_v2", 6050, (c_void_p, c_size_t, c_uint)),
    # (void *p)
    Prototype("cuMemHostUnregister", 4000, (c_void_p,)),
    # (CUdeviceptr *pdptr, void *p, unsigned int Flags)
    Prototype("cuMemHostGetDevicePointer_v2", 3020, (POINTER(_Pointer), c_void_p, c_uint)),
    # Streams and events.
    # (CUstream *phStream, unsigned int flags, int priority)
    Prototype("cuStreamCreateWithPriority", 5050, (POINTER(_Object), c_uint, c_int)),
    # (CUstream hStream)
    Prototype("cuStreamDestroy_v2", 4000, (_Object,)),
    # (CUstream hStream)
    Prototype("cuStreamSynchronize", 2000, (_Object,)),
    # (CUstream hStream, CUevent hEvent, unsigned int Flags)
    Prototype("cuStreamWaitEvent", 3020, (_Object, _Object, c_uint)),
    # (CUevent *phEvent, unsigned int Flags)
    Prototype("cuEventCreate", 2000, (POINTER(_Object), c_uint)),
    # (CUevent hEvent)
    Prototype("cuEventDestroy_v2", 4000, (_Object,)),
    # (CUevent hEvent, CUstream hStream)
    Prototype("cuEventRecord", 2000, (_Object, _Object)),
    # (CUevent hEvent)
    Prototype("cuEventQuery", 2000, (_Object,)),
    # (CUevent hEvent)
    Prototype("cuEventSynchronize", 2000, (_Object,)),
    # (float *pMilliseconds, CUevent hStart, CUevent hEnd)
    Prototype("cuEventElapsedTime", 2000, (POINTER(c_float), _Object, _Object)),
    # Work.
    # (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
    Prototype("cuMemcpyAsync", 4000, (_Pointer, _Pointer, c_size_t, _Object)),
    # (CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
    Prototype("cuMemsetD8Async", 3020, (_Pointer, c_ubyte, c_size_t, _Object)),
    # (CUstream hStream, CUhostFn fn, void *userData)
    Prototype("cuLaunchHostFunc", 10000, (_Object, HostFunction, py_object)),
    # (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
    Prototype(
        "cuLaunchKernelEx",
        11060,
        (POINTER(LaunchConfig), _Object, POINTER(c_void_p), POINTER(c_void_p)),
    ),
    # Modules.
    # (CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void
    #  **optionValues)
    Prototype(
        "cuModuleLoadDataEx",
        2010,
        (POINTER(_Object), c_char_p, c_uint, POINTER(c_int), POINTER(c_void_p)),
    ),
    # (CUmodule hmod)
    Prototype("cuModuleUnload", 2000, (_Object,)),
    # (CUfunction *hfunc, CUmodule hmod, const char *name)
    Prototype("cuModuleGetFunction", 2000, (POINTER(_Object), _Object, c_char_p)),
    # (int *pi, CUfunction_attribute attrib, CUfunction hfunc)
    Prototype("cuFuncGetAttribute", 2020, (POINTER(c_int), c_int, _Object)),
    # (CUfunction hfunc, CUfunction_attribute attrib, int value)
    Prototype("cuFuncSetAttribute", 9000, (_Object, c_int, c_int)),
    # Graphs.
    # (CUstream hStream, CUstreamCaptureMode mode)
    Prototype("cuStreamBeginCapture_v2", 10010, (_Object, c_int)),
    # (CUstream hStream, CUgraph *phGraph)
    Prototype("cuStreamEndCapture", 10000, (_Object, POINTER(_Object))),
    # (CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
    Prototype("cuGraphInstantiateWithFlags", 11040, (POINTER(_Object), _Object, _Flags64)),
    # (CUgraphExec hGraphExec, CUstream hStream)
    Prototype("cuGraphLaunch", 10000, (_Object, _Object)),
    # (CUgraph hGraph)
    Prototype("cuGraphDestroy", 10000, (_Object,)),
    # (CUgraphExec hGraphExec)
    Prototype("cuGraphExecDestroy", 10000, (_Object,)),
)
PROTOTYPES = {row.symbol.split("_v")[0]: row for row in _ROWS}


class CudaTable(Protocol):
    """Have every function of `PROTOTYPES` as an attribute, called as C would, returning a CUresult.

    Raises UnsupportedDevice for a function that the driver lacks.
    """

    def __getattr__(self, name: str) -> Callable[..., int]: ...


class LibraryTable:
    """Be the functions of the driver that is installed; raises UnsupportedDevice without one."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise UnsupportedDevice(
                f"no NVIDIA driver: {error}",
                hint="install NVIDIA's driver for CUDA 13.0 or newer, or use --device host",
            ) from error

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Look a function up and keep it: this is called once for each name."""
        if name not in PROTOTYPES:
            raise AttributeError(name)
        prototype = PROTOTYPES[name]
        try:
            function = getattr(self._library, prototype.symbol)
        except AttributeError as error:
            raise UnsupportedDevice(
                f"{LIBRARY} has no {prototype.symbol}: it comes with drivers for CUDA "
                f"{version_text(prototype.since)}, this one is for {self._version_text()}",
                hint="install a newer NVIDIA driver",
            ) from error
        function.argtypes, function.restype = prototype.arguments, c_int
        setattr(self, name, function)
        return function  # type: ignore[no-any-return]

    def _version_text(self) -> str:
        version = c_int()
        find = getattr(self._library, "cuDriverGetVersion", None)
        known = find is not None and find(ctypes.byref(version)) == SUCCESS
        return f"CUDA {version_text(version.value)}" if known else "an unknown version"


def version_text(version: int) -> str:
    """Return "12.4" for 12040."""
    return f"{version // 1000}.{version % 1000 // 10}"
