"""Flax NNX: quantized layers, and putting them into an existing model.

A quantized layer is Flax's own layer whose product, a hook that all of them have, is a `Product`,
and whose kernel stays in its own dtype (float32 master weights) until it is quantized. So its
parameters have the same paths as before.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array, lax

from fp4jax import experts
from fp4jax.gather import Gather
from fp4jax.hooks import ConvGeneralDilated, DotGeneral, EinsumOp, Hook, RaggedDot, keep_kernel
from fp4jax.layers import Layer, Path, dotted, nnx_layers, nnx_modules
from fp4jax.policy import Policy
from fp4jax.recipe import Recipe
from fp4jax.schedule import Schedule

M = TypeVar("M", bound=nnx.Module)


class Product(nnx.Module):
    """A quantized product with a random stream of its own, for the hooks of Flax NNX layers.

    ``nnx.Linear(..., dot_general=Product(DotGeneral(recipe), rngs=rngs))``, and likewise
    `EinsumOp` as ``einsum_op``, `ConvGeneralDilated` as ``conv_general_dilated`` and `RaggedDot` as
    ``ragged_dot``. Each call draws a key, one without a backward pass too: evaluate a clone of the
    model where training has to go on with the bits that it would have had. A recipe that draws no
    random bits needs none of this: the hook alone does.

    Args:
      hook: the product.
      rngs: with a stream ``quantize`` (or a default one), from which one is forked; None for a
        recipe that draws no random bits.
      stack: leading axes of the layers' parameters if they are stacked, as for `flax.nnx.scan`.

    Raises:
      ValueError: if ``rngs`` lacks a stream, or the recipe needs one and there are none.
    """

    def __init__(
        self, hook: Hook, *, rngs: nnx.Rngs | None = None, stack: Sequence[int] = ()
    ) -> None:
        _check_stream(hook.recipe, rngs)
        self.hook = hook
        self.stream = None if rngs is None else _fork(rngs, tuple(stack))

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """The product of the hook's own arguments."""
        key = None if self.stream is None or not self.hook.recipe.needs_key else self.stream()
        return self.hook(*args, **kwargs, key=key)


def _recipe(layer: Any) -> Recipe:
    """What becomes of each operand now."""
    recipe: Recipe = getattr(layer, _hook_of(layer)[0]).hook.recipe
    return recipe


