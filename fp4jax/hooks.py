"""Quantized products as values, in the shapes that Flax's and NumPy's hooks call.

Each is a frozen dataclass around a `Recipe`, hashable and so static under ``jit``, and a `Gather`
if the kernel lies in shards that are to travel quantized. The result has
the dtype of ``lhs`` unless another is asked for: Flax layers cast the activation to the dtype they
compute in.

Where the recipe rounds stochastically, the key is the argument ``key``. In a Flax NNX layer put
`fp4jax.nnx.Product` around the hook, which draws keys from a stream of its own. Inside a Flax Linen
module (its compact method) the key is drawn from that module's stream ``quantize``; without it the
model still runs forward, where only the backward pass draws random bits, and the backward pass
raises.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import linen
from flax.errors import AssignSubModuleError
from jax import Array, lax

from fp4jax.conv import convolve
from fp4jax.einsum import contract
from fp4jax.gather import Gather
from fp4jax.kernels.registry import Kernels
from fp4jax.matmul import DimensionNumbers, check_product, multiply, random_words
from fp4jax.products import promoted
from fp4jax.ragged import group_product
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class _Hook:
    recipe: Recipe
    gather: Gather | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"recipe must be a Recipe such as fp4jax.recipes.nvfp4(), not {self.recipe!r}"
            )
        if not isinstance(self.gather, Gather | None):
            raise TypeError(f"gather must be Gather(...) or None, not {self.gather!r}")

    def _settle(
        self,
        lhs: Array,
        rhs: Array,
        precision: Any,
        out_sharding: Any,
        preferred_element_type: Any,
        key: Array | None,
    ) -> tuple[Array | None, Any]:
        """The random words and the dtype of a product, once its arguments are checked."""
        for name, value in (("precision", precision), ("out_sharding", out_sharding)):
            if value not in (None, lax.Precision.DEFAULT):
                raise ValueError(
                    f"{name} must be None, not {value}: the recipe decides how products run"
                )
        check_product(lhs, rhs, self.recipe, preferred_element_type)
        return _words(self.recipe, key), preferred_element_type or lhs.dtype


@dataclasses.dataclass(frozen=True)
class DotGeneral(_Hook):
    """`fp4jax.dot_general` with its recipe, in place of `jax.lax.dot_general`.

    For ``dot_general=`` of Flax layers, ``qkv_dot_general=`` and ``out_dot_general=`` of attention,
    and ``_dot_general=`` of `jax.numpy.einsum`, which may swap its operands, and with them
    activation and weight (`fp4jax.einsum` does not).

    Attributes:
      kernels: what runs the product; by default what is proven on the platform.
    """

    kernels: Kernels = Kernels()

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: None = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: None = None,
        key: Array | None = None,
    ) -> Array:
        """As `fp4jax.dot_general`; ``precision`` and ``out_sharding`` must be None."""
        words, dtype = self._settle(lhs, rhs, precision, out_sharding, preferred_element_type, key)
        return multiply(
            lhs, rhs, dimension_numbers, self.recipe, words, dtype, self.gather, self.kernels
        )


class EinsumOp(_Hook):
    """`fp4jax.einsum` of two operands with its recipe, for ``einsum_op=`` of `flax.nnx.Einsum`."""

    def __call__(
        self,
        subscripts: str,
        lhs: Array,
        rhs: Array,
        *,
        precision: None = None,
        preferred_element_type: Any = None,
        out_sharding: None = None,
        key: Array | None = None,
    ) -> Array:
        """As `fp4jax.einsum`; ``precision`` and ``out_sharding`` must be None."""
        words, dtype = self._settle(lhs, rhs, precision, out_sharding, preferred_element_type, key)
        operands = (lhs, rhs)
        return contract(subscripts, operands, self.recipe, lambda _: words, dtype, self.gather)


class ConvGeneralDilated(_Hook):
    """A quantized convolution, for ``conv_general_dilated=`` of Flax's ``Conv``.

    The input's patches are the activation, the kernel the weight.
    """

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: None = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: None = None,
        key: Array | None = None,
    ) -> Array:
        """As `jax.lax.conv_general_dilated`.

        Raises:
          NotImplementedError: for more than one feature or batch group: a depthwise or grouped
            convolution is no single matrix product.
        """
        for name, count in (
            ("feature_group_count", feature_group_count),
            ("batch_group_count", batch_group_count),
        ):
            if count != 1:
                raise NotImplementedError(f"{name} of a quantized convolution is 1, not {count}")
        words, dtype = self._settle(lhs, rhs, precision, out_sharding, preferred_element_type, key)
        return convolve(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            self.recipe,
            words,
            dtype,
            self.gather,
        )


class RaggedDot(_Hook):
    """`fp4jax.ragged_dot` with its recipe, for ``ragged_dot=`` of `fp4jax.models.Experts`."""

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        precision: None = None,
        preferred_element_type: Any = None,
        group_offset: None = None,
        *,
        out_sharding: None = None,
        key: Array | None = None,
    ) -> Array:
        """As `fp4jax.ragged_dot`; ``precision`` and ``out_sharding`` must be None.

        Raises:
          NotImplementedError: for a ``group_offset``.
        """
        if group_offset is not None:
            raise NotImplementedError("group_offset of a quantized product must be None")
        words, dtype = self._settle(lhs, rhs, precision, out_sharding, preferred_element_type, key)
        return group_product(lhs, rhs, group_sizes, self.recipe, words, dtype, self.gather)


Hook = DotGeneral | EinsumOp | ConvGeneralDilated | RaggedDot


def keep_kernel(arrays: Sequence[Any], *, dtype: Any = None) -> tuple[Any, ...]:
    """A layer's ``promote_dtype`` that leaves the kernel as it is, to be quantized from float32.

    Args:
      arrays: inputs, kernel, and a bias or None.
      dtype: that the layer computes in; by default what all of them promote to.
    """
    inputs, kernel, bias = arrays
    dtype = dtype or promoted(*(a for a in arrays if a is not None))
    return inputs.astype(dtype), kernel, None if bias is None else bias.astype(dtype)


class _Draw(linen.Module):
    """A key of the running Linen module's stream, None if it has none.

    A module that is made inside another's method becomes its child, which is how Flax says which
    module is running; it holds no parameter.
    """

    def __call__(self) -> Array | None:
        return self.make_rng("quantize") if self.has_rng("quantize") else None


def _words(recipe: Recipe, key: Array | None) -> Array | None:
    if recipe.needs_key and key is None:
        try:
            draw = _Draw()
        except AssignSubModuleError as error:
            raise ValueError(
                f"key is missing: recipe {recipe.name!r} rounds stochastically, and a method that "
                "is not compact has to draw by itself: key=self.make_rng('quantize')"
            ) from error
        if draw.scope is not None:
            key = draw()
            return None if key is None else random_words(recipe, key)
        raise ValueError(
            f"key is missing: recipe {recipe.name!r} rounds stochastically. Give key=, or in a "
            "Flax NNX layer fp4jax.nnx.Product(hook, rngs=rngs), which draws its own"
        )
    return random_words(recipe, key)
