"""How the weights of a model travel to where they multiply: quantized, or else as they multiply.

Left to itself the compiler may gather a weight's shards in float32, or move activations instead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array
from jax.sharding import Mesh

import fp4jax as fp4
from experiments.mesh import spec_of
from fp4jax.layers import Layer


def quantized(
    recipe: fp4.Recipe, mesh: Mesh, gradient_dtype: Any
) -> Callable[[Layer], fp4.Gather | None]:
    """For `fp4.nnx.quantize_model`: kernels travel quantized where each shard is whole blocks.

    Where it is not, the compiler gathers floats, and quantizes them to the same bits.

    Args:
      recipe: of the layers.
      mesh: with the axes of `experiments.mesh`.
      gradient_dtype: in which devices add their parts of a gradient; of experts it is float32.
    """

    def of(layer: Layer) -> fp4.Gather | None:
        dtype = np.dtype(np.float32 if layer.kind == "Experts" else gradient_dtype)
        spec = spec_of((*map(str, layer.path), "kernel"), layer.shape, mesh)
        if "fsdp" not in spec or (mesh.shape["fsdp"] == 1 and dtype == np.float32):
            return None
        sides = zip(layer.shape[-2:], recipe.weight_block, spec[-2:], strict=True)
        whole = all(
            name is None or size % (block * mesh.shape[name]) == 0 for size, block, name in sides
        )
        return fp4.Gather(spec, gradient_dtype=dtype) if whole else None

    return of


def rest_as_multiplied(model: Any, mesh: Mesh) -> Any:
    """The model, its embedding and linear layers that are not quantized changed to travel.

    They do so in the dtype that they are cast to, and their gradients come back in it.
    """
    layer: Any
    for path, layer in nnx.iter_modules(model):
        plain = isinstance(layer, nnx.Linear) and not isinstance(layer, fp4.nnx.Linear)
        if not plain and not isinstance(layer, nnx.Embed):
            continue
        name = "kernel" if plain else "embedding"
        spec = spec_of((*map(str, path), name), getattr(layer, name).shape, mesh)
        if "fsdp" in spec and mesh.shape["fsdp"] > 1:
            layer.promote_dtype = _Promoted(fp4.Gather(spec))
    return model


@dataclasses.dataclass(frozen=True)
class _Promoted:
    """Flax's ``promote_dtype``, after which a layer's weight is gathered."""

    gather: fp4.Gather

    def __call__(self, arrays: Any, **how: Any) -> list[Any]:
        promoted = list(dtypes.promote_dtype(arrays, **how))
        weight = min(len(promoted) - 1, 1)  # after the input, but where an embedding looks up
        promoted[weight] = _travel(self.gather, promoted[weight])
        return promoted


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _travel(gather: fp4.Gather, weight: Array) -> Array:
    return gather.travel(weight)


def _travel_fwd(gather: fp4.Gather, weight: Array) -> tuple[Array, None]:
    return gather.travel(weight), None


def _travel_bwd(gather: fp4.Gather, _: None, gradient: Array) -> tuple[Array]:
    return (gather.reduce(gradient),)


_travel.defvjp(_travel_fwd, _travel_bwd)
