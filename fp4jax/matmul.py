"""dot_general: a quantized product of any two arrays, as `jax.lax.dot_general` has it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax.gather import Gather
from fp4jax.kernels.registry import Kernels
from fp4jax.linear import STREAMS, Spec, linear
from fp4jax.manual import varying_alike
from fp4jax.products import Dense
from fp4jax.recipe import Recipe
from fp4jax.refuse import refuse_explicit
from fp4jax.rounding import key_words

DimensionNumbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    *,
    recipe: Recipe,
    key: Array | None = None,
    preferred_element_type: Any = None,
    gather: Gather | None = None,
    kernels: Kernels = Kernels(),
) -> Array:
    """`jax.lax.dot_general` with quantized products in both passes.

    ``lhs`` is the activation, ``rhs`` the weight. Contracting axes are flattened to one, ``K``,
    and so are the free axes of each side (``M`` tokens, ``N`` features) and the batch axes; blocks
    run along ``K`` in Fprop, ``N`` in Dgrad and ``M`` in Wgrad. A tensor scale spans the batch.

    Args:
      lhs: floating-point array.
      rhs: floating-point array.
      dimension_numbers: as in lax: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
      recipe: what becomes of each operand.
      key: a JAX PRNG key; needed if the recipe rounds stochastically, else unused.
      preferred_element_type: dtype of the result; by default the promoted dtype of both sides.
        Products accumulate in float32 whatever it is.
      gather: how ``rhs`` lies on a mesh, if its shards are to travel quantized.
      kernels: what runs it; by default what is proven on the platform.

    Returns:
      Batch, then free lhs, then free rhs axes. Cotangents have the dtypes of ``lhs`` and ``rhs``
      and are computed in float32.

    Raises:
      TypeError: if an argument is not floating-point or the recipe is not a `Recipe`.
      ValueError: if the key is missing, ``gather`` does not fit ``rhs`` or the mesh, or kernels
        are named that cannot run here or not with this product.
      NotImplementedError: for second derivatives.
    """
    check_product(lhs, rhs, recipe, preferred_element_type)
    words = random_words(recipe, key)
    return multiply(
        lhs, rhs, dimension_numbers, recipe, words, preferred_element_type, gather, kernels
    )


def multiply(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    recipe: Recipe,
    words: Array | None,
    preferred_element_type: Any,
    gather: Gather | None,
    kernels: Kernels = Kernels(),
) -> Array:
    """`dot_general` of checked arguments; without words what draws random bits raises."""
    if not isinstance(kernels, Kernels):
        raise TypeError(f"kernels must be fp4jax.Kernels(...), not {kernels!r}")
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    # Shapes and dtype of the result, and the checks of dimension_numbers, are lax's own.
    result = jax.eval_shape(
        lambda a, b: lax.dot_general(
            a, b, dimension_numbers, preferred_element_type=preferred_element_type
        ),
        lhs,
        rhs,
    )
    if lhs.size == 0 or rhs.size == 0:
        return varying_alike(jnp.zeros(result.shape, result.dtype), lhs, rhs)[0]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = _others(lhs.ndim, lhs_batch, lhs_contract)
    rhs_free = _others(rhs.ndim, rhs_batch, rhs_contract)
    x = _grouped(lhs, (lhs_batch, lhs_free, lhs_contract))
    rhs_groups = (rhs_batch, rhs_contract, rhs_free)
    w = _grouped(rhs, rhs_groups)
    if gather is not None:
        gather = gather.grouped(rhs.shape, rhs_groups if rhs_batch else rhs_groups[1:])
    out_dtype, lhs_dtype, rhs_dtype = (np.dtype(a.dtype) for a in (result, lhs, rhs))
    spec = Spec(recipe, out_dtype, lhs_dtype, rhs_dtype, gather, kernels)
    x, w, words = varying_alike(x, w, words)
    return linear(spec, x, w, words, Dense()).reshape(result.shape)


def check_product(lhs: Array, rhs: Array, recipe: Recipe, preferred_element_type: Any) -> None:
    """Raises TypeError or ValueError unless both arguments and the rest are what they must be."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe such as fp4jax.recipes.nvfp4(), not {recipe!r}")
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{name} must be an array, not {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point, not {array.dtype}{list(array.shape)}")
        refuse_explicit(**{name: jnp.asarray(array)})
    if preferred_element_type is not None and not jnp.issubdtype(
        preferred_element_type, jnp.floating
    ):
        raise TypeError(
            f"preferred_element_type must be floating-point, not {preferred_element_type}"
        )


def random_words(recipe: Recipe, key: Array | None) -> Array | None:
    """The words of all operands' random streams, None if the recipe draws none.

    Raises:
      ValueError: if the key is missing.
    """
    if not recipe.needs_key:
        return None
    if key is None:
        raise ValueError(f"key is missing: recipe {recipe.name!r} rounds stochastically")
    return key_words(key, STREAMS)


def _others(ndim: int, *used: tuple[int, ...]) -> tuple[int, ...]:
    taken = {axis % ndim for axes in used for axis in axes}
    return tuple(axis for axis in range(ndim) if axis not in taken)


def _grouped(x: Array, groups: tuple[tuple[int, ...], ...]) -> Array:
    """``x`` with each group of axes flattened to one, in that order; no batch axis if none."""
    sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
    order = [axis for group in groups for axis in group]
    return lax.transpose(x, order).reshape(sizes if groups[0] else sizes[1:])
