"""What a model is trained for and measured by: the next token of a text, the label of an image."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp4jax.models import MoE

BALANCE_WEIGHT = 0.01  # of the load-balancing loss of mixtures of experts (arXiv:2101.03961)

# int32 windows [batch, length + 1], or float32 images [batch, H, W, C] and int32 labels [batch]
Batch = np.ndarray | tuple[np.ndarray, np.ndarray]


class Measures(NamedTuple):
    """What predictions are worth.

    Attributes:
      loss: mean cross entropy in nats, per token or per image.
      accuracy: fraction of targets that were the most likely one.
    """

    loss: jax.Array | float
    accuracy: jax.Array | float


def measure(model: Any, batch: Any) -> tuple[jax.Array, Measures]:
    """What training lowers, and what is reported.

    They differ for mixtures of experts, where the first has the load-balancing loss in it.
    """
    inputs, targets = (batch[:, :-1], batch[:, 1:]) if not isinstance(batch, tuple) else batch
    if isinstance(model, MoE):
        logits, balance = model.with_balance(inputs)
    else:
        logits, balance = model(inputs), jnp.float32(0)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == targets, dtype=jnp.float32)
    return loss + BALANCE_WEIGHT * balance, Measures(loss, accuracy)
