"""How parameters are updated: learning rate by step, clipping, AdamW."""

import dataclasses
import math
from typing import Any, Literal

import jax
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Training:
    """How long, on how much and by what rule to train. Fractions are of all steps."""

    steps: int = 300
    """Optimizer steps of each run."""
    batch: int = 8
    """Sequences, or images, in a step."""
    sequence: int = 256
    """Tokens in a sequence; by default a token is a byte."""
    accumulate: int = 1
    """Parts of a batch, one after the other, whose gradients are averaged; divides the batch."""
    learning_rate: float = 3e-3
    """Its peak."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """Warm-up, then constant and linear decay (wsd), or half a cosine."""
    warmup: float = 0.05
    """Fraction over which the learning rate rises to its peak."""
    decay: float = 0.2
    """Fraction, the last, over which wsd decays."""
    final_rate: float = 0.01
    """Learning rate at the end, as a fraction of the peak."""
    beta1: float = 0.9
    """Adam's decay of the mean gradient."""
    beta2: float = 0.95
    """Adam's decay of the mean squared gradient."""
    weight_decay: float = 0.1
    """Of matrices; per unit of learning rate."""
    clip_norm: float = 1.0
    """Largest global norm of a gradient."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which devices add up their parts of a quantized kernel's gradient; experts' in float32."""
    ema: float = 0.0
    """Decay per step of an average of the parameters that evaluation uses; 0 for none."""
    evals: int = 10
    """Evaluations along each run, the last one after the last step; at most one a step."""
    validation: int = 64
    """Held-out sequences, or images, in an evaluation."""

    def __post_init__(self) -> None:
        for name in (
            *("steps", "batch", "sequence", "accumulate", "learning_rate", "clip_norm"),
            *("evals", "validation"),
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, not {getattr(self, name)}")
        if math.isinf(self.learning_rate):
            raise ValueError("learning_rate must be finite, not inf")
        for name in ("warmup", "decay", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        for name in ("beta1", "beta2", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, not {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be from 0 up, not {self.weight_decay}")
        for name, allowed in (
            ("schedule", ("wsd", "cosine")),
            ("gradient_dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(allowed)}, not {getattr(self, name)}"
                )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                "warmup and decay must be at most 1 together, or the learning rate never reaches "
                f"its peak; not {self.warmup} and {self.decay}"
            )
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate must divide the batch of {self.batch}: {self.accumulate}")


def phases(training: Training) -> tuple[int, int]:
    """The steps at which the learning rate has reached its peak, and starts to decay."""
    warmup = max(1, round(training.warmup * training.steps))
    if training.schedule == "cosine":
        return warmup, min(warmup, training.steps - 1)
    return warmup, training.steps - max(1, round(training.decay * training.steps))


def schedule(training: Training) -> optax.Schedule:
    """Learning rate by step.

    The first step already learns: of a warm-up of n steps, step i has (i + 1)/n of the peak.
    """
    peak, (warmup, decay_from) = training.learning_rate, phases(training)
    left = training.steps - decay_from
    if training.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, left, training.final_rate)
    else:
        decay = optax.linear_schedule(peak, training.final_rate * peak, left)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / warmup, peak * (1 + 1 / warmup), warmup),
            optax.constant_schedule(peak),
            decay,
        ],
        boundaries=[warmup, decay_from],
    )


def optimizer(training: Training) -> optax.GradientTransformation:
    """AdamW by the schedule, gradients clipped by their global norm."""
    return optax.chain(
        optax.clip_by_global_norm(training.clip_norm),
        optax.adamw(
            schedule(training),
            training.beta1,
            training.beta2,
            weight_decay=training.weight_decay,
            mask=decayed,
        ),
    )


def decayed(params: nnx.State) -> Any:
    """True for the parameters that weight decay reaches, by the names that the models give."""

    def reached(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        return bool({"kernel", "embedding"} & {getattr(key, "key", None) for key in path})

    return jax.tree_util.tree_map_with_path(reached, params)
