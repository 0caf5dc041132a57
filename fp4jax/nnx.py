"""Flax NNX: a quantized Linear, and putting it into an existing model."""

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array, lax

from fp4jax.matmul import dot_general
from fp4jax.policy import Policy, linear_layers
from fp4jax.recipe import Recipe

M = TypeVar("M", bound=nnx.Module)


class Linear(nnx.Linear):
    """`flax.nnx.Linear` whose three products run by a recipe.

    The kernel is quantized from its own dtype (float32 master weights) and its gradient comes
    back in it; inputs and result have the layer's ``dtype``. Where the recipe rounds
    stochastically, each call draws a key from the layer's own stream, forked from
    ``rngs.quantize``.

    Args:
      in_features: as in Flax, like all further keyword arguments but ``dot_general``,
        ``promote_dtype`` and ``precision``, which are refused.
      out_features: as in Flax.
      recipe: what becomes of each operand.
      rngs: with streams ``params`` and ``quantize`` (or a default one).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        _check(self, recipe, rngs)
        self._set_recipe(recipe, rngs)

    def _set_recipe(self, recipe: Recipe, rngs: nnx.Rngs) -> None:
        self.recipe = recipe
        self.quantize_rng = rngs.quantize.fork() if recipe.needs_key else None

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """[..., in_features] -> [..., out_features]; ``out_sharding`` must be None."""
        if out_sharding is not None:
            raise NotImplementedError(f"out_sharding must be None, not {out_sharding}")
        kernel = self.kernel[...]
        dtype = self.dtype or jnp.promote_types(inputs.dtype, kernel.dtype)
        y = dot_general(
            inputs.astype(dtype),
            kernel,
            (((inputs.ndim - 1,), (0,)), ((), ())),
            recipe=self.recipe,
            key=None if self.quantize_rng is None else self.quantize_rng(),
            preferred_element_type=self.preferred_element_type or dtype,
        )
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
        return y


def quantize_model(model: M, policy: Policy, *, rngs: nnx.Rngs | None = None) -> M:
    """Quantizes the linear layers of ``model`` that ``policy`` reaches, and returns it.

    The model is changed in place: each such `flax.nnx.Linear` becomes a `fp4jax.nnx.Linear` with
    the same parameters, wherever in the model it is referred to.

    Args:
      model: any NNX model.
      policy: which layer gets which recipe.
      rngs: with a stream ``quantize`` (or a default one), for stochastic rounding.

    Raises:
      ValueError: if the policy reaches no layer, a layer was given its own ``dot_general``,
        ``promote_dtype`` or ``precision``, or ``rngs`` lacks a stream that a recipe needs. The
        model is then as it was.
      NotImplementedError: if the policy reaches a layer that cannot be quantized.
    """
    rngs = nnx.Rngs() if rngs is None else rngs
    layers = dict(linear_layers(model))
    recipes = policy.assign(layers)
    for path, recipe in recipes.items():
        name = ".".join(map(str, path))
        if type(layers[path]) not in (nnx.Linear, Linear):
            kind = type(layers[path]).__name__
            raise NotImplementedError(f"{name} is a {kind}; only nnx.Linear can be quantized")
        _check(layers[path], recipe, rngs, f" of {name}")
    for path, recipe in recipes.items():
        layer = layers[path]
        # Changing the class keeps the object, so that a layer that is shared stays shared.
        layer.__class__ = Linear
        assert isinstance(layer, Linear)
        layer._set_recipe(recipe, rngs)
    return model


def _check(layer: nnx.Module, recipe: Recipe, rngs: nnx.Rngs, where: str = "") -> None:
    """Raises ValueError if ``layer`` asks for what a recipe would override, or a stream lacks."""
    for name, default in (
        ("dot_general", lax.dot_general),
        ("promote_dtype", dtypes.promote_dtype),
        ("precision", None),
    ):
        if getattr(layer, name) is not default:
            raise ValueError(f"{name}{where} cannot be set: the recipe decides how products run")
    if recipe.needs_key and not ("quantize" in rngs or "default" in rngs):
        raise ValueError(
            f"rngs has no stream 'quantize': recipe {recipe.name!r} rounds stochastically"
        )
