"""The matrix products of a linear layer: plain ones, and those of rows that belong to groups.

A layout knows which rows of the activation meet which weight matrix. Operands without their
tensor scale are exact in bfloat16; the product accumulates in float32 and the tensor scales
multiply the result, as in 4-bit tensor cores. Axes are counted from the end: -1 or -2.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp4jax.manual import varying_alike
from fp4jax.qtensor import Operand


class Layout(Protocol):
    """How the rows of the activation [..., M, K] meet the weights [..., K, N]."""

    @property
    def row_groups(self) -> Array | None:
        """Which leading entries of activation and gradient share a tensor scale; None for all."""

    @property
    def weight_groups(self) -> Array | None:
        """The same of the weight."""

    def rows(self, a: Operand, b: Operand, b_contract: int) -> Array:
        """Fprop and Dgrad: rows of ``a`` (contracting its last axis) times matrices ``b``."""

    def weights(
        self, a: Operand, b: Operand, a_contract: int, b_contract: int, parts: Any = jnp.float32
    ) -> Array:
        """Wgrad: for each matrix the product of its rows of ``a`` with those of ``b``.

        ``parts`` is the dtype of the sums over each device's rows, which are then added.
        """


class Dense(NamedTuple):
    """Every row of a batch entry meets the weight of that entry; one tensor scale for all."""

    @property
    def row_groups(self) -> Array | None:
        return None

    @property
    def weight_groups(self) -> Array | None:
        return None

    def rows(self, a: Operand, b: Operand, b_contract: int) -> Array:
        return self.weights(a, b, -1, b_contract)

    def weights(
        self, a: Operand, b: Operand, a_contract: int, b_contract: int, parts: Any = jnp.float32
    ) -> Array:
        product = _contract(a.values, b.values, a_contract, b_contract, parts).astype(jnp.float32)
        # One scale after the other: their product could underflow.
        if a.scale is not None:
            product = product * _beside(a.scale, a_contract, -1)
        if b.scale is not None:
            product = product * _beside(b.scale, b_contract, -2)
        return product


class Tiles(NamedTuple):
    """Rows in tiles [B, T, K], each of one group; a group has its own weight and tensor scales.

    A group's rows fill whole tiles, padded with zeros, so that no block and no product has rows
    of two groups: nothing of one, not even a NaN, reaches another.

    Attributes:
      group: int32[B], each tile's group.
      used: int32, how many tiles hold rows; they come first.
      numbers: int32[G], 0 to G - 1.
    """

    group: Array
    used: Array
    numbers: Array

    @property
    def row_groups(self) -> Array:
        return self.group

    @property
    def weight_groups(self) -> Array:
        return self.numbers

    def rows(self, a: Operand, b: Operand, b_contract: int) -> Array:
        tiles, length, _ = a.values.shape
        features = b.values.shape[-1 if b_contract == -2 else -2]

        def multiply(i: Array, y: Array) -> Array:
            product = _contract(a.values[i], b.values[self.group[i]], -1, b_contract)
            return y.at[i].set(product)

        y, _ = varying_alike(jnp.zeros((tiles, length, features), jnp.float32), self.group)
        y = lax.fori_loop(0, self.used, multiply, y)
        if a.scale is not None:
            y = y * _matrices(a.scale)
        if b.scale is not None:
            y = y * _beside(_matrices(b.scale), b_contract, -2)[self.group]
        return y

    def weights(
        self, a: Operand, b: Operand, a_contract: int, b_contract: int, parts: Any = jnp.float32
    ) -> Array:
        if parts != jnp.float32:
            raise NotImplementedError(f"grouped products add their parts in float32, not {parts}")
        shape = jax.eval_shape(
            lambda a, b: _contract(a, b, a_contract, b_contract), a.values, b.values
        ).shape

        def add(i: Array, dw: Array) -> Array:
            product = _contract(a.values[i], b.values[i], a_contract, b_contract)
            return dw.at[self.group[i]].add(product)

        dw = jnp.zeros((self.numbers.size, *shape[1:]), jnp.float32)
        dw, _ = varying_alike(dw, self.group)
        dw = lax.fori_loop(0, self.used, add, dw)
        for operand, contract, beside in ((a, a_contract, -1), (b, b_contract, -2)):
            if operand.scale is not None:
                # All tiles of a group have its scale.
                scale = _beside(_matrices(operand.scale), contract, beside)
                per_group = jnp.zeros((self.numbers.size, *scale.shape[1:]), jnp.float32)
                dw = dw * per_group.at[self.group].set(scale)
        return dw


def promoted(*arrays: Any) -> Any:
    """The dtype that arrays of these dtypes promote to, also where JAX is set to refuse that."""
    with jax.numpy_dtype_promotion("standard"):
        # A float64 array of NumPy counts as what JAX makes of it.
        dtypes = (jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays)
        return functools.reduce(jnp.promote_types, dtypes)


def _contract(
    a: Array, b: Array, a_contract: int, b_contract: int, result: Any = jnp.float32
) -> Array:
    """The product over the given axes, batched over those before the last two.

    Accumulated in float32; where devices share the sum, their parts have the result's dtype.
    """
    batch = tuple(range(a.ndim - 2))
    contract = ((a.ndim + a_contract,), (b.ndim + b_contract,))
    dtype = promoted(a, b)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (contract, (batch, batch)),
        # GPUs would otherwise round float32 operands to TF32.
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=result,
    )


def _beside(scale: Array, contract: int, product_axis: int) -> Array:
    """A scale per row of an operand, turned so that its length-1 axis is ``product_axis``."""
    turn = scale.ndim > 0 and contract != product_axis
    return jnp.swapaxes(scale, -1, -2) if turn else scale


def _matrices(scale: Array) -> Array:
    """Scales per leading entry, [B] as a `QTensor` keeps them or [B, M, 1], with three axes."""
    return scale[:, None, None] if scale.ndim == 1 else scale
