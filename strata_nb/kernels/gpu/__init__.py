"""The kernels of the table for graphics cards, written once for NVIDIA and AMD.

From a program to machine code:

    launches.py       what a card launches for a program: passes over it, each in a file of its own
      functions.py        the card's kernel for a launch of the table
      product_launches.py, last_norm.py, router.py, attention_ready.py, pool_answers.py
                          of a single row what one launch can do together
      routed.py           a layer's routing and experts
      attention_launches.py, attention_slices.py, batches.py, warpgroup_launches.py
                          attention; more rows than a window has
    card_launch.py    a kernel with its arguments
    operations.py     what a kernel is, and what kernels share
    intrinsics/       the instructions that Python lacks, by name
    binding.py        gives the names in a kernel their meaning
    compile.py        Numba makes machine code of a kernel: the only importer of numba.cuda
    machine_code.py   a look at that of warpgroups, which a linker has got wrong
    cubins.py         machine code on disk

Kernels and what they are made of, in the order of a step:

    embedding.py
    normalising.py, held_rows.py, activations.py, gating.py     norms, quantising, gates of rows
    linear.py, one_row.py, normed_rows.py, float_linear.py      rows times a weight
    rotation.py, preparing.py, batch_preparing.py, planes.py    positions, the K/V
    attention.py, attention_halves.py, halves.py, runs.py, combining.py
                                                                attention of windows
    attention_tiles.py, attention_sets.py, attention_products.py, attention_results.py
                                                                attention of prompt batches
    attention_batches.py, attention_blocks.py, attention_fragments.py, attention_spans.py,
    attention_weights.py, attention_warpgroups.py               the same in an order of its own
    router.py, routing.py, filling.py                           the choice of experts, and of slots
    experts.py, expert_*.py, pooled.py, early_*.py              the chosen experts of all rows
    grouping.py, grouped.py, gathering.py                       experts of prompt batches
    batch_*.py, fragments.py, scaling.py                        products of many rows
    warpgroup_*.py, half_stages.py                              the same by warpgroups
    sampling.py, weighing.py                                    the next token
    reading.py                                                  how fast memory can be read

What products read of each type of weights:

    products.py                         decoders of all types, and the product of a row
    weights.py, grids.py, tables.py     quants in blocks, points of a grid, levels looked up
    tiles.py, tiles_iq.py, tile_rows.py 256 values of eight rows at a time
    floats.py                           weights without blocks
    exponential.py                      exp, sigmoid and silu
"""
