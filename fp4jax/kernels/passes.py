"""The passes of a linear layer on packed operands, each tensor quantized once for both products.

Where plain JAX lets the compiler fuse quantization into the products, kernels write their operands
to memory: x and its gradient in two forms by one kernel each, and so a weight of square blocks.
"""

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from fp4jax.encode import encode
from fp4jax.kernels import operands
from fp4jax.kernels.registry import QUANTIZE, SCALED_MATMUL, Choice, Kernels, choose
from fp4jax.kernels.wanted import Want
from fp4jax.qtensor import QTensor
from fp4jax.quantizer import Quantizer
from fp4jax.recipe import OperandRule, Recipe
from fp4jax.scaled_matmul import multiply


class Chosen(NamedTuple):
    """What the operations of a layer run by; None for plain JAX."""

    quantize: Choice | None
    scaled_matmul: Choice | None

    @property
    def forced(self) -> bool:
        """Whether some operation was asked for by name, so that the platform does not matter."""
        return any(choice is not None and choice.forced for choice in self)


def chosen(
    kernels: Kernels, recipe: Recipe, arrays: tuple[Any, Any, Any], reason: str | None
) -> Chosen | None:
    """What the layer's operations run by; None for the layer in plain JAX.

    Args:
      kernels: what is asked for.
      recipe: the layer's.
      arrays: the activation, the weight and the gradient, or what has their dtype and axes.
      reason: why this layer cannot run by kernels, or None.

    Raises:
      ValueError: if kernels are asked for that cannot run here or not for this layer.
    """
    rules = [rule for gemm in recipe.gemms for rule in (gemm.lhs, gemm.rhs)]
    if not all(isinstance(rule, Quantizer) for rule in rules):
        reason = reason or f"recipe {recipe.name!r} does not quantize all six operands"
    if reason is not None:
        named = [name for name in (kernels.quantize, kernels.scaled_matmul) if name]
        if any(name != "xla" for name in named):
            raise ValueError(f"{kernels} cannot run this product: {reason}")
        return None
    fprop, dgrad, wgrad = recipe.gemms
    quantize = []
    for name, array, wants in (
        ("activation", arrays[0], ((fprop.lhs, -1), (wgrad.lhs, -2))),
        ("weight", arrays[1], ((fprop.rhs, -2), (dgrad.rhs, -1))),
        ("gradient", arrays[2], ((dgrad.lhs, -1), (wgrad.rhs, -2))),
    ):
        for rule, axis in wants:
            try:
                choice = choose(QUANTIZE, kernels.quantize, array, _want(rule, axis))
            except ValueError as error:
                raise ValueError(f"{error} (quantize, for the {name})") from None
            quantize.append(choice)
    products = [
        choose(SCALED_MATMUL, kernels.scaled_matmul, gemm.lhs, gemm.rhs) for gemm in recipe.gemms
    ]
    same = Chosen(*(group[0] if len(set(group)) == 1 else None for group in (quantize, products)))
    return same if any(same) else None


def forward(
    by: Chosen,
    recipe: Recipe,
    x: Array,
    w: Array,
    streams: tuple[Array | None, ...],
    out_dtype: np.dtype[Any],
    weight_is_shared: bool,
) -> tuple[Array, tuple[QTensor, QTensor | Array]]:
    """Fprop, and what the backward pass keeps of ``x`` [M, K] and ``w`` [K, N].

    Args:
      by: what the operations run by.
      recipe: whose operands all are quantized.
      x: the activation.
      w: the weight.
      streams: the words of the operands' random streams, in the order of the recipe's fields.
      out_dtype: of the result.
      weight_is_shared: whether Fprop and Dgrad see the same quantized weight.
    """
    x_operand, x_kept = _quantize(
        by, x, (_want(recipe.fprop.lhs, -1), _want(recipe.wgrad.lhs, -2)), (streams[0], streams[4])
    )
    w_kept: QTensor | Array = w
    if weight_is_shared:
        weight = recipe.fprop.rhs
        w_operand, w_kept = _quantize(by, w, (_want(weight, -2), _want(weight, -1)), (None, None))
    else:
        (w_operand,) = _quantize(by, w, (_want(recipe.fprop.rhs, -2),), (streams[1],))
    y = multiply(by.scaled_matmul, out_dtype, x_operand, w_operand)
    return y, (x_kept, w_kept)


def backward(
    by: Chosen,
    recipe: Recipe,
    kept: tuple[QTensor, QTensor | Array],
    dy: Array,
    streams: tuple[Array | None, ...],
    dtypes: tuple[np.dtype[Any], np.dtype[Any]],
) -> tuple[Array, Array]:
    """Dgrad and Wgrad from what `forward` kept: the gradients of ``x`` and ``w``."""
    x_kept, w_kept = kept
    if not isinstance(w_kept, QTensor):
        (w_kept,) = _quantize(by, w_kept, (_want(recipe.dgrad.rhs, -1),), (streams[3],))
    dy_operand, dy_columns = _quantize(
        by, dy, (_want(recipe.dgrad.lhs, -1), _want(recipe.wgrad.rhs, -2)), (streams[2], streams[5])
    )
    dx = multiply(by.scaled_matmul, dtypes[0], dy_operand, w_kept)
    return dx, multiply(by.scaled_matmul, dtypes[1], x_kept, dy_columns)


def _want(rule: OperandRule, axis: int) -> Want:
    assert isinstance(rule, Quantizer)
    return Want(rule, axis)


def _quantize(
    by: Chosen, x: Array, wants: tuple[Want, ...], words: tuple[Array | None, ...]
) -> tuple[QTensor, ...]:
    if by.quantize is not None:
        return operands.quantize(by.quantize.body, x, wants, words, interpret=by.quantize.interpret)
    return tuple(
        encode(x, quantizer, axis, stream).pack(x.shape[axis], axis, np.dtype(x.dtype))
        for (quantizer, axis), stream in zip(wants, words, strict=True)
    )
