"""The kernels of the table for graphics cards, written once for NVIDIA and AMD.

functions.py    the kernel of each launch
operations.py   what a kernel is, and what kernels share
intrinsics/     the instructions that Python lacks, by name
binding.py      gives the names in a kernel their meaning
compile.py      Numba makes machine code of a kernel: the only importer of numba.cuda
cubins.py       machine code on disk

weights.py, grids.py, tables.py, floats.py   what a lane reads of each type of weights
products.py                                  quantised rows times packed weights
linear.py, embedding.py                      whole rows times a weight, rows of a table

rotation.py, planes.py, attention.py         positions, the K/V, attention over it
normalising.py, activations.py, gating.py    norms, quantising, gates of rows
routing.py                                   the router's choice, and rows sorted by expert
experts.py                                   the chosen experts of all rows
sampling.py, weighing.py                     the next token
exponential.py                               exp, sigmoid and silu
"""
