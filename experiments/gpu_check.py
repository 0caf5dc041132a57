"""Kernels on the GPU that is here: first that they give the right bytes, then how fast they are.

``python -m experiments.gpu_check`` writes a table in Markdown and JSON to runs/gpu_check; with
``--write`` the table goes to docs/benchmarks.md too. Nothing is timed whose bytes are wrong. Where
all of an implementation's bytes are right, `fp4jax.kernels.registry` may call it proven there.
"""

import dataclasses
import datetime
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import tyro
from rich.console import Console
from rich.progress import track

import fp4jax as fp4
from experiments import gpu_bytes, gpu_times, pages
from experiments.terminal import Markdown, say
from fp4jax.kernels import registry
from fp4jax.kernels.device import compute_capability

_T = TypeVar("_T")
TILED = ("hopper", "blackwell")  # the implementations that have tiles to choose from


@dataclasses.dataclass(frozen=True)
class Options:
    """What is checked.

    Attributes:
      size: rows and columns of the arrays that are quantized.
      product: rows and columns of the layer that is compared with float64.
      layers: rows and columns of the layers that are timed.
      rounds: timed rounds.
      out: folder of the results.
      write: whether to put the table into docs/benchmarks.md.
    """

    size: int = 8192
    product: int = 2048
    layers: tuple[int, ...] = (4096, 8192, 16384)
    rounds: int = 10
    out: Path = Path("runs/gpu_check")
    write: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """All results, and what they were found with; times are added last."""

    card: str
    versions: str
    date: str
    bytes: list[gpu_bytes.Bytes]
    errors: list[gpu_bytes.Error]
    quantizers: list[gpu_times.Quantized] = dataclasses.field(default_factory=list)
    layers: list[gpu_times.Layered] = dataclasses.field(default_factory=list)
    tilings: list[gpu_times.Tiled] = dataclasses.field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """The implementations, or pairs of them, that gave a wrong byte or too large an error."""
        bad = [b.implementation for b in self.bytes if b.different]
        return sorted({*bad, *(e.kernels for e in self.errors if not e.error <= 1)})


def check(
    options: Options, quantize: Sequence[str], products: Sequence[str], console: Console
) -> Found:
    """Runs everything for these implementations of the two operations.

    Args:
      options: of the program.
      quantize: by name; each is tried with each of the products.
      products: by name.
      console: where to show how far it is.
    """

    def all_of(results: Iterable[_T], what: str) -> list[_T]:
        return list(track(results, what, console=console))

    pairs = [
        fp4.Kernels("xla", "xla"),
        *itertools.starmap(fp4.Kernels, itertools.product(quantize, products)),
    ]
    found = Found(
        card=jax.devices()[0].device_kind,
        versions=f"jax {jax.__version__}",
        date=datetime.date.today().isoformat(),
        bytes=all_of(gpu_bytes.same_bytes(["xla", *quantize], options.size), "bytes"),
        errors=all_of(gpu_bytes.layer_errors(pairs, options.product), "products"),
    )
    right = [name for name in ("xla", *quantize) if name not in found.wrong]
    pairs = [pair for pair in pairs if gpu_bytes.label(pair) not in found.wrong]
    if right:
        timed = gpu_times.quantizers(right, options.size, options.rounds)
        found.quantizers.extend(all_of(timed, "times of quantize"))
    for size in options.layers:
        timed_layers = gpu_times.layers(pairs, size, options.rounds)
        found.layers.extend(all_of(timed_layers, f"times of a layer, {size}"))
        for name in products:
            if name in TILED:
                timed_tilings = gpu_times.tilings(name, size, options.rounds)
                found.tilings.extend(all_of(timed_tilings, f"tilings of {name}, {size}"))
    return found


def report(found: Found) -> str:
    """The results in Markdown."""
    by_name = {
        name: [b for b in found.bytes if b.implementation == name]
        for name in dict.fromkeys(b.implementation for b in found.bytes)
    }
    compared = [
        (name, len(all_), f"{sum(b.total for b in all_):,}", f"{sum(b.different for b in all_):,}")
        for name, all_ in by_name.items()
    ]
    quantizers = [
        (
            q.implementation,
            q.case,
            f"{q.microseconds:.1f}",
            f"{q.gigabytes_per_second:.0f}",
            f"{100 * q.of_copy:.0f}%",
        )
        for q in found.quantizers
    ]
    errors = [(e.kernels, e.result, f"{e.error:.4f}") for e in found.errors]
    layers = [
        (t.kernels, t.size, f"{t.milliseconds:.2f}", f"{t.of_bf16:.2f}") for t in found.layers
    ]
    tilings = [(t.implementation, t.size, t.tiles, f"{t.microseconds:.1f}") for t in found.tilings]
    return "\n\n".join(
        (
            f"{found.card}, {found.versions}, {found.date}.",
            "Bytes that differ from those of plain JAX on the CPU:",
            _table(("quantize", "comparisons", "bytes", "different"), compared),
            "Products against float64, in units of what sums in float32 may be off by:",
            _table(("quantize + scaled_matmul", "result", "error"), errors),
            "Time to quantize; GB/s count each byte of the input and of the results once:",
            _table(("quantize", "of a tensor", "us", "GB/s", "of a copy's"), quantizers),
            "A linear layer, forward and backward:",
            _table(("quantize + scaled_matmul", "size", "ms", "/ bf16"), layers),
            "A product alone, by the tiles of its kernel:",
            _table(("scaled_matmul", "size", "tiles", "us"), tilings),
        )
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> int:
    """Checks, reports, and returns 1 if a byte or a product was wrong."""
    options = tyro.cli(Options, description=__doc__)
    console = Console(stderr=True)
    if compute_capability() is None:
        say("gpu_check needs an NVIDIA GPU and JAX with CUDA (pip install -e '.[cuda13]')", console)
        return 2
    names = [
        [i.name for i in operation if i.unavailable() is None]
        for operation in (registry.QUANTIZE, registry.SCALED_MATMUL)
    ]
    found = check(options, names[0], ["xla", *names[1]], console)
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(found)
    (options.out / "gpu_check.md").write_text(text + "\n", encoding="utf-8")
    results = json.dumps(dataclasses.asdict(found), indent=1)
    (options.out / "gpu_check.json").write_text(results, encoding="utf-8")
    if options.write:
        pages.put("benchmarks.md", "experiments.gpu_check", text)
    Console().print(Markdown(text))
    for name in found.wrong:
        say(f"{name} gave a wrong result", console)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
