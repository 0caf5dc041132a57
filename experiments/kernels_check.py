"""Checks GPU kernels without a GPU: what they compile to, for each kind of GPU.

``python -m experiments.kernels_check`` compiles every entry of `CHECKS`, prints a table, and ends
with exit code 1 and the reasons if one of them is not as it should be.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import Array
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import fp4jax as fp4
from experiments.aot import B200, H200, Compiled, Kernel, Target, compile_for, find_ptxas
from experiments.gpu_bytes import CASES
from experiments.terminal import say
from fp4jax.kernels import product
from fp4jax.kernels.packed import Packed
from fp4jax.kernels.wanted import Maximum, Numbers, Want

FAILED = 1
_NEWEST = jax.__version_info__ >= (0, 12)  # with Mosaic GPU's present interface

# Divisions and roots that are not rounded as IEEE 754 has it.
APPROXIMATE = (r"\bdiv\.(?:full|approx)\S*", r"\brcp\.approx\S*", r"\br?sqrt\.approx\S*")
# Numbers below 2**-126 that become zero.
FLUSHED = (r"\b\w+(?:\.\w+)*\.ftz\b\S*",)
# A product and a sum in one rounding: those that are, and sums that ptxas may yet make so, having
# no rounding mode of their own. XLA and Triton write `add.rn`, Mosaic `add`.
FUSED = (r"\bfma\.rn\S*f32\S*", r"\b(?:add|sub)\.f32\S*")

# Two numbers to E2M1, to nearest: Blackwell's.
TO_E2M1 = (r"\bcvt\.rn\.satfinite\.e2m1x2\.f32",)
# Tensor cores: Blackwell's of NVFP4, Hopper's of 16-bit operands.
BLOCK_SCALED = (r"\btcgen05\.mma\S*\.kind::mxf4nvf4\S*block_scale\S*",)
WGMMA = (r"\bwgmma\.mma_async\S*\.f16\.f16",)


@dataclasses.dataclass(frozen=True)
class Check:
    """A function, a GPU, and what must hold of the kernels that come out.

    Attributes:
      name: for the table; with the target's, unique.
      target: the GPU.
      function: of arrays.
      args: abstract ones.
      must: regular expressions, each to be found in the PTX of some kernel.
      must_not: regular expressions to be found in none.
      most: kernels allowed.
      least: kernels expected; with ``most`` an exact number.
      spills: bytes that a kernel may spill, stores and loads together.
    """

    name: str
    target: Target
    function: Callable[..., Any]
    args: tuple[Any, ...]
    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    most: int = 1
    least: int = 1
    spills: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a check: a compiled function, or why there is none."""

    check: Check
    compiled: Compiled | None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Config:
    """Checks GPU kernels without a GPU."""

    only: str = ""
    """A regular expression: run the checks whose name with target it is found in."""
    kernels: bool = False
    """Show every kernel, not only what they come to together."""


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _linear(kernels: fp4.Kernels, x: Array, w: Array, dy: Array, key: Array) -> tuple[Array, ...]:
    """A linear layer's result and both gradients, by the NVFP4 recipe."""

    def layer(x: Array, w: Array) -> Array:
        recipe, dimensions = fp4.recipes.nvfp4(), (((1,), (0,)), ((), ()))
        return fp4.dot_general(x, w, dimensions, recipe=recipe, key=key, kernels=kernels)

    y, pullback = jax.vjp(layer, x, w)
    return y, *pullback(dy)


_LAYER = (*[_array(4096, 4096)] * 3, _array(2, dtype=jnp.uint32))


def _layer(target: Target, kernels: fp4.Kernels, must: tuple[str, ...], most: int) -> Check:
    """A layer by kernels: for each of three tensors maxima, their sum-up, and codes; products."""
    name = f"linear forward and backward, {kernels.quantize} and {kernels.scaled_matmul}"
    function = functools.partial(_linear, kernels)
    return Check(name, target, function, _LAYER, must, FLUSHED, most)


