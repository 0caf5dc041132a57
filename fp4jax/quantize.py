"""quantize and fake_quantize: an array to its `QTensor`, or to the numbers that one stands for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fp4jax.encode import Encoded, encode
from fp4jax.formats import Format
from fp4jax.kernels import operands
from fp4jax.kernels.registry import QUANTIZE, Choice, choose
from fp4jax.kernels.wanted import Want
from fp4jax.qtensor import QTensor, decode_operand
from fp4jax.quantizer import Quantizer, as_quantizer
from fp4jax.refuse import refuse_derivative, refuse_explicit
from fp4jax.rounding import key_words


def quantize(
    x: ArrayLike,
    format_or_quantizer: Format | Quantizer,
    axis: int = -1,
    key: Array | None = None,
    *,
    implementation: str | None = None,
) -> QTensor:
    """Quantizes an array in blocks along one axis.

    The bits are the same eager and jitted, on every backend, and on one device or a mesh (with
    axes of type Auto).

    Args:
      x: float16, bfloat16, float32 or float64 array of any shape but 0-d or empty.
      format_or_quantizer: a `Format` (nearest rounding, its own blocks) or a `Quantizer`.
      axis: the block axis: the contraction axis of the product that ``x`` is meant for.
      key: a JAX PRNG key, for stochastic rounding only.
      implementation: None for the best one that is proven on the platform, ``xla``, ``mosaic`` or
        ``triton``, or one of the last two as ``NAME:interpret`` (`fp4jax.Kernels`). All give the
        same bytes.

    Returns:
      A `QTensor`; ``.dequantize()`` gives the approximation of ``x``.

    Raises:
      TypeError: if ``x`` is not such an array.
      ValueError: if ``x`` is 0-d or empty, ``axis`` is out of range, a key is missing for
        stochastic rounding, or one is given where none is used; if ``x`` is divided along mesh
        axes of type Explicit; or if the implementation cannot run here or does not take these
        arguments.
    """
    x, quantizer, axis, words = _checked(x, format_or_quantizer, axis, key)
    choice = choose(QUANTIZE, implementation, x, _want(quantizer, axis, x))
    return _quantize(choice, quantizer, axis, x, words)


def fake_quantize(
    x: ArrayLike,
    format_or_quantizer: Format | Quantizer,
    axis: int = -1,
    key: Array | None = None,
) -> Array:
    """``quantize(...).dequantize()`` to the bit, without packing: faster, same shape and dtype.

    Arguments and errors as `quantize`. Not differentiable: `fp4jax.dot_general` is.
    """
    x, quantizer, axis, words = _checked(x, format_or_quantizer, axis, key)
    return _fake_quantize(quantizer, axis, x, words)


def _checked(
    x: ArrayLike, format_or_quantizer: Format | Quantizer, axis: int, key: Array | None
) -> tuple[Array, Quantizer, int, Array | None]:
    quantizer = as_quantizer(format_or_quantizer)
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            f"x must be float16, bfloat16, float32 or float64, not {x.dtype}{list(x.shape)}"
        )
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"x must have at least one axis and one element, not shape {x.shape}")
    refuse_explicit(x=x)
    if not isinstance(axis, int):
        raise TypeError(f"axis must be an integer, not {axis!r}")
    if x.ndim == 1 and quantizer.tile is not None and quantizer.tile[0] > 1:
        raise ValueError(f"tile {quantizer.tile} needs two axes; x has shape {x.shape}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be from {-x.ndim} to {x.ndim - 1} for {x.shape}, not {axis}")
    if quantizer.needs_key and key is None:
        raise ValueError(f"key is missing: {_chance(quantizer)} needs a JAX PRNG key")
    if key is not None and not quantizer.needs_key:
        raise ValueError(f"key must be None: {quantizer.rounding} uses no random bits")
    words = None if key is None else key_words(key, 1)[0]
    return x, quantizer, axis % x.ndim - x.ndim, words


def _chance(quantizer: Quantizer) -> str:
    """The part of the quantizer that draws random bits, for a message."""
    return str(quantizer.rounding if quantizer.rounding.needs_key else quantizer.scale_rule)


def _encode_any(
    x: Array, quantizer: Quantizer, axis: int, words: Array | None
) -> tuple[Encoded, int]:
    """`encode` for any rank and axis; also the axis (-1 or -2) that it worked along."""
    if x.ndim == 1:
        x = x[None]
    if axis < -2:
        x, axis = jnp.moveaxis(x, axis, -1), -1
    return encode(x, quantizer, axis, words), axis


def _as_matrix(x: Array, axis: int) -> Array:
    """``x`` for a kernel, which takes two axes: the block axis last, unless there are just two."""
    return x if x.ndim == 2 else jnp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])


def _want(quantizer: Quantizer, axis: int, x: Array) -> Want:
    """The operand of `_as_matrix` that is wanted."""
    return Want(quantizer, axis if x.ndim == 2 else -1)


@refuse_derivative("fp4jax.quantize has no derivative; differentiate fp4jax.dot_general", 3)
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _quantize(
    choice: Choice | None, quantizer: Quantizer, axis: int, x: Array, words: Array | None
) -> QTensor:
    def plain(x: Array, words: Array | None) -> QTensor:
        encoded, _ = _encode_any(x, quantizer, axis, words)
        q = encoded.pack(x.shape[axis], axis, np.dtype(x.dtype))
        return jax.tree.map(lambda a: a[0] if a.ndim else a, q) if x.ndim == 1 else q

    if choice is None:
        return plain(x, words)

    def kernel(x: Array, words: Array | None) -> QTensor:
        matrix, wants = _as_matrix(x, axis), (_want(quantizer, axis, x),)
        (q,) = operands.quantize(choice.body, matrix, wants, (words,), interpret=choice.interpret)
        if x.ndim == 2:
            return q
        # The rows were numbered over all axes but the block axis, in order, as everywhere.
        others = [n for i, n in enumerate(x.shape) if i != x.ndim + axis]
        return dataclasses.replace(
            jax.tree.map(lambda a: a.reshape(*others, a.shape[-1]) if a.ndim else a, q), axis=axis
        )

    if choice.forced:
        return kernel(x, words)
    return lax.platform_dependent(x, words, cuda=kernel, default=plain)


@refuse_derivative("fp4jax.fake_quantize has no derivative; differentiate fp4jax.dot_general", 2)
@functools.partial(jax.jit, static_argnums=(0, 1))
def _fake_quantize(quantizer: Quantizer, axis: int, x: Array, words: Array | None) -> Array:
    encoded, working = _encode_any(x, quantizer, axis, words)
    length = x.shape[axis]
    y = decode_operand(encoded.operand(), quantizer, working, length, np.dtype(x.dtype))
    return y[0] if x.ndim == 1 else y if working == axis else jnp.moveaxis(y, -1, axis)
