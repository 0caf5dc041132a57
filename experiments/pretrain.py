"""One run that can be killed at any time: the same command goes on where it was.

After a resume the losses are those of a run that was never stopped, bit for bit: the checkpoint
holds all that a step changes, the random streams of stochastic rounding and the position in the
data included.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import jax
import tyro
from flax import nnx
from rich.console import Console
from rich.markdown import Markdown

import fp4jax as fp4
from experiments import data, folder, options, plots, processes, terminal, zoo
from experiments.checkpoint import Checkpoints, NotSavedError
from experiments.mesh import Extents, MeshError, make_mesh, rows_here
from experiments.metrics import Metrics, TensorBoard, read, table
from experiments.optimization import Training, schedule
from experiments.pipeline import SEEDS
from experiments.processes import Processes, ProcessesError
from experiments.progress import display
from experiments.step import all_finite
from experiments.train import Data, Progress, Run
from experiments.zoo import MODELS, RECIPES

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
UNUSABLE = 2  # that of one that was called with something it cannot work with
DIVERGED = 3  # of a run whose numbers went non-finite
NOT_SAVED = 4  # of one that could not write, for lack of space or permission
LOST = 5  # of a process whose run lost another one

# What changes no result, so that a run may go on with other values.
FREE = (
    *("out", "keep", "checkpoint_every", "data", "tokenizer", "config", "tensorboard"),
    *("mesh", "joined"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains one model with one recipe; run again, it goes on after its last checkpoint."""

    model: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(MODELS)}}}")] = "hybrid"
    """Model to train; each has its own defaults, which --model NAME --help shows."""
    recipe: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(RECIPES)}}}")] = "nvfp4"
    """Recipe of the linear layers of all blocks but those kept in BF16."""
    late_bf16: float = 1.0
    """Fraction of the run after which the forward pass runs in BF16; 1 for never."""
    seed: int = 0
    """Seed of weights, batches and stochastic rounding."""
    checkpoint_every: int = 50
    """Steps between checkpoints; there is one at the end, too."""
    keep: int = 3
    """Checkpoints to keep, the newest."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(help=zoo.DATA)] = ("stdlib",)
    tokenizer: Path | None = None
    """A tokenizers JSON file; without one a token is a byte."""
    out: Path = Path("runs/pretrain")
    """Folder for metrics.jsonl, checkpoints, config.json, report.md and loss.png."""
    tensorboard: bool = True
    """Also write the metrics for TensorBoard, to the folder tensorboard in the output folder."""
    config: Path | None = None
    """A TOML or YAML file with any of these options; those on the command line win."""
    mesh: Extents = dataclasses.field(default_factory=Extents)
    joined: tyro.conf.OmitArgPrefixes[Processes] = dataclasses.field(default_factory=Processes)
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)

    @classmethod
    def of(cls, model: str) -> Self:
        """The defaults for a model."""
        preset = MODELS[model]
        return cls(model=model, data=preset.data, training=Training(**preset.training))

    def __post_init__(self) -> None:
        zoo.check_names("model", (self.model,), MODELS)
        zoo.check_names("recipe", (self.recipe,), RECIPES)
        for name in ("checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.late_bf16 <= 1:
            raise ValueError(f"late_bf16 must be above 0 and at most 1, not {self.late_bf16}")
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must be from 0 to {SEEDS - 1}, not {self.seed}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder; '{self.out}' is a file")


class NonFiniteError(Exception):
    """Loss or parameters are not finite; the message says where that began."""


def main(args: Sequence[str] | None = None) -> int:
    """Does the run that the command line asks for, or the rest of it; returns the exit code."""
    config = parse(sys.argv[1:] if args is None else args)
    # Both log long tracebacks of what is raised here as one exception.
    for name in ("absl", "jax._src.debugging"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as claim:
        try:
            found = _start(config, claim)
            return _train_and_report(config, found, Console(quiet=not processes.is_first()))
        except (data.DataError, folder.FolderError, MeshError, ProcessesError) as error:
            return _complain(f"error: {error}", UNUSABLE)
        except (NotSavedError, OSError) as error:
            text = f"stopped: {error}; the same command goes on from there"
            return processes.leave(_complain(text, NOT_SAVED))
        except KeyboardInterrupt:
            return processes.leave(INTERRUPTED)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if (why := processes.why_lost(error)) is None:
                raise
            text = f"stopped: another process of the run has ended ({why}); the same commands go on"
            return processes.leave(_complain(text, LOST))


def _start(config: Config, claim: contextlib.ExitStack) -> Data:
    """Joins the other processes, reads the data and claims the output folder."""
    processes.join(config.joined)
    with processes.starting():
        if config.mesh.devices < config.joined.cpu_devices:
            raise MeshError(
                f"--cpu-devices {config.joined.cpu_devices} are more than the mesh of "
                f"{config.mesh} (data x fsdp x tensor) takes"
            )
        rows_here(make_mesh(config.mesh), config.training.batch, config.training.accumulate)
        found = zoo.load(
            MODELS[config.model], config.data, config.training.sequence, config.tokenizer
        )
        about = described(config, found)
    processes.refuse_differences(about | {"jax": jax.__version__})
    with processes.starting():
        if processes.is_first():
            claim.enter_context(folder.claimed(config.out, about, FREE, config.tokenizer))
    return found


def _train_and_report(config: Config, found: Data, console: Console) -> int:
    try:
        asked = pretrain(config, found, console)
    except NonFiniteError as error:
        if processes.is_first():
            _report(config, found)
        return _complain(f"stopped: {error}", DIVERGED)
    if processes.is_first():
        console.print(Markdown(_report(config, found)))
    if asked is not None:
        console.print("Stopped on request; the same command goes on from here.")
        return INTERRUPTED if asked == signal.SIGINT else 0
    terminal.say(f"Report: {config.out / 'report.md'}", console)
    return 0


def parse(args: Sequence[str]) -> Config:
    """The configuration that a command line asks for, by the defaults of the model it names."""
    args = options.with_file(args)
    named = [name for name in options.values(args, "--model") if name in MODELS]
    default = Config.of(named[0] if named else "hybrid")
    return tyro.cli(Config, prog="python -m experiments.pretrain", args=args, default=default)


def pretrain(config: Config, found: Data, console: Console) -> int | None:
    """Trains to the end, or until the process is asked to stop.

    Returns:
      The signal that asked for it; None at the end.

    Raises:
      NonFiniteError: if the loss or a parameter is not finite any more.
      NotSavedError: if a checkpoint could not be written.
      OSError: if the metrics could not.
    """
    run = make_run(config, found)
    label, per_step = f"{config.model}, {config.recipe}", config.training.batch * found.targets
    say = functools.partial(terminal.say, console=console)
    first = processes.is_first()
    board_wanted = config.tensorboard and first
    with (
        Stop(say) as stop,
        Checkpoints(config.out / "checkpoints", config.keep) as checkpoints,
    ):
        if resume(run, checkpoints, say):
            say(f"going on after step {run.done}")
        with (
            Metrics(config.out / "metrics.jsonl", first, run.done) as metrics,
            TensorBoard(config.out / "tensorboard", board_wanted, run.done) as board,
            display(console, label, run.training.steps, per_step, found.counted) as show,
        ):
            if metrics.missing:
                path = config.out / "metrics.jsonl"
                say(f"{path} lacks {metrics.missing} of the {run.done} steps that are done")
            for progress in run.go(every=config.checkpoint_every, asked=stop.asked):
                lines = _lines(progress, found, run)
                metrics.write(lines)
                board.write(lines)
                show(progress)
                if not _is_finite(progress, run):
                    say(f"not finite after step {run.done}: repeating, to find where it began")
                    raise NonFiniteError(where_it_began(config, found, checkpoints, run.done))
                due = run.done % config.checkpoint_every == 0 or run.done == run.training.steps
                if run.done and (due or stop.asked()):
                    checkpoints.save(run.done, run.state, {"data": run.batches.get_state()})
    return None if run.done == run.training.steps else stop.signal


def make_run(config: Config, found: Data, adapt: Callable[[Any], Any] = lambda model: model) -> Run:
    """The run before its first step."""
    recipe = recipe_of(config.recipe, config.late_bf16, config.training.steps)
    preset = MODELS[config.model]
    mesh = make_mesh(config.mesh)
    return zoo.make_run(preset, recipe, found, config.training, config.seed, adapt, mesh)


def recipe_of(name: str, late_bf16: float, steps: int) -> fp4.Recipe | fp4.Schedule:
    """The recipe, with the forward pass in BF16 after that fraction of the steps."""
    recipe, switch = RECIPES[name](), round(late_bf16 * steps)
    return fp4.Schedule.late_bf16(recipe, switch) if 0 < switch < steps else recipe


def resume(run: Run, checkpoints: Checkpoints, warn: Callable[[str], None]) -> bool:
    """Puts the run where its newest good checkpoint is; whether there is one."""
    restored = checkpoints.restore(run.state, warn)
    if restored is not None:
        run.done, run.state, notes = restored
        run.batches.set_state(notes["data"])
    return restored is not None


def where_it_began(config: Config, found: Data, checkpoints: Checkpoints, until: int) -> str:
    """Repeats the steps after the last good checkpoint, each operand watched."""
    reports: list[str] = []
    run = make_run(config, found, lambda model: _watched(model, reports.append))
    kept = "there is no checkpoint yet"
    if resume(run, checkpoints, lambda text: None):
        kept = f"the checkpoint of step {run.done} is kept"
    for progress in run.go(every=1):
        jax.effects_barrier()
        # One process has been told.
        if processes.largest(len(reports)):
            what = reports[0] if reports else "an operand that process 0 names"
            return f"in step {max(progress.step, 1)}, {what}; {kept}"
        if not _is_finite(progress, run):
            return f"in step {progress.step}, outside the quantized layers; {kept}"
        if progress.step == until:
            break
    return f"at step {until}, but not when it was repeated; {kept}"


def _is_finite(progress: Progress, run: Run) -> bool:
    losses = all(map(math.isfinite, progress.losses))
    return losses and bool(all_finite(run.state.params))


def _watched(model: Any, report: Callable[[str], None]) -> Any:
    """The quantized model with every operand checked and named by its layer."""
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, fp4.nnx.Product):
            name = ".".join(map(str, path[:-1]))
            layer.hook = dataclasses.replace(
                layer.hook, recipe=fp4.checked(layer.hook.recipe, name, report)
            )
    return model


def _lines(progress: Progress, found: Data, run: Run) -> list[dict[str, Any]]:
    """A line of metrics for each step since the last progress."""
    first, rate = progress.step - len(progress.losses), schedule(run.training)
    lines: list[dict[str, Any]] = [
        {"step": i + 1, "loss": loss, "gradient_norm": norm, "learning_rate": float(rate(i))}
        for i, (loss, norm) in enumerate(
            zip(progress.losses, progress.gradient_norms, strict=True), start=first
        )
    ]
    if lines:
        done = len(lines) * run.training.batch * found.targets
        lines[-1][f"{found.counted}_per_second"] = round(done / progress.seconds, 1)
    if lines and progress.evaluation is not None:
        loss, accuracy = progress.evaluation
        lines[-1] |= {"validation_loss": loss, "validation_accuracy": accuracy}
        if found.bytes_per_target:
            lines[-1]["bits_per_byte"] = loss / math.log(2) / found.bytes_per_target
    return lines


class Stop:
    """Notes that the process was asked to stop, by SIGTERM or Ctrl-C, which then do not end it.

    A second Ctrl-C does.

    Args:
      say: tells the user that it was noted.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.signal: int | None = None

    def __enter__(self) -> Self:
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.signal == signal.SIGINT:
                raise KeyboardInterrupt
            self._say("stopping after this step; Ctrl-C again to lose what was not saved")
        self.signal = number

    def asked(self) -> bool:
        """Whether this process was asked to stop, or another one; all must call this together."""
        self.signal = processes.largest(self.signal or 0) or None
        return self.signal is not None


def _complain(text: str, code: int) -> int:
    terminal.say(f"process {jax.process_index()}: {text}" if processes.are_several() else text)
    return code


def described(config: Config, found: Data) -> dict[str, Any]:
    """A run in plain values: what was asked for, and what follows from the data."""
    asked = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    del asked["joined"]  # which is not the same in all processes
    follows = {"data_sha256": found.sha256, "fits": found.fits, "unit": found.unit}
    return asked.pop("training") | asked | follows


def _report(config: Config, found: Data) -> str:
    """Writes report.md and loss.png; returns the table."""
    lines = read(config.out / "metrics.jsonl")
    summary = table(lines)
    plots.training_loss(config.out / "loss.png", lines, found.unit)
    (config.out / "report.md").write_text(
        f"# {config.model}, {config.recipe}: {found.name}\n\n{summary}\n\n![Loss](loss.png)\n\n"
        f"```json\n{json.dumps(described(config, found), indent=2)}\n```\n",
        encoding="utf-8",
    )
    return summary


if __name__ == "__main__":
    sys.exit(main())
