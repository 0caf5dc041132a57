"""dot_general whose three products, Fprop, Dgrad and Wgrad, run on quantized operands.

The products are those of 4-bit tensor cores: operands without their tensor scale are exact in
bfloat16, the product accumulates in float32, and the tensor scales multiply the result. Only the
order of accumulation is the backend's own. The backward pass keeps the packed Wgrad operand and
the packed weight, nothing wider.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax.qtensor import Operand, QTensor
from fp4jax.quantize import encode
from fp4jax.quantizer import Quantizer
from fp4jax.recipe import Cast, OperandRule, Recipe
from fp4jax.refuse import refuse_derivative
from fp4jax.rounding import key_words
from fp4jax.watch import report_non_finite

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

    Returns:
      Batch, then free lhs, then free rhs axes. Cotangents have the dtypes of ``lhs`` and ``rhs``
      and are computed in float32.

    Raises:
      TypeError: if an argument is not floating-point or the recipe is not a `Recipe`.
      ValueError: if the key is missing.
      NotImplementedError: for second derivatives.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe such as fp4jax.recipes.nvfp4(), not {recipe!r}")
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{name} must be an array, not {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point, not {array.dtype}{list(array.shape)}")
    if recipe.needs_key and key is None:
        raise ValueError(f"key is missing: recipe {recipe.name!r} rounds stochastically")

    if preferred_element_type is not None and not jnp.issubdtype(
        preferred_element_type, jnp.floating
    ):
        raise TypeError(
            f"preferred_element_type must be floating-point, not {preferred_element_type}"
        )

    # Shapes and dtype of the result, and the checks of dimension_numbers, are lax's own.
    result = jax.eval_shape(
        lambda a, b: lax.dot_general(
            a, b, dimension_numbers, preferred_element_type=preferred_element_type
        ),
        lhs,
        rhs,
    )
    if lhs.size == 0 or rhs.size == 0:
        return jnp.zeros(result.shape, result.dtype)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = _others(lhs.ndim, lhs_batch, lhs_contract)
    rhs_free = _others(rhs.ndim, rhs_batch, rhs_contract)
    x = _grouped(lhs, (lhs_batch, lhs_free, lhs_contract))
    w = _grouped(rhs, (rhs_batch, rhs_contract, rhs_free))
    spec = _Spec(recipe, np.dtype(result.dtype), np.dtype(lhs.dtype), np.dtype(rhs.dtype))
    words = None if key is None or not recipe.needs_key else key_words(key, _STREAMS)
    return _matmul(spec, x, w, words).reshape(result.shape)


class _Spec(NamedTuple):
    recipe: Recipe
    out_dtype: np.dtype[Any]
    lhs_dtype: np.dtype[Any]
    rhs_dtype: np.dtype[Any]


# The six operands' random streams, in the order of Recipe's fields.
_FPROP_LHS, _FPROP_RHS, _DGRAD_LHS, _DGRAD_RHS, _WGRAD_LHS, _WGRAD_RHS = range(6)
_STREAMS = 6

_SECOND = "fp4jax.dot_general has no second derivative: its backward pass is quantized"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(spec: _Spec, x: Array, w: Array, words: Array | None) -> Array:
    """Returns y [B?, M, N] of x [B?, M, K] and w [B?, K, N]."""
    return _forward(spec, x, w, words)[0]


@refuse_derivative(_SECOND, 1)
@functools.partial(jax.jit, static_argnums=0)
def _forward(spec: _Spec, x: Array, w: Array, words: Array | None) -> tuple[Array, Any]:
    fprop, wgrad = spec.recipe.fprop, spec.recipe.wgrad
    x_operand = _operand(x, fprop.lhs, -1, words, _FPROP_LHS)
    if _weight_is_shared(spec.recipe):
        # One quantization, blocks along N; square tiles make it serve K as well.
        assert isinstance(fprop.rhs, Quantizer)
        encoded = encode(w, fprop.rhs, -1, None)
        w_operand = encoded.operand()
        w_kept: QTensor | Array = encoded.pack(w.shape[-1], -1, spec.rhs_dtype)
    else:
        w_operand, w_kept = _operand(w, fprop.rhs, -2, words, _FPROP_RHS), w
    y = _product(x_operand, w_operand, -1, -2)
    x_kept = _keep(x, wgrad.lhs, words)
    return y.astype(spec.out_dtype), (x_kept, w_kept, words)


@refuse_derivative(_SECOND, 1)
@functools.partial(jax.jit, static_argnums=0)
def _backward(spec: _Spec, kept: Any, dy: Array) -> tuple[Array, Array]:
    x_kept, w_kept, words = kept
    dgrad, wgrad = spec.recipe.dgrad, spec.recipe.wgrad
    if isinstance(w_kept, QTensor):
        w_operand = w_kept.operand()
    else:
        w_operand = _operand(w_kept, dgrad.rhs, -1, words, _DGRAD_RHS)
    dx = _product(_operand(dy, dgrad.lhs, -1, words, _DGRAD_LHS), w_operand, -1, -1)

    dy_operand = _operand(dy, wgrad.rhs, -2, words, _WGRAD_RHS)
    if isinstance(x_kept, QTensor):
        dw = _product(x_kept.operand(), dy_operand, -1, -2)
    else:
        dw = _product(Operand(x_kept, None), dy_operand, -2, -2)
    return dx.astype(spec.lhs_dtype), dw.astype(spec.rhs_dtype)


def _matmul_bwd(spec: _Spec, kept: Any, dy: Array) -> tuple[Array, Array, Any]:
    words = kept[-1]
    no_gradient = None if words is None else np.zeros(words.shape, jax.dtypes.float0)
    return *_backward(spec, kept, dy), no_gradient


_matmul.defvjp(_forward, _matmul_bwd)


def _weight_is_shared(recipe: Recipe) -> bool:
    """Whether Fprop and Dgrad see the same quantized weight."""
    fprop, dgrad = (
        dataclasses.replace(gemm.rhs, watch=None) for gemm in (recipe.fprop, recipe.dgrad)
    )
    return isinstance(fprop, Quantizer) and fprop == dgrad and fprop.square


def _operand(x: Array, rule: OperandRule, axis: int, words: Array | None, stream: int) -> Operand:
    if isinstance(rule, Cast):
        return Operand(_cast(x, rule), None)
    return encode(x, rule, axis, _stream(rule, words, stream)).operand()


def _keep(x: Array, rule: OperandRule, words: Array | None) -> QTensor | Array:
    """The Wgrad operand of the activation, blocks along the tokens, as the backward keeps it."""
    if isinstance(rule, Cast):
        return _cast(x, rule)
    encoded = encode(x, rule, -2, _stream(rule, words, _WGRAD_LHS))
    return encoded.pack(x.shape[-2], -2, np.dtype(x.dtype))


def _cast(x: Array, rule: Cast) -> Array:
    if rule.watch is not None:
        report_non_finite(x, rule.watch)
    return x.astype(rule.dtype)


def _stream(rule: Quantizer, words: Array | None, stream: int) -> Array | None:
    if not rule.needs_key:
        return None
    assert words is not None
    return words[stream]


def _product(a: Operand, b: Operand, a_contract: int, b_contract: int) -> Array:
    """The batched matrix product over the given axes (from the end), in float32."""
    batch = tuple(range(a.values.ndim - 2))
    contract = ((a.values.ndim + a_contract,), (b.values.ndim + b_contract,))
    dtype = jnp.promote_types(a.values.dtype, b.values.dtype)
    product = lax.dot_general(
        a.values.astype(dtype),
        b.values.astype(dtype),
        (contract, (batch, batch)),
        # GPUs would otherwise round float32 operands to TF32.
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    # One scale after the other: their product could underflow.
    if a.scale is not None:
        product = product * _beside(a.scale, a_contract, -1)
    if b.scale is not None:
        product = product * _beside(b.scale, b_contract, -2)
    return product


def _beside(scale: Array, contract: int, product_axis: int) -> Array:
    """A scale per row of an operand, turned so that its length-1 axis is ``product_axis``."""
    turn = scale.ndim > 0 and contract != product_axis
    return jnp.swapaxes(scale, -1, -2) if turn else scale


def _others(ndim: int, *used: tuple[int, ...]) -> tuple[int, ...]:
    taken = {axis % ndim for axes in used for axis in axes}
    return tuple(axis for axis in range(ndim) if axis not in taken)


def _grouped(x: Array, groups: tuple[tuple[int, ...], ...]) -> Array:
    """``x`` with each group of axes flattened to one, in that order; no batch axis if none."""
    sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
    order = [axis for group in groups for axis in group]
    return lax.transpose(x, order).reshape(sizes if groups[0] else sizes[1:])