class Linear(nnx.Linear):
    """`flax.nnx.Linear` whose three products run by a recipe.

    Inputs and result have the layer's ``dtype``; the kernel is quantized from its own and its
    gradient comes back in it.

    Args:
      in_features: as in Flax, like all further arguments but ``dot_general``, ``promote_dtype``
        and ``precision``, which are refused.
      out_features: as in Flax.
      recipe: what becomes of each operand.
      rngs: with streams ``params`` and, for stochastic rounding, ``quantize`` (or a default one).
    """

    # A base class of our own would keep Flax's layers from becoming ours in place.
    recipe = property(_recipe)

    def __init__(
        self, in_features: int, out_features: int, *, recipe: Recipe, rngs: nnx.Rngs, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        _make(self, recipe, rngs)


class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` whose three products run by a recipe; see `Linear`."""

    recipe = property(_recipe)

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        recipe: Recipe,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        _make(self, recipe, rngs)


class Einsum(nnx.Einsum):
    """`flax.nnx.Einsum` whose three products run by a recipe; see `Linear`."""

    recipe = property(_recipe)

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        recipe: Recipe,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            einsum_str,
            tuple(kernel_shape),
            None if bias_shape is None else tuple(bias_shape),
            rngs=rngs,
            **kwargs,
        )
        _make(self, recipe, rngs)


class Conv(nnx.Conv):
    """`flax.nnx.Conv` whose three products run by a recipe, on patches; see `Linear`.

    Of one feature group only; others raise NotImplementedError.
    """

    recipe = property(_recipe)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        *,
        recipe: Recipe,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, kernel_size, rngs=rngs, **kwargs)
        _make(self, recipe, rngs)


class Experts(experts.Experts):
    """`fp4jax.models.Experts` whose three products run by a recipe; see `Linear`.

    Each expert's rows, gradients and kernel have tensor scales of their own, as in
    `fp4jax.ragged_dot`.
    """

    recipe = property(_recipe)

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_experts, in_features, out_features, rngs=rngs, **kwargs)
        _make(self, recipe, rngs)


def quantize_model(
    model: M,
    policy: Policy,
    *,
    rngs: nnx.Rngs | None = None,
    step: int = 0,
    gather: Callable[[Layer], Gather | None] | None = None,
) -> M:
    """Quantizes the layers of ``model`` that ``policy`` reaches, in place, and returns it.

    Each such layer becomes one of this module's, with the same parameters, wherever in the model
    it is referred to. Called again with a later ``step`` it moves the layers on to the recipes
    that the policy's schedules have there; random streams go on where they were, and kernels lie as
    they did.

    Args:
      model: any NNX model.
      policy: which layer gets which recipe.
      rngs: with a stream ``quantize`` (or a default one), for stochastic rounding.
      step: of training, for schedules.
      gather: how a layer's kernel (one layer's, where layers are stacked) lies on a mesh, if its
        shards are to travel quantized.

    Raises:
      ValueError: if a rule of the policy reaches no layer, a layer was given a product, a
        ``promote_dtype`` or a ``precision`` of its own, or ``rngs`` lacks a stream that a recipe
        needs. The model is then as it was.
      NotImplementedError: if the policy reaches a layer that cannot be quantized.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy such as Policy.keep_ends(), not {policy!r}")
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be a Flax NNX model, not {type(model).__name__}")
    modules, layers = dict(nnx_modules(model)), nnx_layers(model)
    chosen = policy.assign(layers)
    for layer in layers:
        if layer.path in chosen:
            if not layer.as_in_flax:
                raise NotImplementedError(
                    f"{layer.name} is a {type(modules[layer.path]).__name__}, which has a __call__ "
                    f"of its own; only that of {layer.kind} can be quantized"
                )
            _check(modules[layer.path], chosen[layer.path], rngs, layer.path)
    for layer in layers:
        if layer.path in chosen:
            lies = None if gather is None else gather(layer)
            _install(modules[layer.path], chosen[layer.path], rngs, step, lies)
    return model


def _make(layer: Any, recipe: Recipe, rngs: nnx.Rngs) -> None:
    """What a constructor here does to the layer that Flax has made."""
    _check(layer, recipe, rngs)
    _install(layer, recipe, rngs, step=0)


def _install(
    layer: Any,
    choice: Recipe | Schedule,
    rngs: nnx.Rngs | None,
    step: int,
    gather: Gather | None = None,
) -> None:
    """Makes a checked ``layer`` run by the recipe; one that does keeps its stream and gather."""
    name, _, hook_class = _hook_of(layer)
    recipe = choice.at(step) if isinstance(choice, Schedule) else choice
    current = getattr(layer, name)
    if gather is None and isinstance(current, Product):
        gather = current.hook.gather
    hook = hook_class(recipe, gather)
    if isinstance(current, Product) and (current.stream is not None or not choice.needs_key):
        current.hook = hook
        return
    product = Product(hook, rngs=rngs if choice.needs_key else None, stack=_stack(layer))
    # Changing the class keeps the object, so that a layer that is shared stays shared.
    layer.__class__ = _CLASSES.get(type(layer), type(layer))
    setattr(layer, name, nnx.data(product))
    layer.promote_dtype = keep_kernel


def _check(
    layer: Any, choice: Recipe | Schedule, rngs: nnx.Rngs | None, path: Path | None = None
) -> None:
    """Raises what `quantize_model` says it raises about one layer."""
    where = "" if path is None else f" of {dotted(path)}"
    name, default, _ = _hook_of(layer)
    product = getattr(layer, name)
    quantized = isinstance(product, Product)
    for attribute, usual in (
        (name, product if quantized else default),
        ("dot_general_cls", None),
        ("promote_dtype", keep_kernel if quantized else dtypes.promote_dtype),
        ("precision", None),
    ):
        if getattr(layer, attribute, usual) is not usual:
            raise ValueError(
                f"{attribute}{where} cannot be set: the recipe decides how products run"
            )
    if isinstance(layer, nnx.Conv) and layer.feature_group_count != 1:
        raise NotImplementedError(
            f"feature_group_count{where} is {layer.feature_group_count}; a quantized convolution "
            "has 1"
        )
    if not quantized or product.stream is None:
        _check_stream(choice, rngs)
        _stack(layer)


def _check_stream(choice: Recipe | Schedule, rngs: nnx.Rngs | None) -> None:
    has_stream = rngs is not None and ("quantize" in rngs or "default" in rngs)
    if choice.needs_key and not has_stream:
        raise ValueError(
            f"rngs has no stream 'quantize': recipe {choice.name!r} rounds stochastically"
        )


def _fork(rngs: nnx.Rngs, stack: tuple[int, ...]) -> nnx.RngStream:
    return rngs.quantize.split(stack) if stack else rngs.quantize.fork()


def _stack(layer: Any) -> tuple[int, ...]:
    """The leading axes that the kernel has more than one layer's would have.

    Raises:
      NotImplementedError: if layers are stacked along another axis than the first.
    """
    if isinstance(layer, nnx.Linear):
        own: tuple[int, ...] = (layer.in_features, layer.out_features)
    elif isinstance(layer, experts.Experts):
        own = (layer.num_experts, layer.in_features, layer.out_features)
    elif isinstance(layer, nnx.LinearGeneral):
        own = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
    else:
        own = tuple(layer.kernel_shape)
    shape: tuple[int, ...] = layer.kernel.shape
    leading = shape[: len(shape) - len(own)]
    if shape != (*leading, *own):
        raise NotImplementedError(
            f"a kernel of shape {shape} holds layers of shape {own} stacked along another axis "
            "than the first, which random streams cannot follow"
        )
    return leading


def _hook_of(layer: Any) -> tuple[str, Any, type[Any]]:
    """The name of the layer's hook, what it holds unless set, and what goes there."""
    return next(hook for kind, hook in _HOOKS.items() if isinstance(layer, kind))


# By class of Flax, or of a layer in its style.
_HOOKS: dict[type, tuple[str, Any, type[Any]]] = {
    nnx.Linear: ("dot_general", lax.dot_general, DotGeneral),
    nnx.LinearGeneral: ("dot_general", None, DotGeneral),
    nnx.Einsum: ("einsum_op", jnp.einsum, EinsumOp),
    nnx.Conv: ("conv_general_dilated", lax.conv_general_dilated, ConvGeneralDilated),
    experts.Experts: ("ragged_dot", lax.ragged_dot, RaggedDot),
}
_CLASSES: dict[type, type] = {
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
    nnx.Conv: Conv,
    experts.Experts: Experts,
}
