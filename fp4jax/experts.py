"""A layer of many kernels, one for each group of rows: the products of a mixture of experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array, lax
from jax.typing import DTypeLike

# Each expert starts as a linear layer of Flax does; the experts' axis adds nothing to the fan-in.
_kernel_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)


class Experts(nnx.Module):
    """Linear maps without bias, of which each group of rows goes through its own.

    Its product is a hook, like those of Flax's layers: it is called with the rows, the kernel and
    the groups' sizes, and with the keywords ``precision`` and ``preferred_element_type``. That is
    where `fp4jax.nnx.quantize_model` puts a quantized one. The parameter is ``kernel``, of shape
    ``(num_experts, in_features, out_features)``.

    Args:
      num_experts: number of kernels.
      in_features: width of the input.
      out_features: width of the output.
      dtype: that the product is computed in; by default what input and kernel promote to.
      param_dtype: of the kernel.
      precision: of the product, as in JAX.
      kernel_init: initializer of the kernel, called with its whole shape.
      ragged_dot: the product.
      promote_dtype: what brings input and kernel to ``dtype``, as in Flax.
      preferred_element_type: dtype of the result, as in JAX.
      rngs: with a stream ``params`` (or a default one).
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Any = None,
        kernel_init: Callable[..., Array] = _kernel_init,
        ragged_dot: Callable[..., Array] = lax.ragged_dot,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        shape = (num_experts, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.ragged_dot = ragged_dot
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: Array, group_sizes: Array) -> Array:
        """Sends each row through its group's kernel.

        Args:
          inputs: ``(rows, in_features)``, the rows of the first expert first, and so on.
          group_sizes: integers ``(num_experts,)`` that sum to ``rows`` or less.

        Returns:
          Array ``(rows, out_features)``; rows after the last group are zero.
        """
        inputs, kernel, _ = self.promote_dtype((inputs, self.kernel[...], None), dtype=self.dtype)
        return self.ragged_dot(
            inputs,
            kernel,
            group_sizes,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
