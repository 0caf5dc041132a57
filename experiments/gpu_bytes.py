"""Whether each body of quantize gives the CPU's bytes here, and what layers are off by."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fp4jax as fp4
from fp4jax.encode import encode
from fp4jax.kernels import operands, registry
from fp4jax.kernels.wanted import Want
from fp4jax.rounding import key_words

VECTORS = Path(__file__).parents[1] / "tests" / "data" / "nvfp4_mx.npz"
MATRIX = (((1,), (0,)), ((), ()))

_RHT = fp4.Hadamard(16)
_PLAIN, _SQUARE = fp4.Quantizer(fp4.NVFP4), fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
_STOCHASTIC = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic())
_ROTATED = dataclasses.replace(_PLAIN, hadamard=_RHT)
_GRADIENT = dataclasses.replace(_STOCHASTIC, hadamard=_RHT)

# What a linear layer's tensors become, and each part alone.
CASES: dict[str, tuple[Want, ...]] = {
    "rows": (Want(_PLAIN, -1),),
    "columns": (Want(_PLAIN, -2),),
    "rows, stochastic": (Want(_STOCHASTIC, -1),),
    "columns, RHT": (Want(_ROTATED, -2),),
    "columns, RHT, stochastic": (Want(_GRADIENT, -2),),
    "activation: rows, and columns with RHT": (Want(_PLAIN, -1), Want(_ROTATED, -2)),
    "gradient: the same, stochastic": (Want(_STOCHASTIC, -1), Want(_GRADIENT, -2)),
    "weight: 16x16 along both axes": (Want(_SQUARE, -2), Want(_SQUARE, -1)),
}

TOGETHER = tuple(name for name, wants in CASES.items() if len(wants) > 1)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """How many bytes of an implementation's results differ from those of the CPU."""

    implementation: str
    case: str
    data: str
    different: int
    total: int


@dataclasses.dataclass(frozen=True)
class Error:
    """The largest error of a layer's result, in units of what float32 sums may be off by."""

    kernels: str
    result: str
    error: float


def same_bytes(names: list[str], size: int) -> Iterator[Bytes]:
    """For each implementation, case and array: what differs from plain JAX on a CPU.

    Args:
      names: of the implementations of quantize.
      size: rows and columns of the fresh data.
    """
    cpu = jax.devices("cpu")[0]
    for label, x in arrays(size):
        # The reference vectors are many small arrays: there, what training asks for is enough.
        cases = CASES if len(x) == size else {name: CASES[name] for name in TOGETHER}
        yield from _compared(names, label, x, cases, cpu)


def _compared(
    names: list[str], label: str, x: np.ndarray, cases: dict[str, tuple[Want, ...]], cpu: Any
) -> Iterator[Bytes]:
    for case, wants in cases.items():
        expected = run("xla", jax.device_put(x, cpu), wants)
        for name in names:
            got = run(name, x, wants)
            pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
            different = sum(_different(a, b) for a, b in pairs)
            yield Bytes(name, case, label, different, sum(b.nbytes for _, b in pairs))


def arrays(size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Fresh arrays of blocks of very different size, and the inputs of the reference vectors."""
    rng = np.random.default_rng(7)
    magnitude = np.exp2(rng.integers(-20, 4, (size, size // 8))).repeat(8, 1)
    x = (rng.standard_normal((size, size), np.float32) * magnitude).astype(np.float32)
    yield f"{size}x{size} bfloat16", x.astype(jnp.bfloat16)
    yield f"{size}x{size} float32", x
    with np.load(VECTORS) as vectors:
        for name in vectors.files:
            if name.endswith("/f32/x"):
                yield name, vectors[name]


@functools.partial(jax.jit, static_argnums=(0, 2))
def run(name: str, x: Array, wants: tuple[Want, ...]) -> tuple[fp4.QTensor, ...]:
    """The operands wanted of ``x`` by a body of quantize."""
    words = tuple(
        key_words(jax.random.key(i), 1)[0] if want.quantizer.needs_key else None
        for i, want in enumerate(wants)
    )
    choice = registry.choose(registry.QUANTIZE, name, x, wants[0])
    if choice is not None:
        return operands.quantize(choice.body, x, wants, words, interpret=choice.interpret)
    return tuple(
        encode(x, quantizer, axis, stream).pack(x.shape[axis], axis, np.dtype(x.dtype))
        for (quantizer, axis), stream in zip(wants, words, strict=True)
    )


def layer_errors(choices: list[fp4.Kernels], size: int) -> Iterator[Error]:
    """y, dx and dw of a linear layer against float64 products of the CPU's operands.

    An error of 1 is ``K 2**-24 sum |a| |b|``, for sums of length K the bound of float32.
    """
    recipe = fp4.recipes.nvfp4()
    rng = np.random.default_rng(8)
    x, w, dy = (jnp.asarray(rng.standard_normal((size, size)), jnp.bfloat16) for _ in range(3))
    key = jax.random.key(9)
    pairs = _operands(recipe, x, w, dy, key)

    @functools.partial(jax.jit, static_argnums=0)
    def layer(kernels: fp4.Kernels, x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
        def product(x: Array, w: Array) -> Array:
            return fp4.dot_general(
                x, w, MATRIX, recipe=recipe, key=key, kernels=kernels,
                preferred_element_type=jnp.float32,
            )  # fmt: skip

        y, vjp = jax.vjp(product, x.astype(jnp.float32), w.astype(jnp.float32))
        return y, *vjp(dy.astype(jnp.float32))

    for kernels in choices:
        got = layer(kernels, x, w, dy)
        for name, result, (a, b) in zip(("y", "dx", "dw"), got, pairs, strict=True):
            bound = size * 2.0**-24 * (np.abs(a) @ np.abs(b).T)
            error = np.max(np.abs(np.asarray(result, np.float64) - a @ b.T) / bound)
            yield Error(label(kernels), name, float(error))


def label(kernels: fp4.Kernels) -> str:
    """Which implementations a layer runs by, for a table."""
    return f"{kernels.quantize or 'chosen'} + {kernels.scaled_matmul or 'chosen'}"


def _operands(
    recipe: fp4.Recipe, x: Array, w: Array, dy: Array, key: Array
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The six operands in float64, block axis last, in pairs for y, dx and dw."""
    cpu = jax.devices("cpu")[0]
    words = key_words(key, 6)
    tensors = ((x, -1), (w, -2), (dy, -1), (w, -1), (x, -2), (dy, -2))
    rules = [rule for gemm in recipe.gemms for rule in (gemm.lhs, gemm.rhs)]

    def values(i: int) -> np.ndarray:
        (tensor, axis), rule = tensors[i], rules[i]
        assert isinstance(rule, fp4.Quantizer)
        stream = words[i] if rule.needs_key else None

        @jax.jit
        def operand(tensor: Array, stream: Array | None) -> Any:
            q = encode(tensor, rule, axis, stream)
            return q.pack(tensor.shape[axis], axis, np.dtype(np.float32)).operand()

        put: Callable[[Any], Any] = functools.partial(jax.device_put, device=cpu)
        found = operand(put(tensor.astype(jnp.float32)), put(stream))
        return np.asarray(found.values, np.float64) * float(found.scale)

    found = [values(i) for i in range(6)]
    return list(zip(found[::2], found[1::2], strict=True))


def _different(a: Array, b: Array) -> int:
    left, right = (np.atleast_1d(np.asarray(array)).view(np.uint8) for array in (a, b))
    return int(np.count_nonzero(left != right))
