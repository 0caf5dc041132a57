"""What a policy knows of a model: its layers that multiply by a kernel, of Flax NNX or Linen."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

from fp4jax.experts import Experts

Path = tuple[str | int, ...]


class Layer(NamedTuple):
    """A layer that multiplies its input by a kernel.

    Attributes:
      path: from the model to the layer, numbers for elements of lists.
      kind: the class, Flax's or `fp4jax.models.Experts`, such as ``Linear`` or ``Conv``.
      shape: of the kernel.
      parameters: how many there are, kernel and bias.
      as_in_flax: whether it computes as that class does, so that it can be quantized.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    parameters: int
    as_in_flax: bool = True

    @property
    def name(self) -> str:
        """The path with dots."""
        return dotted(self.path)

    @property
    def convolution(self) -> bool:
        """Whether it is one."""
        return self.kind.startswith("Conv")


def dotted(path: Path) -> str:
    """A path as messages and patterns have it."""
    return ".".join(map(str, path))


NNX_KINDS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, Experts)
LINEN_KINDS = (linen.Dense, linen.DenseGeneral, linen.Einsum, linen.Conv, linen.ConvLocal)

# The attribute that holds the product of a Linen layer, and what is called where it is None.
LINEN_HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "Dense": ("dot_general", lax.dot_general),
    "DenseGeneral": ("dot_general", lax.dot_general),
    "Einsum": ("dot_general", jnp.einsum),
    "Conv": ("conv_general_dilated", lax.conv_general_dilated),
    "ConvLocal": ("conv_general_dilated", lax.conv_general_dilated),
}


# What a Linen model is being called for. `flax.linen.jit` has a cache and knows nothing of what
# intercepts the layers: without this it would take what it traced of the same model before.
traced_for = jax.make_user_context()


def nnx_modules(model: nnx.Module) -> Iterator[tuple[Path, Any]]:
    """The layers of an NNX model, each once."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, NNX_KINDS):
            yield tuple(part if isinstance(part, int) else str(part) for part in path), module


def nnx_layers(model: nnx.Module) -> list[Layer]:
    """The layers of an NNX model."""
    return [
        Layer(
            path,
            kind_of(module, NNX_KINDS),
            module.kernel.shape,
            _size(nnx.state(module, nnx.Param)),
            any(type(module).__call__ is kind.__call__ for kind in NNX_KINDS),
        )
        for path, module in nnx_modules(model)
    ]


def linen_layers(model: linen.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layer]:
    """The layers of a Linen model that a call with these inputs reaches, in that order.

    The model is traced, not run.
    """
    reached: dict[Path, tuple[str, _Noting]] = {}

    def note(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, LINEN_KINDS):
            return call(*args, **kwargs)
        name, usual = LINEN_HOOKS[kind_of(layer, LINEN_KINDS)]
        # An Einsum has no hook, and is taken as it is if its call is Flax's own.
        own = getattr(layer, name, None)
        noting = _Noting(own or usual, type(layer).__call__ is linen.Einsum.__call__)
        reached[layer.path] = kind_of(layer, LINEN_KINDS), noting
        with replaced(layer, {name: noting} if hasattr(layer, name) else {}):
            return call(*args, **kwargs)

    with traced_for(object()), linen.intercept_methods(note):
        parameters = linen.unbox(traced_init(model, args, kwargs)).get("params", {})
    _check_all_seen(parameters, set(reached))
    found = []
    for path, (kind, noting) in reached.items():
        own = parameters
        for name in path:
            own = own[name]
        found.append(Layer(path, kind, own["kernel"].shape, _size(own), noting.called))
    return found


@contextlib.contextmanager
def replaced(layer: linen.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Gives a Linen layer other attributes for a while."""
    before = {name: getattr(layer, name) for name in attributes}
    set_attributes(layer, attributes)
    try:
        yield
    finally:
        set_attributes(layer, before)


def set_attributes(layer: linen.Module, attributes: dict[str, Any]) -> None:
    """Sets attributes of a Linen layer, which is frozen once it is bound."""
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)


def traced_init(model: linen.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes of the variables that ``model.init`` makes for these inputs.

    Arrays and `jax.ShapeDtypeStruct` are traced, all else is passed as it is.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in leaves]

    def init(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        inputs = [next(rest) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, inputs)
        return model.init(jax.random.key(0), *args, **kwargs)

    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    return jax.eval_shape(init, arrays)


def _check_all_seen(parameters: Any, reached: set[Path]) -> None:
    """Raises NotImplementedError if a block has layers that were not seen, while its like were.

    `flax.linen.jit` traces the first of several equal modules and no other.
    """

    def unnumbered(path: Path) -> Path:
        return tuple(re.sub(r"_\d+$", "", str(part)) for part in path)

    seen = {unnumbered(path) for path in reached}
    for keys, _ in jax.tree_util.tree_flatten_with_path(parameters)[0]:
        *path, last = (key.key for key in keys)
        if last == "kernel" and tuple(path) not in reached and unnumbered(tuple(path)) in seen:
            raise NotImplementedError(
                f"{dotted(tuple(path))} shares a trace with another layer, by flax.linen.jit for "
                "instance, and cannot get a recipe of its own: jit the whole model instead"
            )


class _Noting:
    """A product that notes whether it was called."""

    def __init__(self, product: Callable[..., Any], called: bool) -> None:
        self.product, self.called = product, called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return self.product(*args, **kwargs)


def kind_of(module: Any, kinds: tuple[type, ...]) -> str:
    """The name of the Flax class that a layer is an instance of."""
    return next(kind.__name__ for kind in kinds if isinstance(module, kind))


def _size(parameters: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))
