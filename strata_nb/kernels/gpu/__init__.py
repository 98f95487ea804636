"""The kernels of the table for graphics cards, written once for NVIDIA and AMD.

intrinsics.py   the instructions that Python lacks, by name
compile.py      Numba makes machine code of a kernel: the only importer of numba.cuda

normalising.py, activations.py, gating.py    norms, quantising, gates of rows
routing.py                                   the router's choice, and rows sorted by expert
experts.py                                   the chosen experts of all rows
exponential.py                               exp, sigmoid and silu
grids.py                                     how sub-blocks of the grid types are unpacked
"""
