"""Text from a checkpoint of a run, token by token."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from experiments import folder, tokens, zoo
from experiments.checkpoint import Checkpoints
from experiments.optimization import Training
from experiments.pipeline import SEEDS
from experiments.pretrain import UNUSABLE, recipe_of
from experiments.step import first_state
from experiments.terminal import say


@dataclasses.dataclass(frozen=True)
class Options:
    """Lets the newest checkpoint of a run write on from a prompt."""

    run: Path = Path("runs/pretrain")
    """Output folder of experiments.pretrain."""
    prompt: str = "import "
    """What the text begins with."""
    tokens: int = 256
    """How many tokens to add."""
    tokenizer: Path | None = None
    """A tokenizers JSON file, for a run on arrays of tokens; other runs have their own."""
    temperature: float = 0.8
    """Above 1 for more surprising text, below for less; 0 takes the most likely token."""
    seed: int = 0
    """Seed of the choices."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, not {self.tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be from 0 up, not {self.temperature}")
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must be from 0 to {SEEDS - 1}, not {self.seed}")


COLD = 1e-6  # a temperature below which the most likely token is all that is left


class NoSampleError(Exception):
    """The run has nothing to sample from; the message says why."""


def main(args: Sequence[str] | None = None) -> int:
    """Prints what the command line asks for; returns the exit code."""
    asked = tyro.cli(Options, prog="python -m experiments.sample", args=args)
    try:
        model, vocabulary, window = load(asked.run, asked.tokenizer)
        prompt = vocabulary.encode([asked.prompt.encode()])
        if not len(prompt):
            raise NoSampleError(
                f"the run's tokenizer makes no tokens of the prompt '{asked.prompt}'"
            )
    except (NoSampleError, folder.FolderError, tokens.DataError) as error:
        say(f"error: {error}")
        return UNUSABLE
    written = sample(
        model, prompt, asked.tokens, window, vocabulary.vocab_size, asked.temperature, asked.seed
    )
    print(vocabulary.decode(written))
    return 0


def load(path: Path, named: Path | None = None) -> tuple[Any, tokens.Tokens, int]:
    """The model of a run's newest good checkpoint, its tokens, and the length it was trained on.

    It runs by the recipe of the last step, with the averaged parameters where there are some.

    Args:
      path: the run's folder.
      named: a tokenizer's file, for a run that has none.

    Raises:
      NoSampleError: there is no checkpoint, or no tokenizer, or a model of images.
      FolderError: there is no such run.
      DataError: the tokenizer cannot be read.
    """
    described = folder.read(path)
    training = Training(**{f.name: described[f.name] for f in dataclasses.fields(Training)})
    preset = zoo.MODELS[described["model"]]
    if preset.sees_images:
        raise NoSampleError(f"the model '{described['model']}' sees images and writes no text")
    tokenizer = path / "tokenizer.json" if described["tokenizer"] else named
    if tokenizer is None and described["unit"] != "byte":
        raise NoSampleError(f"'{path}' was trained on tokens as they were: name their tokenizer")
    recipe = recipe_of(described["recipe"], described["late_bf16"], training.steps)

    def model_at(step: int) -> Any:
        return zoo.make_model(preset, described["fits"], recipe, described["seed"], step)

    found = None
    if (path / "checkpoints").is_dir():
        # The run may be going on.
        with Checkpoints(path / "checkpoints", described["keep"], owner=False) as checkpoints:
            found = checkpoints.restore(first_state(model_at(0), training), say)
    if found is None:
        raise NoSampleError(f"'{path}' has no checkpoint yet")
    step, state, _ = found
    model = model_at(step - 1)
    nnx.update(model, state.measured, state.rest)
    return model, tokens.load(tokenizer), training.sequence


def sample(
    model: Any,
    prompt: np.ndarray,
    count: int,
    window: int,
    vocab_size: int,
    temperature: float,
    seed: int,
) -> np.ndarray:
    """The prompt and ``count`` tokens that the model adds to it.

    Args:
      model: gives logits, float32 [batch, length, vocabulary], of tokens, int32 [batch, length].
      prompt: integers [n], at least one.
      count: tokens to add.
      window: how many of the last tokens the model sees. There always are so many, zeros after the
        text where it is shorter, so that one program serves all lengths.
      vocab_size: tokens are below it, whatever the model has logits for.
      temperature: divides the logits; 0 for the most likely token.
      seed: of the choices.
    """
    graphdef, state = nnx.split(model)

    @jax.jit
    def choose(seen: jax.Array, last: jax.Array, number: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state, copy=True)(seen[None])[0, last, :vocab_size]
        if temperature < COLD:
            return jnp.argmax(logits)
        key = jax.random.fold_in(jax.random.key(seed), number)
        return jax.random.categorical(key, (logits - jnp.max(logits)) / temperature)

    text = np.concatenate([prompt, np.zeros(count, prompt.dtype)]).astype(np.int32)
    for end in range(len(prompt), len(text)):
        seen = text[max(0, end - window) : end]
        padded = np.pad(seen, (0, window - len(seen)))
        text[end] = choose(padded, len(seen) - 1, end)
    return text


if __name__ == "__main__":
    sys.exit(main())
