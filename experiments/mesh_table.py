"""Two linear layers on meshes of fake devices: their result, and what is sent and kept.

``python -m experiments.mesh_table`` prints a Markdown table. Bytes are per device and step, read
from compiled programs; what a device receives in all-gathers is the weights, once for each of
Fprop and Dgrad.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array
from jax.sharding import AxisType

import fp4jax as fp4
from experiments.wire import collectives, moved_bytes

MATRIX = (((1,), (0,)), ((), ()))
# The batch lies along both; the features between the two layers along "tensor".
BATCH = jax.P(("data", "fsdp"))
SPECS = (jax.P("fsdp", "tensor"), jax.P("tensor", "fsdp"))
# Extents of data, fsdp and tensor.
MESHES = ((1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 4, 1), (1, 4, 2))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the layers: ``tokens`` rows go from ``width`` to ``hidden`` features and back."""

    tokens: int = 512
    width: int = 256
    hidden: int = 512


class Found(NamedTuple):
    """What one recipe does on one mesh.

    Attributes:
      gathered: bytes that a device receives in all-gathers, by dtype.
      kept: bytes that a device keeps for the backward pass, the parameters aside.
      result: of the second layer.
    """

    gathered: dict[str, int]
    kept: int
    result: np.ndarray


def layers(recipe: fp4.Recipe, weights: tuple[Array, ...], x: Array) -> Array:
    """Nothing is between them, so that what is kept is theirs; each rounds by a fixed key."""
    for i, (w, spec) in enumerate(zip(weights, SPECS, strict=True)):
        key, gather = jax.random.key(i), fp4.Gather(spec)
        x = fp4.dot_general(x, w, MATRIX, recipe=recipe, key=key, gather=gather)
    return x


def find(recipe: fp4.Recipe, sizes: Sizes, extents: tuple[int, int, int]) -> Found:
    """Compiles the layers on a mesh of these extents, and runs them."""
    mesh = jax.make_mesh(extents, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    shapes = ((sizes.width, sizes.hidden), (sizes.hidden, sizes.width))
    weights = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    x = jnp.asarray(rng.standard_normal((sizes.tokens, sizes.width)), jnp.bfloat16)

    forward = functools.partial(layers, recipe)

    def step(weights: tuple[Array, ...], x: Array) -> Any:
        y, vjp = jax.vjp(forward, weights, x)
        return y, vjp(y)

    def residuals(weights: tuple[Array, ...], x: Array) -> list[Array]:
        leaves = jax.tree.leaves(jax.vjp(forward, weights, x)[1])
        return [leaf for leaf in leaves if (leaf.shape, leaf.dtype) not in parameters]

    parameters = [(w.shape, w.dtype) for w in weights]

    def compiled(function: Callable[..., Any], **kwargs: Any) -> Any:
        program = jax.jit(function, in_shardings=(SPECS, BATCH), **kwargs)
        return program.lower(weights, x).compile()

    with jax.set_mesh(mesh):
        program = compiled(step, out_shardings=(BATCH, (SPECS, BATCH)))
        kept = compiled(residuals).memory_analysis().output_size_in_bytes
        placed = jax.device_put((weights, x), program.input_shardings[0])
        result, _ = program(*placed)
    gathered = moved_bytes(collectives(program.as_text()), "all-gather")
    return Found(gathered, kept, np.asarray(result))


def table(sizes: Sizes) -> str:
    """All meshes, BF16 beside NVFP4, and how far NVFP4's result is from that of one device.

    That is 0 but where a sum is divided, as over "tensor", and relative to the largest number.
    """
    recipes = (fp4.recipes.bf16(), fp4.recipes.nvfp4(square_weights=False))
    rows = [
        "| data x fsdp x tensor | difference | gathered BF16 | NVFP4 | kept BF16 | NVFP4 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    single = None
    for extents in MESHES:
        bf16, nvfp4 = (find(recipe, sizes, extents) for recipe in recipes)
        single = nvfp4.result if single is None else single
        difference = np.abs(nvfp4.result - single).max() / np.abs(single).max()
        cells = [
            " x ".join(map(str, extents)),
            f"{difference:.1g}",
            *(_listed(found.gathered) for found in (bf16, nvfp4)),
            *(f"{found.kept:,}" for found in (bf16, nvfp4)),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _listed(gathered: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {dtype}" for dtype, n in sorted(gathered.items())) or "0"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(table(tyro.cli(Sizes)))
