"""ragged_dot: the grouped product of a mixture of experts, each group with scales of its own."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp4jax.gather import Gather
from fp4jax.linear import Spec, linear
from fp4jax.manual import varying_alike
from fp4jax.matmul import check_product, random_words
from fp4jax.products import Tiles, promoted
from fp4jax.quantizer import Quantizer
from fp4jax.recipe import Recipe

# Rows that are multiplied at once: enough for a fast product, few enough to waste little.
_ROWS = 64


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    recipe: Recipe,
    key: Array | None = None,
    preferred_element_type: Any = None,
    gather: Gather | None = None,
) -> Array:
    """`jax.lax.ragged_dot` with quantized products in both passes.

    The first ``group_sizes[0]`` rows of ``lhs`` meet ``rhs[0]``, the next ones ``rhs[1]``, and so
    on. Each group is quantized as if it were alone: its rows, their gradients and its weight have
    tensor scales of its own, Wgrad's blocks along the rows start at its first row and end at its
    last, and a NaN stays in it. The random bits of stochastic rounding are numbered with each
    group padded to whole tiles of 64 rows (more if a block is longer).

    Args:
      lhs: floating-point [M, K], the activations sorted by group.
      rhs: floating-point [G, K, N], the groups' weights.
      group_sizes: integers [G] that sum to M or less, each 0 or more.
      recipe: what becomes of each operand.
      key: a JAX PRNG key, needed if the recipe rounds stochastically.
      preferred_element_type: dtype of the result; by default the promoted dtype of both sides.
      gather: how ``rhs`` lies on a mesh, if its shards are to travel quantized.

    Returns:
      [M, N]; rows after the last group are zero.

    Raises:
      TypeError: if an argument has the wrong dtype or the recipe is not a `Recipe`.
      ValueError: if shapes do not fit, known group sizes are negative or sum to more than M, or
        the key is missing.
      NotImplementedError: for second derivatives.
    """
    check_product(lhs, rhs, recipe, preferred_element_type)
    dtype = preferred_element_type or promoted(lhs, rhs)
    words = random_words(recipe, key)
    return group_product(lhs, rhs, group_sizes, recipe, words, dtype, gather)


def group_product(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    recipe: Recipe,
    words: Array | None,
    preferred_element_type: Any,
    gather: Gather | None,
) -> Array:
    """`ragged_dot` of checked operands; without words what draws random bits raises."""
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    group_sizes = _checked_sizes(lhs, rhs, group_sizes)
    dtype = np.dtype(preferred_element_type)
    if lhs.size == 0 or rhs.size == 0:
        y = jnp.zeros((lhs.shape[0], rhs.shape[2]), dtype)
        return varying_alike(y, lhs, rhs, group_sizes)[0]
    # Each row's place in the tiles, and each place's row; out of range where there is none.
    rows, groups = lhs.shape[0], rhs.shape[0]
    length = math.lcm(_ROWS, *_row_multiples(recipe))
    used = -(-group_sizes // length)
    tiles = rows // length + groups
    group = jnp.searchsorted(jnp.cumsum(used), jnp.arange(tiles), side="right").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    first_row, first_place = (jnp.cumsum(n) - n for n in (group_sizes, used * length))
    place_in_group = jnp.arange(tiles * length, dtype=jnp.int32) - jnp.repeat(
        first_place[group], length
    )
    row = jnp.repeat(first_row[group], length) + place_in_group
    row = jnp.where(place_in_group < jnp.repeat(group_sizes[group], length), row, rows)
    place = jnp.full(rows, tiles * length, jnp.int32)
    place = place.at[row].set(jnp.arange(tiles * length, dtype=jnp.int32), mode="drop")

    x = jnp.take(lhs, row, 0, mode="fill", fill_value=0).reshape(tiles, length, -1)
    layout = Tiles(group, jnp.sum(used), jnp.arange(groups, dtype=jnp.int32))
    if gather is not None:
        gather = gather.grouped(rhs.shape, [[0], [1], [2]])
    spec = Spec(recipe, dtype, np.dtype(lhs.dtype), np.dtype(rhs.dtype), gather)
    x, w, words, layout = varying_alike(x, rhs, words, layout)
    y = linear(spec, x, w, words, layout)
    return jnp.take(y.reshape(tiles * length, -1), place, 0, mode="fill", fill_value=0)


def _row_multiples(recipe: Recipe) -> list[int]:
    """What must divide a tile so that no block and no transform along the rows crosses its end."""
    sizes = [1]
    for gemm in recipe.gemms:
        for rule in (gemm.lhs, gemm.rhs):
            if rule.hadamard is not None:
                sizes.append(rule.hadamard.size)
            if isinstance(rule, Quantizer) and rule.tile is not None:
                sizes.append(max(rule.tile))
    return sizes


def _checked_sizes(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"lhs and rhs must have shapes [M, K] and [G, K, N], not {lhs.shape} and {rhs.shape}"
        )
    group_sizes = jnp.asarray(group_sizes)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers, not {group_sizes.dtype}")
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(
            f"group_sizes must have shape {rhs.shape[:1]}, one for each matrix of rhs, not "
            f"{group_sizes.shape}"
        )
    if not isinstance(group_sizes, jax.core.Tracer) and group_sizes.size:
        known = np.asarray(group_sizes)
        if known.min() < 0 or known.sum() > lhs.shape[0]:
            raise ValueError(
                f"group_sizes must be 0 or more and sum to at most {lhs.shape[0]} rows, not "
                f"{known.tolist()}"
            )
    return group_sizes.astype(jnp.int32)
