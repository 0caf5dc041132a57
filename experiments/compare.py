"""Does a recipe lose anything? Models, each trained once per recipe, side by side."""

import dataclasses
import functools
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Self

import jax
import tyro
from flax import nnx
from rich.console import Console

from experiments import options, report, zoo
from experiments.data import DataError
from experiments.optimization import Training, phases
from experiments.pipeline import SEEDS
from experiments.pretrain import INTERRUPTED, UNUSABLE
from experiments.progress import display
from experiments.report import Run
from experiments.saved_bytes import saved_bytes
from experiments.terminal import Markdown, say
from experiments.train import Data
from experiments.zoo import MODELS, RECIPES, Preset
from fp4jax.models import ViTConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains models once per recipe, from the same weights and on the same batches.

    Reports validation loss, its gap to the baseline, speed and memory in an output folder.
    """

    recipes: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{{{','.join(RECIPES)}}} ...")] = (
        "bf16",
        "fp8_block",
        "nvfp4",
    )
    """Recipes to compare."""
    baseline: Annotated[str | None, tyro.conf.arg(metavar="RECIPE")] = None
    """The recipe to compare with; the first of the recipes unless named."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of weights, batches and stochastic rounding; every recipe runs once with each."""
    model: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{{{','.join(MODELS)}}} ...")] = (
        "hybrid",
    )
    """Models to train; each has its own defaults, which --model NAME --help shows."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(help=zoo.DATA)] = ("stdlib",)
    tokenizer: Path | None = None
    """A tokenizers JSON file; without one a token is a byte."""
    out: Path = Path("runs/compare")
    """Folder for results.json, report.md and the figures."""
    config: Path | None = None
    """A TOML or YAML file with any of these options; those on the command line win."""
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)

    @classmethod
    def of(cls, model: str) -> Self:
        """The defaults for a model."""
        preset = MODELS[model]
        return cls(model=(model,), data=preset.data, training=Training(**preset.training))

    @property
    def compared_with(self) -> str:
        """The baseline, also where none is named."""
        return self.baseline or self.recipes[0]

    def __post_init__(self) -> None:
        zoo.check_names("recipe", self.recipes, RECIPES)
        zoo.check_names("model", self.model, MODELS)
        zoo.check_names("baseline", (self.compared_with,), self.recipes)
        different = len(set(self.seeds)) == len(self.seeds) > 0
        if not different or not all(0 <= seed < SEEDS for seed in self.seeds):
            raise ValueError(
                f"seeds must be different numbers from 0 to {SEEDS - 1}, not {self.seeds}"
            )
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder; '{self.out}' is a file")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the comparison that the command line asks for; returns the exit code."""
    args = sys.argv[1:] if args is None else args
    configs = parse(args)
    config, console = next(iter(configs.values())), Console()
    try:  # before anything is compiled
        data = load(configs)
        config.out.mkdir(parents=True, exist_ok=True)
    except (DataError, OSError) as error:
        say(f"error: {error}")
        return UNUSABLE
    runs: list[Run] = []
    exit_code = 0
    try:
        for name, own in configs.items():
            compare(own, name, data[name], runs, console)
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    finally:  # whatever ended the runs, those done are reported
        if runs:
            models = {
                name: described(own, MODELS[name], data[name]) for name, own in configs.items()
            }
            about = dataclasses.asdict(config) | {
                "baseline": config.compared_with,
                "command": shlex.join(["python", "-m", "experiments.compare", *args]),
            }
            results = report.results(about, models, versions(), runs)
            report.write(config.out, results)
            console.print(Markdown(report.summary(results)))
            say(f"Report: {config.out / 'report.md'}", console)
    return exit_code


def parse(args: Sequence[str]) -> dict[str, Config]:
    """By model, the configuration that a command line asks for, by the defaults of that model."""
    args = options.with_file(args)
    names = [name for name in options.values(args, "--model") if name in MODELS] or ["hybrid"]
    cli = functools.partial(tyro.cli, Config, prog="python -m experiments.compare", args=args)
    return {name: cli(default=Config.of(name)) for name in names}


def load(configs: dict[str, Config]) -> dict[str, Data]:
    """By model, what it is trained on.

    Raises:
      DataError: it cannot be read, or the model cannot use it.
    """
    found: dict[str, Data] = {}
    read: dict[tuple[Any, ...], Data] = {}  # the same text once for all models
    for name, config in configs.items():
        preset, sequence = MODELS[name], config.training.sequence
        # Images are checked against the model that sees them.
        key = (preset.sees_images and name, config.data, sequence, config.tokenizer)
        try:
            if key not in read:
                read[key] = zoo.load(preset, config.data, sequence, config.tokenizer)
        except DataError as error:
            raise DataError(f"model {name}: {error}") from error
        found[name] = read[key]
    return found


def compare(config: Config, name: str, data: Data, runs: list[Run], console: Console) -> None:
    """Does the runs of one model, recipes innermost; each is in `runs` from its start."""
    training, several = config.training, len(config.model) > 1
    for seed in config.seeds:
        for recipe in config.recipes:
            run = zoo.make_run(MODELS[name], RECIPES[recipe](), data, training, seed)
            record = Run(
                model=name,
                recipe=recipe,
                seed=seed,
                params=sum(leaf.size for leaf in jax.tree.leaves(run.state.params)),
                saved_bytes_per_linear=mean_saved_bytes(run.model, MODELS[name], training),
                targets_per_step=training.batch * data.targets,
                until=training.steps,
            )
            runs.append(record)
            label = f"{f'{name}, ' if several else ''}{recipe}, seed {seed}"
            per_step = record.targets_per_step
            with display(console, label, training.steps, per_step, data.counted) as show:
                for progress in run.go():
                    record.add(progress)
                    show(progress)
                    if record.status == "diverged":
                        break


def mean_saved_bytes(model: Any, preset: Preset, training: Training) -> float:
    """Bytes that a linear layer under the recipe keeps for its backward pass, mean over all.

    Those of mixtures of experts, which have no fixed number of rows, are left out.
    """
    blocks = list(model.blocks)[preset.keep_first : len(model.blocks) - preset.keep_last]
    linears = [layer for _, layer in nnx.iter_graph(blocks) if isinstance(layer, nnx.Linear)]
    vit = isinstance(model.config, ViTConfig)
    length = model.positions[...].shape[1] if vit else training.sequence
    sizes = [
        saved_bytes(
            layer, jax.ShapeDtypeStruct((training.batch, length, layer.in_features), layer.dtype)
        )
        for layer in linears
    ]
    return sum(sizes) / len(sizes)


def described(config: Config, preset: Preset, data: Data) -> dict[str, Any]:
    """What a model was trained on and how, for the report."""
    return {
        "corpus": {"name": data.name, "bytes": data.nbytes, "sha256": data.sha256},
        "training": dataclasses.asdict(config.training),
        "decay_from": phases(config.training)[1],
        "bf16_blocks": {"first": preset.keep_first, "last": preset.keep_last},
        "unit": data.unit,
        "counted": data.counted,
        "targets": data.targets,
    }


def versions() -> dict[str, str]:
    """What the figures were made with."""
    packages = ("fp4jax", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "grain")
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
