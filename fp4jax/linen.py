"""Flax Linen: quantized layers, and a model whose layers are quantized by path.

Stochastic rounding draws from the layers' stream ``quantize``: ``model.apply(variables, x,
rngs={"quantize": key})``. Under `flax.linen.scan` it belongs in ``split_rngs``.
Blocks of one class under `flax.linen.jit` share one trace, and so cannot be told apart; they are
refused. Under it the whole model can be converted, and under `jax.jit` anything.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import linen
from jax import Array

from fp4jax.gather import Gather
from fp4jax.hooks import ConvGeneralDilated, DotGeneral, EinsumOp, Hook, keep_kernel
from fp4jax.layers import (
    LINEN_HOOKS,
    LINEN_KINDS,
    Layer,
    Path,
    dotted,
    kind_of,
    linen_layers,
    replaced,
    set_attributes,
    traced_for,
    traced_init,
)
from fp4jax.policy import Policy
from fp4jax.recipe import Recipe
from fp4jax.schedule import Schedule

M = TypeVar("M", bound=linen.Module)
Recipes = tuple[tuple[Path, Recipe | None], ...]
Gathers = tuple[tuple[Path, Gather], ...]


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


def quantize_model(
    model: M,
    policy: Policy,
    *args: Any,
    step: int = 0,
    gather: Callable[[Layer], Gather | None] | None = None,
    **kwargs: Any,
) -> M:
    """The model with the layers that ``policy`` reaches quantized, found by tracing one call.

    The result is a module of a subclass of the model's own class, with the same attributes,
    methods and variables; ``recipes`` has each layer's path with its recipe or None. A call that
    reaches a layer which the example inputs did not reach raises ValueError, since no rule has
    decided about it. Called again on the result with a later ``step`` it gives a module with the
    recipes that the policy's schedules have there, whose kernels lie as they did. A submodule of
    the result that is called directly, as ``bound.encoder(x)``, not from one of the model's
    methods, is the plain layer that it was.

    Args:
      model: any Linen model; one that is already quantized is quantized anew.
      policy: which layer gets which recipe.
      *args: example inputs, arrays or `jax.ShapeDtypeStruct`; the model is only traced.
      step: of training, for schedules.
      gather: how a layer's kernel (one layer's, where `flax.linen.scan` stacks them) lies on a
        mesh, if its shards are to travel quantized. No mesh is needed here, but wherever the result
        is called or initialized.
      **kwargs: likewise example inputs; none of them can be called ``step`` or ``gather``.

    Raises:
      ValueError: if a rule of the policy reaches no layer, or a layer has a product, a
        ``promote_dtype`` or a ``precision`` of its own.
      NotImplementedError: if the policy reaches a layer that cannot be quantized.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy such as Policy.keep_ends(), not {policy!r}")
    kind: Any = type(model)
    base = getattr(kind, "_quantized_from", kind)
    fields = _fields(model)
    layers = linen_layers(base(**fields), args, kwargs)
    chosen = policy.assign(layers)

    def now(path: Path) -> Recipe | None:
        choice = chosen.get(path)
        return choice.at(step) if isinstance(choice, Schedule) else choice

    recipes = tuple((layer.path, now(layer.path)) for layer in layers)
    # Raises what the layers themselves refuse.
    traced_init(_quantized_class(base, recipes, ())(**fields), args, kwargs)
    for layer in layers:
        if layer.path in chosen and not layer.as_in_flax:
            raise NotImplementedError(
                f"{layer.name} is a {layer.kind} whose __call__ does not use its product as "
                "Flax's does, and cannot be quantized"
            )
    if gather is None:
        gathers = () if base is kind else kind.gathers
    else:
        asked = [(layer, gather(layer)) for layer in layers if layer.path in chosen]
        gathers = tuple((layer.path, lies) for layer, lies in asked if lies is not None)
    quantized: M = _quantized_class(base, recipes, gathers)(**fields)
    return quantized


def _fields(model: linen.Module) -> dict[str, Any]:
    """What the model was made with."""
    return {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.init and field.name != "parent"
    }