def _xla(target: Target) -> Iterator[Check]:
    """What XLA makes of the library: two roundings where there are two, but inexact divisions.

    Those `fp4jax.division` puts right.
    """
    xla = functools.partial(
        Check,
        target=target,
        must=APPROXIMATE[:2],
        must_not=FLUSHED + FUSED,
    )
    quantize = functools.partial(fp4.quantize, format_or_quantizer=fp4.NVFP4)
    yield xla("quantize, XLA", function=quantize, args=_LAYER[:1], most=11)
    layer = functools.partial(_linear, fp4.Kernels())
    # Most are small ones for scales; XLA before jax 0.11 makes seven of each exact division.
    most = 72 if _NEWEST else 117
    yield xla("linear forward and backward, XLA", function=layer, args=_LAYER, most=most)


def _quantize(target: Target, name: str) -> Iterator[Check]:
    """The kernels of an implementation of quantize: no division, each element read once."""
    check = functools.partial(
        Check, target=target, must_not=APPROXIMATE + FLUSHED, most=1, args=(_array(8192, 8192),)
    )
    if name == "triton":  # which alone says how every sum is rounded
        check = functools.partial(check, must_not=APPROXIMATE + FLUSHED + FUSED)
    body = importlib.import_module(f"fp4jax.kernels.{name}_quantize")
    for case, wants in CASES.items():
        encode = functools.partial(_encode, body, wants)
        nearest = not any(want.quantizer.needs_key for want in wants)
        converts = target == B200 and nearest and name == "triton"
        numbers = tuple(_numbers(want, 8192) for want in wants)
        yield check(
            f"quantize {case}, {name}",
            function=encode,
            args=(_array(8192, 8192), numbers),
            must=TO_E2M1 if converts else (),
        )
    maxima = tuple(
        Maximum(want.quantizer.hadamard, want.axis, finite=True)
        for want in CASES["gradient: the same, stochastic"]
    )
    function = functools.partial(_maxima, body, maxima)
    yield check(f"maxima for a gradient, {name}", function=function, most=3)


def _encode(body: Any, wants: tuple[Want, ...], x: Array, numbers: tuple[Numbers, ...]) -> Any:
    return body.encode(x, wants, numbers)


def _maxima(body: Any, maxima: tuple[Maximum, ...], x: Array) -> Any:
    return body.maxima(x, maxima)


