"""One training run: every recipe gets this same schedule, optimizer, order of batches and seeds."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from experiments.data import Corpus

B1, B2 = 0.9, 0.95
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
WARMUP = 0.05  # of all steps
DECAY = 0.2  # of all steps: the last fifth
FINAL_RATE = 0.01  # of the peak learning rate
REPORT_EVERY = 10  # steps


@dataclasses.dataclass(frozen=True)
class Training:
    """How long and on what to train."""

    steps: int = 300
    """Optimizer steps of each run."""
    batch: int = 8
    """Sequences in a step."""
    sequence: int = 256
    """Bytes in a sequence."""
    learning_rate: float = 3e-3
    """Peak of the schedule: 5% warm-up, constant, down to 1% of the peak over the last 20%."""
    evals: int = 10
    """Evaluations along each run, the last one after the last step; at most one a step."""
    validation: int = 64
    """Held-out sequences in an evaluation."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be above zero, not {value}")


class Progress(NamedTuple):
    """Where a run stands.

    Attributes:
      step: steps done.
      train_loss: nats per byte, of the last step's batch before its update; None before any.
      validation_loss: nats per byte, where this was a step to evaluate.
      tokens_per_second: of the training steps so far, without compilation and evaluation.
    """

    step: int
    train_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None


class State(NamedTuple):
    """All that a step changes. `rest` is what the model has besides parameters: random streams."""

    params: nnx.State
    opt_state: optax.OptState
    rest: nnx.State


def train(model: nnx.Module, corpus: Corpus, training: Training, seed: int) -> Iterator[Progress]:
    """Trains `model` on next-byte prediction; yields the progress every few steps.

    The run is a pure function of the arguments: repeated, it gives the same bits. The model's
    arrays are donated to the first step, so the model is not to be used afterwards.

    Args:
      model: maps ids, int32 [batch, length], to logits [batch, length, 256 or more].
      corpus: what to train and evaluate on.
      training: how.
      seed: of the order of batches.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    tx = optimizer(training)
    state = State(params, tx.init(params), rest)
    validation = batches(corpus.validation(training.validation), training.batch)

    # Compiled ahead, so that the clock below sees none of it.
    first = corpus.batch(seed, 0, training.batch)
    step = jax.jit(take_step, static_argnums=(0, 1), donate_argnums=2)
    compiled_step = step.lower(graphdef, tx, state, first).compile()
    evaluation = jax.jit(loss_of, static_argnums=0)
    compiled_loss = evaluation.lower(graphdef, params, rest, validation[0]).compile()

    def evaluate(state: State) -> float:
        losses = [compiled_loss(state.params, state.rest, windows) for windows in validation]
        return float(np.mean(losses))

    yield Progress(0, None, evaluate(state), None)
    done, seconds = 0, 0.0
    for until in _stops(training):
        started = time.perf_counter()
        for i in range(done, until):
            state, loss = compiled_step(state, corpus.batch(seed, i, training.batch))
        train_loss = float(loss)  # waits for the steps to finish
        seconds += time.perf_counter() - started
        done = until
        evaluated = evaluate(state) if done in eval_steps(training) else None
        rate = done * training.batch * training.sequence / seconds
        yield Progress(done, train_loss, evaluated, rate)


def eval_steps(training: Training) -> list[int]:
    """The steps after which a run is evaluated: none, and `evals` times up to the last."""
    evals = min(training.evals, training.steps)
    return [training.steps * i // evals for i in range(evals + 1)]


def phases(training: Training) -> tuple[int, int]:
    """The steps at which the learning rate has reached its peak, and starts to decay."""
    warmup = max(1, round(WARMUP * training.steps))
    return warmup, training.steps - max(1, round(DECAY * training.steps))


def schedule(training: Training) -> optax.Schedule:
    """Learning rate by step: warm-up, stable, decay (WSD).

    The first step already learns: of a warm-up of n steps, step i has (i + 1)/n of the peak.
    """
    peak, (warmup, decay_from) = training.learning_rate, phases(training)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / warmup, peak * (1 + 1 / warmup), warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, FINAL_RATE * peak, training.steps - decay_from),
        ],
        boundaries=[warmup, decay_from],
    )


def optimizer(training: Training) -> optax.GradientTransformation:
    """AdamW by the schedule, gradients clipped by their global norm."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(schedule(training), B1, B2, weight_decay=WEIGHT_DECAY, mask=decayed),
    )


def decayed(params: nnx.State) -> Any:
    """True for the parameters that weight decay reaches: matrices named kernel or embedding."""

    def reached(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        names = {getattr(key, "key", None) for key in path}
        return leaf.ndim == 2 and bool({"kernel", "embedding"} & names)

    return jax.tree_util.tree_map_with_path(reached, params)


def next_byte_loss(model: nnx.Module, windows: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per byte of windows, int32 [batch, length + 1]."""
    logits = model(windows[:, :-1]).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def loss_of(graphdef: Any, params: nnx.State, rest: nnx.State, windows: jax.Array) -> jax.Array:
    """The loss of the model that these parts make."""
    return next_byte_loss(nnx.merge(graphdef, params, rest), windows)


def take_step(
    graphdef: Any, tx: optax.GradientTransformation, state: State, windows: jax.Array
) -> tuple[State, jax.Array]:
    """The state after an optimizer step, and the loss before it."""

    def loss_and_rest(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graphdef, params, state.rest, copy=True)
        loss = next_byte_loss(model, windows)
        # The random streams have moved on: the next step draws other bits.
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state, rest), loss


def batches(windows: np.ndarray, size: int) -> list[np.ndarray]:
    """Cuts windows into batches of one shape, leaving out what does not fill the last."""
    size = min(size, len(windows))
    return [windows[i : i + size] for i in range(0, len(windows) - size + 1, size)]


def _stops(training: Training) -> list[int]:
    """The steps after which a run reports: every few, and all those that it evaluates after."""
    every = range(REPORT_EVERY, training.steps, REPORT_EVERY)
    return sorted({*every, *eval_steps(training)} - {0})
