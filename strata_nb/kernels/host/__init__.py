"""Kernels of the host: Numba on the CPU, over packed weights.

    y[row, output] = sum over the columns of x[row, column] * w[output, column]

What a product with packed weights is, to the bit, on every path, for any number of rows and any
split of the outputs:

    A unit is what shares a scale: 32 values, or 16 in the types whose groups have 16. The integer
    product of a unit is exact. Units with an even number add up in one float32 sum, those with an
    odd number in another, each in the order of the row:

        sum = fma(float(integer product), weight scale * activation scale, sum)
        sum = fma(-minimum, float(sum of activation quants) * activation scale, sum)

    the second line where the type has minima. The result is even sum + odd sum.

    functions.py     which function each launch of a program is; threads.py runs them
    operations.py    what such a function is

    linear.py, experts.py    products; matrices.py chooses the function for a type
    window.py        products with few rows          prompt.py   products with many
    plain.py         products with F32, F16, BF16    activations.py   quantising rows
                                                     (../quantised_rows.py: their layout)
    weights.py, grids.py    what a sub-block of each type is, in registers
    steps.py, products.py   the parts that matrix kernels share

    embedding.py, normalising.py, gating.py, routing.py    kernels over rows
    rotation.py, attention.py, attention_block.py, planes.py   positions, K/V and attention
    exponential.py   exp of our own
    vectors.py, lanes.py    SIMD vectors in Numba    instructions.py, capability.py   the processor
    array_products.py   the door for tests and benchmarks of products
"""
