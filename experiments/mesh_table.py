"""What a mesh changes: not the codes; what devices send each other, and what each keeps.

``python -m experiments.mesh_table`` prints two Markdown tables; ``--write`` puts them into
docs/distributed.md. Bytes are per device and step, read from programs compiled for CPUs: of each
all-gather what a device has after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

import fp4jax as fp4
from experiments import pages
from experiments.mesh import BATCH, Extents, batch_shape, make_mesh, place
from experiments.optimization import Training
from experiments.step import compiled_step, first_state
from experiments.wire import collectives, moved_bytes
from experiments.zoo import MODELS, Preset, make_model
from fp4jax.encode import encode
from fp4jax.matmul import random_words
from fp4jax.quantizer import Quantizer

MATRIX = (((1,), (0,)), ((), ()))
# Of two layers; the features between them lie along "tensor".
SPECS = (jax.P("fsdp", "tensor"), jax.P("tensor", "fsdp"))
MESHES = (
    Extents(),
    Extents(fsdp=2),
    Extents(fsdp=4),
    Extents(fsdp=8),
    Extents(data=2, fsdp=4),
    Extents(fsdp=4, tensor=2),
)
BF16, NVFP4 = fp4.recipes.bf16(), fp4.recipes.nvfp4()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the layers: ``tokens`` rows go from ``width`` to ``hidden`` features and back."""

    tokens: int
    width: int = 256
    hidden: int = 512


LAYERS = Sizes(tokens=512)
# Shards of 216, 108 or 54 tokens, none of which is whole blocks of 16.
CUT = Sizes(tokens=432)


def uneven(seed: int, shape: tuple[int, int], dtype: Any) -> Array:
    """Gaussian; each quarter of the rows is 8 times larger than the one before.

    And so is the second half of the columns.
    """
    x = np.random.default_rng(seed).standard_normal(shape)
    quarter, half = np.arange(shape[0]) * 4 // shape[0], np.arange(shape[1]) * 2 // shape[1]
    return jnp.asarray(x * 8.0 ** (quarter[:, None] + half[None]), dtype)


def operands(
    recipe: fp4.Recipe, gather: fp4.Gather | None, x: Array, w: Array, dy: Array
) -> list[fp4.QTensor]:
    """The six operands of a layer's products, weights as they arrive where they multiply."""
    words = random_words(recipe, jax.random.key(0))
    w = w if gather is None else gather.lay(w)
    sources = ((x, -1), (w, -2), (dy, -1), (w, -1), (x, -2), (dy, -2))
    rules = [rule for gemm in recipe.gemms for rule in (gemm.lhs, gemm.rhs)]
    found = []
    for i, (rule, (source, axis)) in enumerate(zip(rules, sources, strict=True)):
        assert isinstance(rule, Quantizer)
        stream = words[i] if words is not None and rule.needs_key else None
        encoded = encode(source, rule, axis, stream)
        q = encoded.pack(source.shape[axis], axis, source.dtype)
        found.append(gather.travel_packed(q) if gather is not None and source is w else q)
    return found


@functools.cache
def operands_on(recipe: fp4.Recipe, sizes: Sizes, extents: Extents | None) -> list[fp4.QTensor]:
    """The operands of the first layer on a mesh of these extents; None for one device."""
    x = uneven(0, (sizes.tokens, sizes.width), jnp.bfloat16)
    w = uneven(1, (sizes.width, sizes.hidden), jnp.float32)
    dy = uneven(2, (sizes.tokens, sizes.hidden), jnp.bfloat16)
    if extents is None:
        return jax.jit(functools.partial(operands, recipe, None))(x, w, dy)
    mesh = make_mesh(extents)
    lie = [NamedSharding(mesh, spec) for spec in (BATCH, SPECS[0], jax.P(*BATCH, "tensor"))]
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(operands, recipe, fp4.Gather(SPECS[0])))
        return program(*map(jax.device_put, (x, w, dy), lie))


def equal(mine: list[fp4.QTensor], others: list[fp4.QTensor]) -> list[bool]:
    """Which operands have the same bytes."""

    def content(q: fp4.QTensor) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(q)]

    return [content(a) == content(b) for a, b in zip(mine, others, strict=True)]


def layers(recipe: fp4.Recipe, weights: tuple[Array, ...], x: Array) -> Array:
    """Nothing is between them, so that what is kept is theirs; each rounds by a fixed key."""
    for i, (w, spec) in enumerate(zip(weights, SPECS, strict=True)):
        key, gather = jax.random.key(i), fp4.Gather(spec)
        x = fp4.dot_general(x, w, MATRIX, recipe=recipe, key=key, gather=gather)
    return x


