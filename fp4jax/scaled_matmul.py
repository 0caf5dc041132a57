"""scaled_matmul: the product of two quantized matrices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax.kernels import product
from fp4jax.kernels.registry import SCALED_MATMUL, Choice, choose
from fp4jax.products import Dense, promoted
from fp4jax.qtensor import QTensor
from fp4jax.refuse import refuse_derivative


def scaled_matmul(
    a: QTensor,
    b: QTensor,
    *,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> Array:
    """The product of two quantized matrices over their block axes, [M, N].

    Elements times block scales are multiplied as they are and summed in float32; the tensor scales
    multiply the sums, one after the other. Implementations differ in the order of the sums alone.

    Args:
      a: stands for a matrix with block axis K and another, M.
      b: stands for a matrix with block axis K and another, N.
      preferred_element_type: dtype of the result; by default the promoted one of the arrays that
        were quantized.
      implementation: None for the best one that is proven on the platform, ``xla``, ``hopper``,
        ``blackwell``, ``cudnn``, or ``hopper:interpret`` (`fp4jax.Kernels`).

    Raises:
      TypeError: if an operand is no `QTensor`, or the dtype is not floating-point.
      ValueError: if an operand has not two axes, their block axes differ in length or only one is
        transformed, or the implementation cannot run here or does not take these operands.
    """
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, QTensor):
            raise TypeError(f"{name} must be a QTensor, not {type(q).__name__}")
        if q.ndim != 2:
            raise ValueError(f"{name} must have two axes, not shape {q.shape}; use jax.vmap")
    if a.length != b.length:
        raise ValueError(f"a and b must have block axes of one length, not {a.length}, {b.length}")
    if a.quantizer.hadamard != b.quantizer.hadamard:
        raise ValueError(
            "a and b must have the same Hadamard transform, or the product would change, not "
            f"{a.quantizer.hadamard} and {b.quantizer.hadamard}"
        )
    dtype = promoted(a, b) if preferred_element_type is None else np.dtype(preferred_element_type)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"preferred_element_type must be floating-point, not {dtype}")
    return multiply(choose(SCALED_MATMUL, implementation, a.quantizer, b.quantizer), dtype, a, b)


@refuse_derivative("scaled_matmul has no derivative; differentiate fp4jax.dot_general", 2)
@functools.partial(jax.jit, static_argnums=(0, 1))
def multiply(choice: Choice | None, dtype: np.dtype[Any], a: QTensor, b: QTensor) -> Array:
    """`scaled_matmul` of checked operands by an implementation that was chosen."""

    def plain(a: QTensor, b: QTensor) -> Array:
        return Dense().rows(a.operand(), b.operand(), -1).astype(dtype)

    if choice is None:
        return plain(a, b)

    def kernel(a: QTensor, b: QTensor) -> Array:
        return product.multiply(choice.body, a, b, dtype, interpret=choice.interpret)

    if choice.forced:
        return kernel(a, b)
    return lax.platform_dependent(a, b, cuda=kernel, default=plain)
