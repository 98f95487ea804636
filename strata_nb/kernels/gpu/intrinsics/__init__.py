"""Name every instruction that a GPU kernel uses and Python lacks: the vocabulary of kernels.

Kernels are plain Python functions over 64-bit addresses and these names; they import neither Numba
nor a vendor. Who gives the names a meaning:

    compile.py                   emits LLVM code, one body for NVIDIA and one for AMD
    tests/gpu_simulator.py       runs a kernel lane by lane, in Python

so that a kernel is written once. A name stands for one body on both vendors where LLVM has a word
for it (loads, conversions); where it has none, `ptx` holds the instruction for NVIDIA and `amdgpu`
the code for AMD. A warp has 32 lanes everywhere.

    intrinsic.py        what an intrinsic is, and what bodies are written with
    memory.py           loads, stores, additions; tables in the code
    copies.py           copies into shared memory
    ordering.py         what happens before what: launches, blocks, the host
    lanes.py            who a lane is; barriers, shuffles, votes
    arithmetic.py       floats, halves, integers
    bytes_of_words.py   bytes chosen by numbers
    matrices.py         products of matrices
    warpgroups.py       products of matrices by four warps together, on cards that can
    attending.py        the same for attention

Types of the signatures: i32, i64, f32, and tuples of them. Integers are signed.

Shared memory is one block of bytes, as many as the launch asks for; `shared_...` take offsets into
it, not addresses.
"""

from __future__ import annotations

from strata_nb.kernels.gpu.intrinsics.arithmetic import (
    bits_of_f32,
    bits_set,
    dp4a,
    dp4a_u8,
    f32,
    f32_of_bits,
    f32_of_half,
    f32_of_i32,
    fma,
    half_of_f32,
    halves_of_f32,
    i32,
    i64,
    larger_f32,
    nearest_i32,
    power_of_two,
    quotient_i32,
    shifted_down,
    square_root,
    truncated_i64,
)
from strata_nb.kernels.gpu.intrinsics.bytes_of_words import (
    BytesOf,
    bytes_by_nibbles,
    even_bytes,
    high_bytes_in_turn,
    high_halves,
    level_parts,
    levels_of,
    low_bytes_in_turn,
    low_halves,
    odd_bytes,
    sign_bytes,
)
from strata_nb.kernels.gpu.intrinsics.copies import (
    await_copies,
    await_older_copies,
    copy_4,
    copy_8,
    copy_16,
    end_copies,
)
from strata_nb.kernels.gpu.intrinsics.intrinsic import WARP, Intrinsic
from strata_nb.kernels.gpu.intrinsics.lanes import (
    barrier,
    block_x,
    block_y,
    block_z,
    blocks_z,
    lanes_where,
    largest_of_lanes,
    of_any_lane,
    shuffle_xor_f32,
    shuffle_xor_i32,
    thread_index,
)
from strata_nb.kernels.gpu.intrinsics.matrices import (
    mma_16x8x16,
    mma_16x8x32,
    mma_of_halves,
    shared_load_matrices,
    shared_load_turned,
)
from strata_nb.kernels.gpu.intrinsics.memory import (
    ConstantTable,
    add_i64,
    as_one,
    fetch_2xi32,
    fetch_4xf32,
    fetch_4xi32,
    fetch_f32,
    fetch_i32,
    fetch_u8,
    fetch_u16,
    load_2xi32,
    load_4xf32,
    load_4xi32,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    shared_add_i64,
    shared_load_2xf32,
    shared_load_2xi32,
    shared_load_4xf32,
    shared_load_4xi32,
    shared_load_f32,
    shared_load_i32,
    shared_load_i64,
    shared_store_4xi32,
    shared_store_f32,
    shared_store_i32,
    shared_store_i64,
    store_2xi32,
    store_4xi32,
    store_f32,
    store_i8,
    store_i16,
    store_i32,
    store_i64,
)
from strata_nb.kernels.gpu.intrinsics.ordering import (
    arrive,
    await_previous,
    hold,
    keep,
    load_system_i64,
    nanoseconds,
    once_i32,
    once_i64,
    post_i64,
    posted_2xi64,
    prefetch,
    store_system_i64,
)