def _rebuilt(base: Any, recipes: Recipes, gathers: Gathers, fields: dict[str, Any]) -> Any:
    """A quantized module from what it was pickled as: its class exists only here."""
    return _quantized_class(base, recipes, gathers)(**fields)


@functools.cache
def _quantized_class(base: type[Any], recipes: Recipes, gathers: Gathers) -> type[Any]:
    """A subclass whose methods run with the layers' products replaced.

    One for each class, recipes and gathers, so that modules are equal, and their traces found
    again, where all of these are. A wrapper module would do less: it changes the paths of
    submodules that are attributes. And a further attribute would get in the way of Flax's
    transforms of classes.
    """

    def guarded(method: Any, whole: bool = False) -> Any:
        @linen.nowrap
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.scope is None and not whole:  # unbound, and so without layers to run
                return method(self, *args, **kwargs)
            path = () if whole else self.path
            intercept = _interceptor(dict(recipes), dict(gathers), len(path))
            with traced_for((recipes, gathers, path)), linen.intercept_methods(intercept):
                return method(self, *args, **kwargs)

        return functools.update_wrapper(call, method, updated=())

    def body(namespace: dict[str, Any]) -> None:
        for cls in reversed(base.__mro__[: base.__mro__.index(linen.Module)]):
            for name, method in vars(cls).items():
                public = name == "__call__" or not name.startswith("_")
                if inspect.isfunction(method) and public and name != "setup":
                    namespace[name] = guarded(method)
        # What these are given as ``method`` need not be one of the class.
        for name in ("apply", "init_with_output"):
            namespace[name] = guarded(getattr(base, name), whole=True)
        namespace["__reduce__"] = linen.nowrap(
            lambda self: (_rebuilt, (base, recipes, gathers, _fields(self)))
        )
        namespace["__module__"], namespace["__doc__"] = base.__module__, base.__doc__
        namespace["recipes"], namespace["gathers"] = recipes, gathers
        namespace["_quantized_from"] = base

    return types.new_class(f"Quantized{base.__name__}", (base,), exec_body=body)


def _interceptor(
    recipes: dict[Path, Recipe | None], gathers: dict[Path, Gather], above: int
) -> Any:
    """What replaces products, for layers ``above`` names below the top."""

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
        return _call_quantized(layer, recipe, gathers.get(path), call, args, kwargs)

    return intercept


def _call_quantized(
    layer: Any, recipe: Recipe, gather: Gather | None, call: Any, args: Any, kwargs: Any
) -> Any:
    """The layer's ``__call__`` with its product replaced for that time."""
    _check(layer, recipe, gather)
    if isinstance(layer, linen.Einsum):  # which has no hook
        return _einsum(layer, EinsumOp(recipe, gather), *args, **kwargs)
    with replaced(layer, _quantized_attributes(layer, recipe, gather)):
        return call(*args, **kwargs)


def _install(layer: Any, recipe: Recipe) -> None:
    _check(layer, recipe, None)
    set_attributes(layer, _quantized_attributes(layer, recipe, None))


def _quantized_attributes(layer: Any, recipe: Recipe, gather: Gather | None) -> dict[str, Any]:
    name, hook = _hook(layer, recipe, gather)
    return {name: hook, "promote_dtype": _keep_kernel}


def _hook(layer: Any, recipe: Recipe, gather: Gather | None) -> tuple[str, Hook]:
    """The name of the attribute that holds the layer's product, and what goes there."""
    name, _ = LINEN_HOOKS[kind_of(layer, LINEN_KINDS)]
    if name == "dot_general":
        return name, DotGeneral(recipe, gather)
    return name, ConvGeneralDilated(recipe, gather)


def _check(layer: Any, recipe: Recipe, gather: Gather | None) -> None:
    """Raises what `quantize_model` says it raises about one layer."""
    where = f" of {dotted(layer.path)}" if layer.scope is not None else ""
    if isinstance(layer, linen.ConvLocal):
        raise NotImplementedError(
            f"layer {dotted(layer.path)} is a ConvLocal, which has a kernel for each position: "
            "that is no single product and cannot be quantized"
        )
    name, hook = _hook(layer, recipe, gather)
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
