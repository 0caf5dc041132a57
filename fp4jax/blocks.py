"""Blocks over the last two axes of an array: padding to whole blocks, their maxima, and back.

A ``window`` is the block's extent over the last two axes: ``(1, 16)`` for blocks along the last
axis, ``(16, 1)`` for blocks along the one before it, ``(16, 16)`` for square ones. Working in
place on either axis spares a transposition of the wide array. With None the whole array is one
block and its maximum a scalar.
"""

import jax.numpy as jnp
from jax import Array, lax

from fp4jax.rounding import bits_float, float_bits

Window = tuple[int, int]


def ceil_to(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def pad(x: Array, window: Window) -> Array:
    """``x`` with zeros appended until ``window`` divides its last two axes."""
    wanted = [ceil_to(n, w) for n, w in zip(x.shape[-2:], window, strict=True)]
    if wanted == list(x.shape[-2:]):
        return x
    ends = [(0, 0)] * (x.ndim - 2) + [(0, w - n) for n, w in zip(x.shape[-2:], wanted, strict=True)]
    return jnp.pad(x, ends)


def amax(x: Array, window: Window | None) -> Array:
    """The largest magnitude in each block of float32 ``x``: [..., M/h, N/w]; NaN if it has one."""
    if window is None:
        return largest(x)
    *batch, rows, columns = x.shape
    height, width = window
    if height > 1:
        x = largest(x.reshape(*batch, rows // height, height, columns), -2)
    if width > 1:
        x = largest(x.reshape(*x.shape[:-1], columns // width, width), -1)
    return x


def largest(x: Array, *axes: int) -> Array:
    """The largest magnitude of float32 ``x`` over the axes, or over all; NaN if there is one.

    As integers magnitudes have the same order, with NaN above all numbers. XLA's maximum of
    floats on CPUs loses a NaN where the axis is long. A plain maximum, and not a reduction by a
    function of ours, is one that devices can share out: a block may lie on several.
    """
    return bits_float(jnp.max(float_bits(jnp.abs(x)), axes or None))


def expand(per_block: Array, window: Window | None) -> Array:
    """Each block's number repeated over its elements, the inverse shape change of `amax`."""
    if window is None:
        return per_block
    height, width = window
    *batch, rows, columns = per_block.shape
    wide = jnp.broadcast_to(per_block[..., None], (*batch, rows, columns, width))
    wide = wide.reshape(*batch, rows, columns * width)
    tall = jnp.broadcast_to(wide[..., None, :], (*batch, rows, height, columns * width))
    return tall.reshape(*batch, rows * height, columns * width)


def sum_in_order(x: Array, size: int, axis: int) -> Array:
    """Sums of ``size`` consecutive elements along ``axis`` (-1 or -2), the first ones first."""
    parts = _parts(x, size, axis)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sum_pairwise(x: Array, size: int, axis: int) -> Array:
    """Sums of ``size`` (a power of two) consecutive elements: the first half plus the second."""
    parts = _parts(x, size, axis)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _parts(x: Array, size: int, axis: int) -> list[Array]:
    """The i-th elements of all groups, for each i."""
    axis = x.ndim + axis
    grouped = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return [lax.index_in_dim(grouped, i, axis + 1, keepdims=False) for i in range(size)]