def _numbers(want: Want, size: int) -> Numbers:
    """What a kernel gets beside a square array."""
    word, number = (functools.partial(_array, dtype=dtype) for dtype in (jnp.uint32, jnp.float32))
    drawn = (word(size), word(size), word(size // 16)) if want.quantizer.needs_key else [None] * 3
    if want.square:
        return Numbers(None, number(size // 16, size // 16), *drawn)
    return Numbers(number(10), None, *drawn)


def _scaled_matmul(
    target: Target, name: str, must: tuple[str, ...], most: int, sizes: tuple[int, ...]
) -> Iterator[Check]:
    """The kernels of an implementation of scaled_matmul, and its instruction."""
    for size in sizes:
        function = functools.partial(_product, name)
        operands = (_quantized(size), _quantized(size))
        yield Check(
            f"scaled_matmul {size}, {name}", target, function, operands, must, FLUSHED, most
        )


def _tilings(target: Target, name: str, must: tuple[str, ...]) -> Iterator[Check]:
    """A product with every tiling that a card may be asked to time."""
    body = importlib.import_module(f"fp4jax.kernels.{name}_matmul")
    operand = jax.eval_shape(product.packed, _quantized(2048))
    for tiles in body.CANDIDATES:
        function = functools.partial(_tiled, body, tiles)
        label = f"{tiles.m}x{tiles.n}x{tiles.k}, {tiles.stages} stages"
        yield Check(f"{name}, tiles {label}", target, function, (operand,) * 2, must, FLUSHED, 3)


def _tiled(body: Any, tiles: Any, a: Packed, b: Packed) -> Array:
    return body.tiled_matmul(a, b, jnp.bfloat16, tiles)


def _product(name: str, a: fp4.QTensor, b: fp4.QTensor) -> Array:
    dtype = jnp.bfloat16
    return fp4.scaled_matmul(a, b, preferred_element_type=dtype, implementation=name)


def _quantized(size: int) -> Any:
    """A square matrix in NVFP4."""
    return jax.eval_shape(lambda x: fp4.quantize(x, fp4.NVFP4), _array(size, size))


def _mosaic() -> Iterator[Check]:
    """What needs the interface of Mosaic GPU that came with JAX 0.12."""
    yield from _quantize(H200, "mosaic")
    yield from _quantize(B200, "mosaic")
    yield from _scaled_matmul(H200, "hopper", WGMMA, most=3, sizes=(1024, 8192))
    yield from _scaled_matmul(B200, "blackwell", BLOCK_SCALED, most=3, sizes=(1024, 8192))
    yield from _tilings(H200, "hopper", WGMMA)
    yield from _tilings(B200, "blackwell", BLOCK_SCALED)
    yield _layer(H200, fp4.Kernels("mosaic", "hopper"), WGMMA, most=40)
    yield _layer(B200, fp4.Kernels("mosaic", "blackwell"), BLOCK_SCALED, most=40)


# A new kernel's checks go here.
CHECKS: tuple[Check, ...] = (
    *_xla(H200),
    *_xla(B200),
    *_quantize(H200, "triton"),
    *_quantize(B200, "triton"),
    *_scaled_matmul(B200, "cudnn", (r"cudnn\$blockScaledDot",), most=4, sizes=(8192,)),
    *(_mosaic() if _NEWEST else ()),
)


def reasons(check: Check, compiled: Compiled) -> list[str]:
    """Why a check fails, a sentence each; none if it holds."""
    found = []
    count = len(compiled.kernels)
    if not check.least <= count <= check.most:
        allowed = f"{check.least} to {check.most}" if check.least < check.most else f"{check.most}"
        found.append(f"{count} kernels, where {allowed} are allowed")
    for pattern in check.must:
        if not _with(pattern, compiled.kernels):
            found.append(f"no kernel has {pattern}")
    for pattern in check.must_not:
        if names := _with(pattern, compiled.kernels):
            found.append(f"{pattern} in {', '.join(names)}")
    for kernel in compiled.kernels:
        if (spilled := _spilled(kernel)) > check.spills:
            found.append(f"{kernel.name} spills {spilled} bytes, where {check.spills} are allowed")
    return found


def run(checks: Sequence[Check], positions: Sequence[int]) -> Iterator[Outcome]:
    """Compiles some of the checks, in one process for each target; yields as they are ready.

    One for all targets would not do: Mosaic compiles for the first it meets.

    Args:
      checks: `CHECKS`, which the processes import.
      positions: of those to run.
    """
    spawn = multiprocessing.get_context("spawn")  # JAX does not survive a fork
    with contextlib.ExitStack() as stack:
        pools = {
            target: stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn))
            for target in dict.fromkeys(checks[position].target for position in positions)
        }
        jobs = {
            pools[checks[position].target].submit(_compiled, position): position
            for position in positions
        }
        for job in concurrent.futures.as_completed(jobs):
            check = checks[jobs[job]]
            try:
                yield Outcome(check, job.result())
            except Exception as error:  # whatever a compiler says is the check's result
                yield Outcome(check, None, f"{type(error).__name__}: {error}")


def _compiled(position: int) -> Compiled:
    check = CHECKS[position]
    return compile_for(check.target, check.function, *check.args)


def table(outcomes: Sequence[Outcome], kernels: bool) -> Table:
    """A row for each check and, if asked for, for each of its kernels.

    It has the number of kernels, the most registers, spilled bytes and shared bytes of one, MB
    that all move at most, MB of arguments and results alone, and the seconds of compiling.
    """
    shown = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    shown.add_column("target", no_wrap=True)
    shown.add_column("kernel", overflow="fold")
    for heading in ("n", "regs", "spill", "shared", "MB", "floor", "s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("instructions", overflow="fold", max_width=28)
    for outcome in outcomes:
        check, compiled = outcome.check, outcome.compiled
        if compiled is None:
            shown.add_row(check.target.name, check.name, *["-"] * 7, "does not compile")
            continue
        patterns = (*check.must, *check.must_not)
        shown.add_row(
            check.target.name,
            check.name,
            str(len(compiled.kernels)),
            *_resources(compiled.kernels),
            f"{compiled.moved / 1e6:.1f}",
            f"{compiled.floor / 1e6:.1f}",
            f"{compiled.seconds:.1f}",
            _instructions(patterns, compiled.kernels),
        )
        for kernel in compiled.kernels if kernels else ():
            found = _instructions(patterns, [kernel])
            cells = (*_resources([kernel]), f"{kernel.bytes / 1e6:.1f}", "", "", found)
            shown.add_row("", kernel.name, "", *cells, style="dim")
    return shown


def report(outcomes: Sequence[Outcome], console: Console, kernels: bool = False) -> int:
    """Prints the table and what is wrong; returns the exit code."""
    console.print(table(outcomes, kernels))
    wrong = [
        f"{outcome.check.target.name}, {outcome.check.name}: {reason}"
        for outcome in outcomes
        for reason in (
            [outcome.error]
            if outcome.compiled is None
            else reasons(outcome.check, outcome.compiled)
        )
    ]
    for line in wrong:
        say(f"failed: {line}", console)
    return FAILED if wrong else 0


def main(args: Sequence[str] | None = None) -> int:
    """Runs the checks that the command line asks for; returns the exit code."""
    config = tyro.cli(Config, prog="python -m experiments.kernels_check", args=args)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for the processes: to look for no GPU
    console = Console()
    try:
        find_ptxas()
    except ModuleNotFoundError as error:
        say(f"error: {error}")
        return FAILED
    positions = [
        position
        for position, check in enumerate(CHECKS)
        if re.search(config.only, f"{check.target.name} {check.name}")
    ]
    if not positions:
        say(f"error: only={config.only!r} is found in no check's name")
        return FAILED
    began = time.perf_counter()
    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for outcome in progress.track(run(CHECKS, positions), total=len(positions)):
            outcomes.append(outcome)
    outcomes.sort(key=lambda outcome: CHECKS.index(outcome.check))
    code = report(outcomes, console, config.kernels)
    say(f"jax {jax.__version__}, {time.perf_counter() - began:.0f} s", console)
    return code


def _with(pattern: str, kernels: Sequence[Kernel]) -> list[str]:
    """The kernels whose code has the pattern; of a library's, whose name in the program has it."""
    return [k.name for k in kernels if re.search(pattern, k.ptx or k.made_by)]


def _spilled(kernel: Kernel) -> int:
    used = kernel.resources
    return used.spill_stores + used.spill_loads if used else 0


def _resources(kernels: Sequence[Kernel]) -> tuple[str, str, str]:
    """Registers, spilled and shared bytes: the most that one of the kernels has."""
    used = [kernel for kernel in kernels if kernel.resources]
    if not used:
        return "-", "-", "-"
    registers = max(kernel.resources.registers for kernel in used if kernel.resources)
    shared = max(
        kernel.resources.shared + (kernel.dynamic_shared or 0)
        for kernel in used
        if kernel.resources
    )
    return str(registers), str(max(map(_spilled, used))), str(shared)


def _instructions(patterns: Sequence[str], kernels: Sequence[Kernel]) -> str:
    """How often each pattern is found, the words it is found as."""
    code = "\n".join(kernel.ptx or "" for kernel in kernels)
    counts: dict[str, int] = {}
    for pattern in patterns:
        for match in re.finditer(pattern, code):
            counts[match[0]] = counts.get(match[0], 0) + 1
    return "\n".join(f"{count} {name}" for name, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
