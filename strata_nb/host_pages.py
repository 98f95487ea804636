"""Ask the operating system for pages: reserve addresses, put a file's pages there, take them away.

The only way to the C library. Every function takes and returns plain integers and
raises `PagesError` with the system's error number. Importing it elsewhere than on Linux raises
UnsupportedDevice: punching holes into a file, which is how released memory really returns, is not
portable.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile

from strata_nb.errors import UnsupportedDevice

if sys.platform != "linux":  # before the first name that only Linux has
    raise UnsupportedDevice(
        f"host devices need Linux, this is {sys.platform}", hint="use --device reference"
    )

PAGE_BYTES = mmap.PAGESIZE
LARGE_PAGE_BYTES = 2 << 20  # on x86-64; elsewhere an alignment that does no harm

_MAP_FIXED = 0x10  # the values that Python's mmap module does not name, from <linux/mman.h>
_MAP_NORESERVE = 0x4000
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02  # <linux/falloc.h>
_PROT_NONE = 0
_USABLE = mmap.PROT_READ | mmap.PROT_WRITE
_NOTHING_BEHIND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong
_flags = ctypes.c_int
# name, result, arguments
for _name, _result, _arguments in (
    ("mmap", _address, (_address, _size, _flags, _flags, ctypes.c_int, _offset)),
    ("munmap", ctypes.c_int, (_address, _size)),
    ("mprotect", ctypes.c_int, (_address, _size, _flags)),
    ("madvise", ctypes.c_int, (_address, _size, _flags)),
    ("memset", _address, (_address, ctypes.c_int, _size)),
    ("memcpy", _address, (_address, _address, _size)),
):
    getattr(_libc, _name).restype = _result
    getattr(_libc, _name).argtypes = _arguments


class PagesError(OSError):
    """Report a system call that failed: `errno` and `strerror`."""


def reserve(size: int) -> int:
    """Return `size` bytes of addresses that nothing can read or write."""
    return _map_pages(None, size, _PROT_NONE, _NOTHING_BEHIND, -1, 0)


def allocate(size: int) -> int:
    """Return `size` bytes of private memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _map_pages(None, size, _USABLE, flags, -1, 0)


def give_back(address: int, size: int) -> None:
    """End a reservation or an allocation."""
    _check(_libc.munmap(address, size))


def advise_large(address: int, size: int) -> None:
    """Let memory that was not touched yet come in large pages, where the system has them.

    Weights are read from end to end, gigabytes for each token, and a processor remembers the places
    of too few pages of 4 KiB for that. A kernel without large pages says EINVAL: then they stay
    small, which is slower and not wrong.
    """
    if _libc.madvise(address, size, mmap.MADV_HUGEPAGE) != 0 and ctypes.get_errno() != errno.EINVAL:
        _check(-1)


def place(address: int, size: int, file: int, offset: int) -> None:
    """Put a piece of a file at an address, all pages present, readable and writable."""
    flags = mmap.MAP_SHARED | _MAP_FIXED | mmap.MAP_POPULATE
    _map_pages(address, size, _USABLE, flags, file, offset)


def vacate(address: int, size: int) -> None:
    """Make addresses as inaccessible as `reserve` made them; the file keeps its memory."""
    _map_pages(address, size, _PROT_NONE, _NOTHING_BEHIND | _MAP_FIXED, -1, 0)


def protect(address: int, size: int, *, usable: bool) -> None:
    """Let pages be read and written, or not."""
    _check(_libc.mprotect(address, size, _USABLE if usable else _PROT_NONE))


def open_memory_file(name: str) -> int:
    """Return the descriptor of a file without a path, in memory where the system allows it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(
        prefix=name, dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )
    os.unlink(path)
    return descriptor


def close_file(file: int) -> None:
    """End a file; its memory returns once nothing is mapped from it."""
    os.close(file)


def fill_hole(file: int, offset: int, size: int) -> None:
    """Give a piece of a file its memory now, so that touching it later cannot fail."""
    try:
        os.posix_fallocate(file, offset, size)
    except OSError as error:
        raise PagesError(error.errno, error.strerror) from error


def punch_hole(file: int, offset: int, size: int) -> None:
    """Return the memory of a piece of a file to the system."""
    piece = (_offset(offset), _offset(size))
    _check(_libc.fallocate(file, _KEEP_SIZE_AND_PUNCH_HOLE, *piece))


def fill(address: int, value: int, size: int) -> None:
    """Set bytes; other Python threads run meanwhile."""
    _libc.memset(address, value, size)


def copy(destination: int, source: int, size: int) -> None:
    """Copy bytes between places that do not overlap; other Python threads run meanwhile."""
    _libc.memcpy(destination, source, size)


def function_address(name: str) -> int:
    """Return where a function of the C library is, for compiled code that calls it."""
    address = ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value
    if address is None:
        raise AssertionError(f"{name} has no address")
    return address


def _map_pages(
    address: int | None, size: int, protection: int, flags: int, file: int, offset: int
) -> int:
    result = _libc.mmap(address, size, protection, flags, file, offset)
    if result is None or result == ctypes.c_void_p(-1).value:
        _check(-1)
    return int(result)


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise PagesError(code, os.strerror(code))
