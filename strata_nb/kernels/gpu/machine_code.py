"""Look at the machine code of products of warpgroups, which a linker has got wrong.

The linker of CUDA 13.0 takes words that products read in each turn of a loop for free behind the
first, and puts other numbers into their registers (`intrinsics/attending.py` says what prevents
it). That is seen in the code: within the loop something writes what its products read. Whoever
keeps such words in memory and loads them in each turn is taken for one that loses them.

Code for compute capability 9.0, the only one with these instructions, has 16 bytes an instruction.
Which is in the lowest 12 bits; then bits 16 to 23 are the register that is written, bits 24 to 31
for such a product the first of four words of A.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_SECTION = struct.Struct("<IIQQQQ")  # of an ELF file: name, kind, flags, address, offset, size
_PRODUCT, _BRANCH = 0xDF0, 0x947  # a product: one whose words of A are in registers
_WRITE_NONE = (_BRANCH, 0xFAE, 0x2CA)  # a copy to shared memory, a word for all lanes
_TURNED = 1 << 62  # of a product: columns of A meet rows of B in memory
_BYTES = 16  # of an instruction
_WORDS = 4

Words = NDArray[np.uint64]


def loses_words(image: bytes, entry: str) -> bool:
    """Return whether a kernel's cubin for compute capability 9.0 overwrites words of A that
    products with rows of B read in each turn of a loop, or has such products in no one loop: what
    cannot be seen is not taken for right."""
    low, high = _code(image, entry).T
    codes = low & 0xFFF
    (products,) = np.nonzero((codes == _PRODUCT) & (low & _TURNED == 0))
    if not products.size:
        return False
    inside = _loop(low, high, products)
    if not inside:
        return True
    read = {int(first) + word for first in low[products] >> 24 & 0xFF for word in range(_WORDS)}
    written = (low[inside] >> 16 & 0xFF)[~np.isin(codes[inside], _WRITE_NONE)]
    return bool(np.isin(written, sorted(read)).any())


def _code(image: bytes, entry: str) -> Words:
    """Return the instructions of a kernel, each as its lower and its higher 64 bits."""
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    found = [_SECTION.unpack_from(image, sections + size * number) for number in range(count)]
    text = found[names][4]
    for name, _, _, _, offset, size in found:
        begin = text + name
        if image[begin : image.index(b"\0", begin)] == f".text.{entry}".encode():
            return np.frombuffer(image, "<u8", size // 8, offset).reshape(-1, 2)
    raise AssertionError(f"the linker's result has no code of {entry}")


def _loop(low: Words, high: Words, products: NDArray[np.intp]) -> list[int]:
    """Return the instructions of the smallest loop with all these products, and of what lies behind
    it and leads back into it; none, where no loop has them."""
    branches = _branches(low, high)
    loops = [
        (target, place)
        for place, target in branches.items()
        if target <= products[0] and place > products[-1]
    ]
    if not loops:
        return []
    begin, end = max(loops)
    inside = range(begin, end)
    asides: list[int] = []
    for first in {branches[place] for place in inside if place in branches} - {*inside, end}:
        back = min(place for place in [*branches, len(low)] if place >= first)
        if branches.get(back) in inside:
            asides += range(first, back)
    return [*inside, *asides]


def _branches(low: Words, high: Words) -> dict[int, int]:
    """Return where each branch leads."""
    found = {}
    for place in np.nonzero(low & 0xFFF == _BRANCH)[0].tolist():
        # From the next instruction on, in units of four bytes.
        distance = (int(high[place]) & 0x3FFFF) << 38 | int(low[place]) >> 34 << 8
        distance |= int(low[place]) >> 16 & 0xFF
        distance -= distance >> 55 << 56  # the highest bit is its sign
        found[place] = place + 1 + 4 * distance // _BYTES
    return found
