"""einsum and matmul: the notations of NumPy for quantized products of two arrays at a time."""

import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum
from jax import Array, lax

from fp4jax.gather import Gather
from fp4jax.matmul import check_product, multiply, random_words
from fp4jax.products import promoted
from fp4jax.recipe import Recipe


def einsum(
    subscripts: str,
    *operands: Array,
    recipe: Recipe,
    key: Array | None = None,
    preferred_element_type: Any = None,
    gather: Gather | None = None,
) -> Array:
    """`jax.numpy.einsum` with quantized products in both passes.

    Of two operands the first is the activation, the second the weight, as in `fp4jax.dot_general`.
    More operands are multiplied two at a time, in the order that opt_einsum finds cheapest; a
    product takes the place of its first factor. Indices of one operand alone that the result
    lacks are summed, and repeated ones taken from the diagonal, before that operand is quantized.

    Args:
      subscripts: with or without ``->`` and ``...``.
      *operands: two or more floating-point arrays.
      recipe: what becomes of each operand.
      key: a JAX PRNG key, needed if the recipe rounds stochastically.
      preferred_element_type: dtype of the result; by default the promoted dtype of all operands.
      gather: how the second of two operands lies on a mesh, if its shards are to travel quantized.

    Raises:
      TypeError: if an operand is not a floating-point array or the recipe is not a `Recipe`.
      ValueError: if there are fewer than two operands, the subscripts do not fit them, or the key
        is missing.
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"subscripts must be a string, not {type(subscripts).__name__}")
    if len(operands) < 2:
        raise ValueError(f"einsum multiplies two or more operands, not {len(operands)}")
    for operand in operands[1:]:
        check_product(operands[0], operand, recipe, preferred_element_type)
    dtype = preferred_element_type or promoted(*operands)

    def draw(step: int) -> Array | None:
        # Each product of a chain draws bits of its own; a single one those of dot_general.
        step_key = key if key is None or step == 0 else jax.random.fold_in(key, step)
        return random_words(recipe, step_key)

    return contract(subscripts, operands, recipe, draw, dtype, gather)


def contract(
    subscripts: str,
    operands: Sequence[Array],
    recipe: Recipe,
    draw: Callable[[int], Array | None],
    dtype: Any,
    gather: Gather | None,
) -> Array:
    """`einsum` of checked arguments; ``draw`` gives the random words of each step."""
    if gather is not None and len(operands) != 2:
        raise ValueError(f"gather is of the second of two operands; there are {len(operands)}")
    _, path = opt_einsum.contract_path(subscripts, *operands, einsum_call=True)
    remaining = list(enumerate(operands))  # with their places, which decide who is lhs
    for step, (indices, _, contraction, *_) in enumerate(path):
        picked = [remaining.pop(i) for i in indices]
        terms, result = contraction.split("->")
        factors = sorted(
            ((place, x, term) for (place, x), term in zip(picked, terms.split(","), strict=True)),
            key=lambda factor: factor[0],
        )
        if len(factors) != 2:
            raise ValueError(f"subscripts {subscripts!r} leave an operand without a product")
        (place, x, x_term), (_, w, w_term) = factors
        y = _pair(x, x_term, w, w_term, result, recipe, draw(step), dtype, gather)
        remaining.append((place, y))
    return remaining[0][1]


def matmul(
    a: Array,
    b: Array,
    *,
    recipe: Recipe,
    key: Array | None = None,
    preferred_element_type: Any = None,
    gather: Gather | None = None,
) -> Array:
    """`jax.numpy.matmul` with quantized products in both passes; ``b`` is the weight.

    Args:
      a: [..., M, K] or [K].
      b: [..., K, N] or [K]; the leading axes of both broadcast.
      recipe: what becomes of each operand.
      key: a JAX PRNG key, needed if the recipe rounds stochastically.
      preferred_element_type: dtype of the result; by default the promoted dtype of both.
      gather: how ``b`` lies on a mesh, if its shards are to travel quantized.

    Returns:
      [..., M, N], without the axis that a vector lacks.

    Raises:
      TypeError: if an argument is not a floating-point array or the recipe is not a `Recipe`.
      ValueError: if an argument has no axis, the shapes do not fit or the key is missing.
    """
    check_product(a, b, recipe, preferred_element_type)
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(f"matmul needs arrays with axes, not shapes {a.shape} and {b.shape}")
    batch = string.ascii_lowercase[: max(a.ndim, b.ndim, 2) - 2]
    a_term = batch[len(batch) - max(a.ndim - 2, 0) :] + ("MK" if a.ndim > 1 else "K")
    b_term = batch[len(batch) - max(b.ndim - 2, 0) :] + ("KN" if b.ndim > 1 else "K")
    result = batch + "M" * (a.ndim > 1) + "N" * (b.ndim > 1)
    if a.shape[-1] != (b.shape[-2] if b.ndim > 1 else b.shape[0]):
        raise ValueError(f"matmul contracts axes of one length, not shapes {a.shape}, {b.shape}")
    jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    dtype = preferred_element_type or promoted(a, b)
    words = random_words(recipe, key)
    return _pair(a, a_term, b, b_term, result, recipe, words, dtype, gather)


def _pair(
    x: Array,
    x_term: str,
    w: Array,
    w_term: str,
    result: str,
    recipe: Recipe,
    words: Array | None,
    dtype: Any,
    gather: Gather | None,
) -> Array:
    """One product, x the activation; every index is a single letter and none is an ellipsis."""
    given = w_term
    (x, x_term), (w, w_term) = _squeezed(x, x_term, w, w_term), _squeezed(w, w_term, x, x_term)
    x, x_term = _own_part(x, x_term, w_term + result)
    w, w_term = _own_part(w, w_term, x_term + result)
    if gather is not None and w_term != given:
        raise ValueError(f"gather is of a weight {given!r} whose every axis a product uses once")
    both = [i for i in x_term if i in w_term]
    batch, contract = [i for i in both if i in result], [i for i in both if i not in result]
    dimensions = tuple(
        tuple(tuple(term.index(i) for i in indices) for term in (x_term, w_term))
        for indices in (contract, batch)
    )
    y = multiply(x, w, dimensions, recipe, words, dtype, gather)  # type: ignore[arg-type]
    kept = [*batch, *(i for i in x_term + w_term if i not in both)]
    return lax.transpose(y, [kept.index(i) for i in result])


def _squeezed(x: Array, term: str, other: Array, other_term: str) -> tuple[Array, str]:
    """``x`` without axes of length 1 that broadcast against longer ones."""
    sizes = dict(zip(other_term, other.shape, strict=True))
    axes = [axis for axis, i in enumerate(term) if x.shape[axis] == 1 and sizes.get(i, 1) != 1]
    return lax.squeeze(x, axes), "".join(i for axis, i in enumerate(term) if axis not in axes)


def _own_part(x: Array, term: str, wanted: str) -> tuple[Array, str]:
    """``x`` summed over the indices that are not wanted, and the diagonal of repeated ones."""
    kept = "".join(i for i in dict.fromkeys(term) if i in wanted)
    return (x if kept == term else jnp.einsum(f"{term}->{kept}", x)), kept
