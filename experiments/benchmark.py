"""Speed, measured beside its rivals in the same run.

``python -m experiments.benchmark linear``, or ``quantize``, or ``step``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array, lax
from rich.console import Console
from rich.table import Table

import fp4jax as fp4
from experiments.optimization import Training
from experiments.peers import nvfp4_linear, nvfp4_quantizers
from experiments.step_time import contenders as steps_of
from experiments.timing import medians
from experiments.zoo import RECIPES

MATRIX = (((1,), (0,)), ((), ()))
LAST = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear layer, forward and backward: recipes against the three bare products and peers.

    Attributes:
      shapes: TOKENSxINxOUT, a table row each.
      experts: of a last row, a mixture-of-experts layer of the first shape with uneven groups;
        0 for none. Its bare products are those of one dense layer as large.
      repeats: timed rounds per row.
    """

    shapes: tuple[str, ...] = (
        "1024x1024x1024",
        "2048x2048x2048",
        "1024x2048x1024",
        "1024x1024x4096",
    )
    experts: int = 8
    repeats: int = 25


def linear(options: Linear) -> Table:
    """A row per shape: median milliseconds, and NVFP4's ratios to its rivals."""
    recipes = [fp4.recipes.bf16(), fp4.recipes.fp8_block(), fp4.recipes.nvfp4()]
    table = Table(title=f"linear layer, forward + backward, ms ({versions()})")
    names = ["3 bf16 GEMMs", "float32", "qwix", *(recipe.name for recipe in recipes)]
    for column in ("tokens x in x out", *names, *(f"nvfp4 / {name}" for name in names[:3])):
        table.add_column(column, justify="right")
    rows = [(0, shape) for shape in options.shapes]
    if options.experts:
        rows.append((options.experts, options.shapes[0]))
    for experts, shape in rows:
        tokens, features_in, features_out = map(int, shape.split("x"))
        contenders = _contenders(experts, tokens, features_in, features_out, recipes)
        time = medians(contenders, options.repeats)
        ratios = [time["nvfp4"] / time[name] if name in time else None for name in names[:3]]
        table.add_row(
            shape + (f", {experts} experts" if experts else ""),
            *(f"{time[name]:.1f}" if name in time else "-" for name in names),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    return table


def _contenders(
    experts: int, tokens: int, features_in: int, features_out: int, recipes: list[fp4.Recipe]
) -> dict[str, Callable[[], Any]]:
    """What one row times; all take the same arrays."""
    shapes = [(tokens, features_in), (features_in, features_out), (tokens, features_out)]
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    low = [a.astype(jnp.bfloat16) for a in (x, w, dy)]
    key = jax.random.key(3)
    contenders: dict[str, Callable[[], Any]] = {"3 bf16 GEMMs": _bare_products(*low)}
    sizes = None
    if experts:
        w = jax.random.normal(jax.random.key(1), (experts, features_in, features_out))
        share = jax.random.dirichlet(jax.random.key(4), jnp.full(experts, 2.0))
        ends = jnp.round(jnp.cumsum(share) * tokens).astype(jnp.int32)
        sizes = jnp.diff(ends, prepend=0)
    contenders["float32"] = functools.partial(_plain, x, w, dy, sizes)
    if not experts:
        contenders |= dict(nvfp4_linear(x, w, dy))
    for recipe in recipes:
        contenders[recipe.name] = functools.partial(_layer, recipe, low[0], w, low[2], sizes, key)
    return contenders


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Quantizers on one float32 matrix, against a plain scaled copy and other projects'.

    Attributes:
      size: rows = columns.
      repeats: timed rounds.
    """

    size: int = 4096
    repeats: int = 9


def quantize(options: Quantize) -> Table:
    """A row per quantizer: median milliseconds and the ratio to the copy."""
    nvfp4 = fp4.Quantizer(fp4.NVFP4)
    square = fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
    stochastic = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic())
    rotated = fp4.Quantizer(fp4.NVFP4, hadamard=fp4.Hadamard(16))
    key = jax.random.key(1)
    x = jax.random.normal(jax.random.key(0), (options.size, options.size))
    contenders: dict[str, Callable[[], Any]] = {
        "scaled copy": _InPlace(lambda x: x * 1.0001, x),
        "fake 1x16": _InPlace(lambda x: fp4.fake_quantize(x, nvfp4), x),
        "fake 1x16 stochastic": _InPlace(lambda x: fp4.fake_quantize(x, stochastic, key=key), x),
        "fake 16x16": _InPlace(lambda x: fp4.fake_quantize(x, square), x),
        "fake 1x16 along axis 0": _InPlace(lambda x: fp4.fake_quantize(x, nvfp4, axis=0), x),
        "fake 1x16 RHT along axis 0": _InPlace(lambda x: fp4.fake_quantize(x, rotated, axis=0), x),
        "packed 1x16": functools.partial(fp4.quantize, x, nvfp4),
        "packed 16x16": functools.partial(fp4.quantize, x, square),
        "packed 1x16 along axis 0": functools.partial(fp4.quantize, x, nvfp4, 0),
        **dict(nvfp4_quantizers(np.asarray(x))),
    }
    time = medians(contenders, options.repeats)
    table = Table(title=f"NVFP4, {options.size}x{options.size} float32, ms ({versions()})")
    for column in ("quantizer", "ms", "/ copy", "/ fake 1x16"):
        table.add_column(column, justify="left" if column == "quantizer" else "right")
    for name, ms in time.items():
        ratios = (ms / time["scaled copy"], ms / time["fake 1x16"])
        table.add_row(name, f"{ms:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    return table


class _InPlace:
    """A function of an array, run again and again on the same donated buffer.

    A fresh output of this size costs more in page faults than any arithmetic on it.
    """

    def __init__(self, function: Callable[[Array], Array], x: Array) -> None:
        self.function = jax.jit(function, donate_argnums=0)
        self.buffer = jnp.array(x)

    def __call__(self) -> Array:
        self.buffer = self.function(self.buffer)
        return self.buffer


def _bare_products(x: Array, w: Array, dy: Array) -> Callable[[], Any]:
    """The layer's three products and nothing else, contraction axes last on both sides."""
    pairs = [(x, w.T), (dy, w), (x.T, dy.T)]

    @jax.jit
    def products(pairs: list[tuple[Array, Array]]) -> list[Array]:
        return [lax.dot_general(a, b, LAST, preferred_element_type=jnp.float32) for a, b in pairs]

    return functools.partial(products, pairs)


@jax.jit
def _plain(x: Array, w: Array, dy: Array, sizes: Array | None) -> tuple[Array, ...]:
    def product(x: Array, w: Array) -> Array:
        return lax.dot_general(x, w, MATRIX) if sizes is None else lax.ragged_dot(x, w, sizes)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    recipe: fp4.Recipe, x: Array, w: Array, dy: Array, sizes: Array | None, key: Array
) -> tuple[Array, ...]:
    """bfloat16 activations and gradients, float32 master weight and weight gradient."""
    options: dict[str, Any] = {
        "recipe": recipe,
        "key": key,
        "preferred_element_type": jnp.bfloat16,
    }

    def product(x: Array, w: Array) -> Array:
        if sizes is None:
            return fp4.dot_general(x, w, MATRIX, **options)
        return fp4.ragged_dot(x, w, sizes, **options)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step of a model by each recipe, against one written by hand in plain JAX.

    Attributes:
      model: hybrid, transformer or mamba; larger ones have _m30 and _m100 after their name.
      repeats: timed rounds.
    """

    model: str = "hybrid"
    repeats: int = 25


def step(options: Step) -> Table:
    """A row per recipe: median milliseconds, tokens per second and the ratio of the times."""
    training = Training()
    recipes = {name: RECIPES[name] for name in ("bf16", "fp8_block", "nvfp4")}
    time = medians(steps_of(options.model, recipes, training), options.repeats)
    table = Table(
        title=f"a step of {options.model}, {training.batch} x {training.sequence} tokens, "
        f"ms ({versions()})"
    )
    for column in ("", "ms", "tokens/s", "/ plain JAX", "/ bf16"):
        table.add_column(column, justify="right" if column else "left")
    for name, ms in time.items():
        rate = 1e3 * training.batch * training.sequence / ms
        ratios = (ms / time["plain JAX"], ms / time["bf16"])
        table.add_row(name, f"{ms:.1f}", f"{rate:,.0f}", *(f"{ratio:.2f}" for ratio in ratios))
    return table


def versions() -> str:
    """What the figures depend on besides the machine's load."""
    return f"jax {jax.__version__}, {jax.devices()[0].device_kind}"


def main() -> None:
    """Runs the benchmark that the command line names."""
    programs: dict[str, Callable[..., Any]] = {"linear": Linear, "quantize": Quantize, "step": Step}
    options = tyro.extras.subcommand_cli_from_dict(programs)
    tables: dict[type, Callable[[Any], Table]] = {Linear: linear, Quantize: quantize, Step: step}
    Console(width=140).print(tables[type(options)](options))


if __name__ == "__main__":
    main()
