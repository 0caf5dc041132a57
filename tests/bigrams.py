"""The smallest language models, whose losses and gradients NumPy says in a few lines."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import data
from experiments.optimization import Training
from experiments.train import Run

SHORT = Training(steps=12, batch=2, sequence=16, evals=3, validation=4, learning_rate=0.1)
VOCABULARY = 32


class Bigram(nnx.Module):
    """The smallest language model: logits of the next token from the last one.

    Args:
      scale: multiplies the logits; stands for a recipe.
      noise: is added to them, fresh with every call.
      traced: called whenever the model is traced.
    """

    def __init__(self, scale: float = 1.0, noise: float = 0.0, traced=lambda: None):
        self.table = nnx.Embed(VOCABULARY, VOCABULARY, rngs=nnx.Rngs(0))
        self.rngs = nnx.Rngs(noise=0)
        self.scale, self.noise, self.traced = scale, noise, traced

    def __call__(self, tokens):
        self.traced()
        logits = self.scale * self.table(tokens)
        return logits + self.noise * jax.random.normal(self.rngs.noise(), logits.shape)


class Counting(nnx.Module):
    """A logit that says how often the model was called; the parameter does nothing."""

    def __init__(self):
        self.nothing = nnx.Param(jnp.zeros(()))
        self.calls = nnx.Variable(jnp.float32(0))

    def __call__(self, tokens):
        logits = jnp.zeros((*tokens.shape, VOCABULARY)).at[..., 1].set(self.calls[...])
        self.calls[...] += 1
        return logits + jnp.broadcast_to(self.nothing[...], logits.shape)

    @staticmethod
    def loss(calls: int) -> float:
        """Of texts of nothing but token 1."""
        return math.log(math.exp(calls) + VOCABULARY - 1) - calls


def corpus(tmp_path, tokens) -> data.Corpus:
    """A corpus of given tokens."""
    np.save(tmp_path / "tokens.npy", np.asarray(tokens, np.uint8))
    return data.load([str(tmp_path / "tokens.npy")], SHORT.sequence)


def rising(tmp_path) -> data.Corpus:
    """Tokens that rise by 1 or by 3."""
    rises = np.random.default_rng(0).choice([1, 3], 3000)
    return corpus(tmp_path, np.cumsum(rises) % VOCABULARY)


def fresh(found, training=SHORT, seed=0, starts=(0,), scales=(1.0,), **model) -> Run:
    """A run of a bigram model that has another scale from each start on."""

    def model_at(step):
        return Bigram(scales[sum(start <= step for start in starts) - 1], **model)

    return Run(model_at, starts, found, training, seed)


def table_of(params) -> np.ndarray:
    """A copy of a bigram model's only parameter."""
    (table,) = jax.tree.leaves(params)
    return np.array(table, np.float64)


def worth(table, windows, scale=1.0) -> tuple[float, float, np.ndarray]:
    """A bigram model's loss, accuracy and gradient, in float64."""
    inputs, targets = windows[:, :-1].reshape(-1), windows[:, 1:].reshape(-1)
    logits = scale * table[inputs]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.arange(len(targets)), targets
    loss, accuracy = -np.log(p[picked]).mean(), (logits.argmax(-1) == targets).mean()
    p[picked] -= 1
    gradient = np.zeros_like(table)
    np.add.at(gradient, inputs, scale * p / len(targets))
    return loss, accuracy, gradient


def bits(state) -> list[bytes]:
    """Of all arrays in a state of training, random keys included."""
    leaves = jax.tree.leaves(state)
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()
        for leaf, key in zip(leaves, keys, strict=True)
    ]
