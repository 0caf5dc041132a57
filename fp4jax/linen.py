"""Flax Linen: quantized layers, and a model whose layers are quantized by path.

Stochastic rounding draws from the layers' stream ``quantize``: ``model.apply(variables, x,
rngs={"quantize": key})``. Under `flax.linen.scan` it belongs in ``split_rngs``.
Blocks of one class under `flax.linen.jit` share one trace, of which only the first is seen: jit the
whole model instead.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen
from jax import Array

from fp4jax.hooks import ConvGeneralDilated, DotGeneral, EinsumOp, Hook, keep_kernel
from fp4jax.layers import LINEN_KINDS, Path, dotted, linen_layers, traced_for, traced_init
from fp4jax.policy import Policy
from fp4jax.recipe import Recipe
from fp4jax.schedule import Schedule


class Dense(linen.Dense, kw_only=True):
    """`flax.linen.Dense` whose three products run by a recipe.

    Inputs and result have the layer's ``dtype``; the kernel is quantized from its own and its
    gradient comes back in it. ``dot_general``, ``dot_general_cls``, ``promote_dtype`` and
    ``precision`` cannot be set.

    Attributes:
      recipe: what becomes of each operand.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        _install(self, self.recipe)
        super().__post_init__()


class DenseGeneral(linen.DenseGeneral, kw_only=True):
    """`flax.linen.DenseGeneral` whose three products run by a recipe; see `Dense`.

    Attributes:
      recipe: what becomes of each operand.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        _install(self, self.recipe)
        super().__post_init__()


class Einsum(linen.Einsum, kw_only=True):
    """`flax.linen.Einsum` whose three products run by a recipe; see `Dense`.

    Attributes:
      recipe: what becomes of each operand.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        _install(self, self.recipe)
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: Array, einsum_str: str | None = None) -> Array:
        """As in Flax."""
        return _einsum(self, EinsumOp(self.recipe), inputs, einsum_str)


class Quantized(linen.Module):
    """A model, some of whose layers are quantized; parameters and their paths are the model's own.

    Made by `quantize_model`.

    Attributes:
      model: the model as it was.
      recipes: each of its layers' path, and the layer's recipe or None.
    """

    model: linen.Module
    recipes: tuple[tuple[Path, Recipe | None], ...]

    def setup(self) -> None:
        linen.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises:
          ValueError: if the call reaches a layer that the inputs given to `quantize_model` did
            not, so that no rule has decided about it.
        """
        recipes, above = dict(self.recipes), len(self.path)

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            layer = context.module
            if context.method_name != "__call__" or not isinstance(layer, LINEN_KINDS):
                return call(*args, **kwargs)
            path = layer.path[above:]
            if path not in recipes:
                raise ValueError(
                    f"layer {dotted(path)} was not there when the model was quantized: give "
                    "quantize_model inputs that reach it"
                )
            if (recipe := recipes[path]) is None:
                return call(*args, **kwargs)
            return _call_quantized(layer, recipe, call, args, kwargs)

        with traced_for((self.recipes, self.path)), linen.intercept_methods(intercept):
            return self.model(*args, **kwargs)


def quantize_model(
    model: linen.Module, policy: Policy, *args: Any, step: int = 0, **kwargs: Any
) -> Quantized:
    """A model with the layers that ``policy`` reaches quantized, found by tracing one call.

    Variables of ``model`` fit the result, and the other way round. A later ``step`` gives another
    model, with the recipes that the policy's schedules have there.

    Args:
      model: any Linen model; for one that is already quantized, its original is taken.
      policy: which layer gets which recipe.
      *args: example inputs, arrays or `jax.ShapeDtypeStruct`; the model is only traced.
      step: of training, for schedules.
      **kwargs: likewise example inputs.

    Raises:
      ValueError: if a rule of the policy reaches no layer, or a layer has a product, a
        ``promote_dtype`` or a ``precision`` of its own.
      NotImplementedError: if the policy reaches a layer that cannot be quantized.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy such as Policy.keep_ends(), not {policy!r}")
    original = model.model if isinstance(model, Quantized) else model
    layers = linen_layers(original, args, kwargs)
    chosen = policy.assign(layers)

    def now(path: Path) -> Recipe | None:
        choice = chosen.get(path)
        return choice.at(step) if isinstance(choice, Schedule) else choice

    recipes = tuple((layer.path, now(layer.path)) for layer in layers)
    quantized = Quantized(original, recipes)
    traced_init(quantized, args, kwargs)  # raises what the layers themselves refuse
    for layer in layers:
        if layer.path in chosen and not layer.as_in_flax:
            raise NotImplementedError(
                f"{layer.name} is a {layer.kind} whose __call__ does not use its product as "
                "Flax's does, and cannot be quantized"
            )
    return quantized


def _call_quantized(layer: Any, recipe: Recipe, call: Any, args: Any, kwargs: Any) -> Any:
    """The layer's ``__call__`` with its product replaced for that time."""
    if isinstance(layer, linen.Einsum):  # which has no hook
        _check(layer, recipe)
        return _einsum(layer, EinsumOp(recipe), *args, **kwargs)
    before = {name: getattr(layer, name) for name in (_hook(layer, recipe)[0], "promote_dtype")}
    _install(layer, recipe)
    try:
        return call(*args, **kwargs)
    finally:
        _set(layer, before)


def _install(layer: Any, recipe: Recipe) -> None:
    _check(layer, recipe)
    name, hook = _hook(layer, recipe)
    _set(layer, {name: hook, "promote_dtype": _keep_kernel})


def _set(layer: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)  # a bound module is frozen


def _hook(layer: Any, recipe: Recipe) -> tuple[str, Hook]:
    """The name of the attribute that holds the layer's product, and what goes there."""
    if isinstance(layer, linen.Conv):
        return "conv_general_dilated", ConvGeneralDilated(recipe)
    return "dot_general", DotGeneral(recipe)


def _check(layer: Any, recipe: Recipe) -> None:
    """Raises what `quantize_model` says it raises about one layer."""
    where = f" of {dotted(layer.path)}" if layer.scope is not None else ""
    name, hook = _hook(layer, recipe)
    usual = {
        name: (None, hook),
        f"{name}_cls": (None,),
        "promote_dtype": (linen.Dense.promote_dtype, _keep_kernel),
        "precision": (None,),
    }
    for attribute, allowed in usual.items():
        if getattr(layer, attribute, None) not in allowed:
            raise ValueError(
                f"{attribute}{where} cannot be set: the recipe decides how products run"
            )


def _keep_kernel(*arrays: Any, dtype: Any = None) -> tuple[Any, ...]:
    return keep_kernel(arrays, dtype=dtype)


def _einsum(layer: Any, product: EinsumOp, inputs: Array, einsum_str: str | None = None) -> Array:
    """The call of a Linen Einsum, which has no hook for its product."""
    subscripts = linen.merge_param("einsum_str", layer.einsum_str, einsum_str).replace(" ", "")
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    bias, bias_shape = None, None
    if layer.use_bias:
        shape, bias_shape = layer._get_bias_shape(subscripts, inputs, kernel)
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    inputs, kernel, bias = _keep_kernel(inputs, kernel, bias, dtype=layer.dtype)
    y = product(subscripts, inputs, kernel, preferred_element_type=layer.preferred_element_type)
    return y if bias is None else y + jnp.reshape(bias, bias_shape)
