"""A convolution as the quantized product of its input's patches and its kernel."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from fp4jax.gather import Gather
from fp4jax.matmul import multiply
from fp4jax.recipe import Recipe


def convolve(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    recipe: Recipe,
    words: Array | None,
    dtype: Any,
    gather: Gather | None,
) -> Array:
    """`jax.lax.conv_general_dilated` of one feature group with quantized products in both passes.

    Fprop contracts over input channels and window, channels slowest; Wgrad over all positions.
    The patches, as many times larger than the input as the window has positions, are what is
    quantized and kept for the backward pass.
    """
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    out_features, in_features, *window = numbers.rhs_spec
    patches = lax.conv_general_dilated_patches(
        lhs,
        [rhs.shape[axis] for axis in window],
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        precision=lax.Precision.HIGHEST,  # it only moves numbers, and must not round them
    )
    kernel = lax.transpose(rhs, (in_features, *window, out_features))
    kernel = kernel.reshape(math.prod(kernel.shape[:-1]), -1)
    if gather is not None:
        gather = gather.grouped(rhs.shape, ((in_features, *window), (out_features,)))
    contract = ((numbers.out_spec[1],), (0,))
    y = multiply(patches, kernel, (contract, ((), ())), recipe, words, dtype, gather)
    return jnp.moveaxis(y, -1, numbers.out_spec[1])
