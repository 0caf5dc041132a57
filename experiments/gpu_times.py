"""How fast the kernels are on the GPU that is here, beside their rivals in the same run."""

import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import fp4jax as fp4
from experiments.gpu_bytes import CASES, MATRIX, label, run
from fp4jax.kernels import product
from fp4jax.kernels.packed import Packed

BUFFERS = 4  # in turn, so that no input is still in the cache
PER_ROUND = 20  # calls that are waited for together, so that launching them costs nothing


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantizer's time, and how much of a copy's speed it reaches.

    Attributes:
      implementation: of quantize.
      case: what it makes.
      microseconds: median of a call.
      gigabytes_per_second: bytes of the input, read once, and of the results, by that time.
      of_copy: that, divided by the same of a copy of the input.
    """

    implementation: str
    case: str
    microseconds: float
    gigabytes_per_second: float
    of_copy: float


@dataclasses.dataclass(frozen=True)
class Layered:
    """A linear layer's time, forward and backward, beside the plain one in bfloat16."""

    kernels: str
    size: int
    milliseconds: float
    of_bf16: float


@dataclasses.dataclass(frozen=True)
class Tiled:
    """The time of a product by a kernel with tiles of a certain size."""

    implementation: str
    size: int
    tiles: str
    microseconds: float


def quantizers(names: Sequence[str], size: int, rounds: int) -> Iterator[Quantized]:
    """Each implementation of quantize on bfloat16 [size, size], all cases."""
    inputs = [
        (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16),) for i in range(BUFFERS)
    ]
    copied = 2 * inputs[0][0].nbytes
    for case, wants in CASES.items():
        contenders: dict[str, Callable[..., Any]] = {"copy": jax.jit(jnp.copy)}
        for name in names:
            contenders[name] = functools.partial(_quantize, name, wants)
        moved = inputs[0][0].nbytes + sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(jax.eval_shape(contenders[names[0]], *inputs[0]))
        )
        times = medians(contenders, inputs, rounds)
        copy_speed = copied / times["copy"]
        for name in names:
            speed = moved / times[name]
            yield Quantized(name, case, 1e6 * times[name], speed / 1e9, speed / copy_speed)


def _quantize(name: str, wants: Any, x: Array) -> Any:
    return run(name, x, wants)


def layers(choices: Sequence[fp4.Kernels], size: int, rounds: int) -> Iterator[Layered]:
    """A layer of [size, size] in bfloat16 with a float32 weight, by each choice of kernels."""
    inputs = [
        (
            jax.random.normal(jax.random.key(3 * i), (size, size), jnp.bfloat16),
            jax.random.normal(jax.random.key(3 * i + 1), (size, size)),
            jax.random.normal(jax.random.key(3 * i + 2), (size, size), jnp.bfloat16),
        )
        for i in range(2)
    ]
    contenders: dict[str, Callable[..., Any]] = {"bf16": _bf16_layer}
    for kernels in choices:
        contenders[label(kernels)] = functools.partial(_layer, kernels)
    times = medians(contenders, inputs, rounds)
    for name, seconds in times.items():
        yield Layered(name, size, 1e3 * seconds, seconds / times["bf16"])


def tilings(name: str, size: int, rounds: int) -> Iterator[Tiled]:
    """The product of two matrices [size, size] by a Pallas kernel, with all its tilings."""
    body = importlib.import_module(f"fp4jax.kernels.{name}_matmul")
    inputs = []
    for i in range(BUFFERS):
        x = jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16)
        inputs.append((product.packed(fp4.quantize(x, fp4.NVFP4)),) * 2)
    contenders = {
        str(tiles): jax.jit(functools.partial(_tiled, body, tiles)) for tiles in body.CANDIDATES
    }
    for tiles, seconds in medians(contenders, inputs, rounds).items():
        yield Tiled(name, size, tiles, 1e6 * seconds)


def _tiled(body: Any, tiles: Any, a: Packed, b: Packed) -> Array:
    return body.tiled_matmul(a, b, jnp.bfloat16, tiles)


@jax.jit
def _bf16_layer(x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
    def layer(x: Array, w: Array) -> Array:
        return lax.dot_general(x, w.astype(jnp.bfloat16), MATRIX)

    y, vjp = jax.vjp(layer, x, w)
    return y, *vjp(dy)


@functools.partial(jax.jit, static_argnums=0)
def _layer(kernels: fp4.Kernels, x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
    def layer(x: Array, w: Array) -> Array:
        return fp4.dot_general(
            x, w, MATRIX, recipe=fp4.recipes.nvfp4(), key=jax.random.key(0), kernels=kernels,
            preferred_element_type=jnp.bfloat16,
        )  # fmt: skip

    y, vjp = jax.vjp(layer, x, w)
    return y, *vjp(dy)


def medians(
    contenders: Mapping[str, Callable[..., Any]], inputs: Sequence[tuple[Any, ...]], rounds: int
) -> dict[str, float]:
    """Seconds of one call of each, which take turns; calls of a round go through the inputs."""
    for call in contenders.values():
        jax.block_until_ready([call(*given) for given in inputs])
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for i in range(PER_ROUND):
                result = call(*inputs[i % len(inputs)])
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / PER_ROUND)
    return {name: statistics.median(found) for name, found in seconds.items()}