def layers_on(recipe: fp4.Recipe, sizes: Sizes, extents: Extents) -> tuple[dict[str, int], int]:
    """Bytes that a device of this mesh has after all-gathers, by dtype.

    And those that it keeps for the backward pass, the parameters aside.
    """
    shapes = ((sizes.width, sizes.hidden), (sizes.hidden, sizes.width))
    weights = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    x = jax.ShapeDtypeStruct((sizes.tokens, sizes.width), jnp.bfloat16)
    parameters = [(w.shape, w.dtype) for w in weights]
    forward = functools.partial(layers, recipe)

    def step(weights: tuple[Array, ...], x: Array) -> Any:
        y, vjp = jax.vjp(forward, weights, x)
        return y, vjp(y)

    def residuals(weights: tuple[Array, ...], x: Array) -> list[Array]:
        leaves = jax.tree.leaves(jax.vjp(forward, weights, x)[1])
        return [leaf for leaf in leaves if (leaf.shape, leaf.dtype) not in parameters]

    def compiled(function: Callable[..., Any], **kwargs: Any) -> Any:
        program = jax.jit(function, in_shardings=(SPECS, BATCH), **kwargs)
        return program.lower(weights, x).compile()

    with jax.set_mesh(make_mesh(extents)):
        text = compiled(step, out_shardings=(BATCH, (SPECS, BATCH))).as_text()
        kept = compiled(residuals).memory_analysis().output_size_in_bytes
    return moved_bytes(collectives(text), "all-gather"), kept


def model_step(
    preset: Preset, recipe: fp4.Recipe, training: Training, extents: Extents
) -> dict[str, int]:
    """Bytes that a device has after the all-gathers of a training step of a language model."""
    mesh = make_mesh(extents)
    model = make_model(preset, {}, recipe, seed=0, mesh=mesh)
    graphdef, state = nnx.graphdef(model), place(first_state(model, training), mesh)
    batch = batch_shape((training.batch, training.sequence + 1), jnp.int32, mesh)
    program: Any = compiled_step(graphdef, training, state, batch)
    return moved_bytes(collectives(program.as_text()), "all-gather")


def tables() -> Iterator[str]:
    """Two layers on all meshes, then a model, which compiles slowly, on two; line by line."""
    tall = fp4.recipes.nvfp4(square_weights=False)
    yield "| mesh | equal operands | gathered, BF16 | NVFP4 | kept, BF16 | NVFP4 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for extents in MESHES:
        same = equal(operands_on(tall, CUT, extents), operands_on(tall, CUT, None))
        found = [layers_on(recipe, LAYERS, extents) for recipe in (BF16, tall)]
        yield _row(
            str(extents),
            f"{sum(same)} of {len(same)}",
            *(_listed(gathered) for gathered, _ in found),
            *(f"{kept:,}" for _, kept in found),
        )
    yield ""
    yield "| mesh | gathered, BF16 | NVFP4 | NVFP4 / BF16 |"
    yield "| --- | --- | --- | --- |"
    training = Training(batch=8, sequence=64)
    for extents in (Extents(fsdp=8), Extents(fsdp=4, tensor=2)):
        steps = [model_step(MODELS["transformer"], r, training, extents) for r in (BF16, NVFP4)]
        bf16, nvfp4 = (sum(step.values()) for step in steps)
        yield _row(str(extents), *map(_listed, steps), f"{nvfp4 / bf16:.2f}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _listed(gathered: dict[str, int]) -> str:
    return " + ".join(f"{n:,} {dtype}" for dtype, n in sorted(gathered.items())) or "0"


@dataclasses.dataclass(frozen=True)
class Config:
    """The tables of docs/distributed.md."""

    write: bool = False
    """Put them into the page, too."""


def main() -> None:
    """Prints the tables row by row, and writes them if asked."""
    config = tyro.cli(Config)
    jax.config.update("jax_platforms", "cpu")  # whose one chip can be several devices
    jax.config.update("jax_num_cpu_devices", max(mesh.devices for mesh in MESHES))
    lines = []
    for line in tables():
        print(line, flush=True)
        lines.append(line)
    if config.write:
        pages.put("distributed.md", "experiments.mesh_table", "\n".join(lines))


if __name__ == "__main__":
    main()
