"""What can be trained, by name: the model's shape, its data, and how it is trained unless told."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

import fp4jax as fp4
from experiments import data, images, travel
from experiments.data import Corpus
from experiments.images import Images
from experiments.mesh import make_mesh
from experiments.optimization import Training
from experiments.train import Run
from fp4jax.models import (
    Hybrid,
    HybridConfig,
    MoE,
    MoEConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

RECIPES: dict[str, Callable[[], fp4.Recipe]] = {
    "bf16": fp4.recipes.bf16,
    "fp8_tensor": fp4.recipes.fp8_tensor,
    "fp8_block": fp4.recipes.fp8_block,
    "mxfp8": fp4.recipes.mxfp8,
    "mxfp4": fp4.recipes.mxfp4,
    "nvfp4": fp4.recipes.nvfp4,
}

_CLASSES = {HybridConfig: Hybrid, MoEConfig: MoE, TransformerConfig: Transformer, ViTConfig: ViT}


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model to train.

    Attributes:
      config: the model's shape; vocabulary, or size and classes of images, follow the data.
      keep_first: how many of the first blocks keep their linear layers in BF16 by any recipe.
      keep_last: how many of the last ones do.
      data: what it is trained on unless told.
      training: fields of ``Training`` that differ from its defaults.
    """

    config: Any
    keep_first: int = 0
    keep_last: int = 1
    data: tuple[str, ...] = ("stdlib",)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def sees_images(self) -> bool:
        """Whether it is trained on images with labels, not on text."""
        return isinstance(self.config, ViTConfig)


# Of the tiny hybrid's 7 blocks the last stays in BF16: 14%, where the paper's 8B and 12B models
# keep 15% and 16%.
_HYBRID = Preset(HybridConfig.tiny())
_MAMBA = dataclasses.replace(HybridConfig.tiny(), pattern="MMMMMM")

MODELS: dict[str, Preset] = {
    "hybrid": _HYBRID,
    "transformer": Preset(TransformerConfig.tiny()),
    "mamba": Preset(_MAMBA),
    "moe": Preset(MoEConfig.tiny()),
    "vit": Preset(
        ViTConfig.tiny(),
        data=("digits",),
        # All held-out images: a model that has learned the others by heart is wrong about few.
        training={"batch": 64, "learning_rate": 1e-3, "validation": 360},
    ),
    "hybrid_m30": Preset(HybridConfig.m30(), keep_last=2),
    "hybrid_m100": Preset(HybridConfig.m100(), keep_last=2),
    "transformer_m30": Preset(TransformerConfig.m30()),
    "transformer_m100": Preset(TransformerConfig.m100()),
    # The paper's own, for many devices. Of the 1.2B it kept other blocks in turn; so it converges.
    "transformer_1_2b": Preset(TransformerConfig.paper_1_2b(), keep_last=4),
    "hybrid_8b": Preset(HybridConfig.paper_8b(), keep_last=8),
    "hybrid_12b": Preset(HybridConfig.paper_12b(), keep_first=2, keep_last=8),
    "tiny": _HYBRID,  # the hybrid's name before there were others
}


# Of the programs' option; no docstring there, whose line breaks the help would keep.
DATA = (
    "Text to train on: stdlib (Python's own source), sotu (speeches, fetched with npm), or text, "
    "JSONL and Parquet files, folders and globs, or .npy arrays of tokens; for images: digits, or "
    "an .npz file. Without it each model has its own."
)


def load(
    preset: Preset, paths: Sequence[str], sequence: int, tokenizer: Path | None = None
) -> Corpus | Images:
    """The data of the kind that the model sees.

    Raises:
      DataError: it cannot be read or used.
    """
    if not preset.sees_images:
        for path in paths:
            if path == images.DIGITS or path.lower().endswith(images.ENDING):
                raise data.DataError(f"'{path}' is a set of images, which --model vit takes")
        return data.load(paths, sequence, tokenizer)
    if tokenizer is not None:
        raise data.DataError(f"images have no tokens: leave out the tokenizer '{tokenizer}'")
    found = images.load(paths)
    try:
        _fitted(preset.config, found.fits)
    except ValueError as error:
        raise data.DataError(f"the images of {found.name} do not fit the model: {error}") from error
    return found


def plain_model(preset: Preset, fits: Mapping[str, int], seed: int) -> Any:
    """The model without quantization.

    Args:
      preset: the model.
      fits: what its configuration takes from the data.
      seed: of the parameters.
    """
    config = _fitted(preset.config, fits)
    return _CLASSES[type(config)](config, rngs=nnx.Rngs(seed))


def make_model(
    preset: Preset,
    fits: Mapping[str, int],
    recipe: fp4.Recipe | fp4.Schedule,
    seed: int,
    step: int = 0,
    mesh: Mesh | None = None,
    gradient_dtype: str = "float32",
) -> Any:
    """The model with the recipe in the linear layers of all blocks but those kept in BF16.

    Args:
      preset: the model.
      fits: what its configuration takes from the data.
      recipe: of the step, where it changes.
      seed: of parameters and stochastic rounding.
      step: of training, from 0.
      mesh: on which its weights will lie, if one is in use.
      gradient_dtype: in which devices add their parts of a quantized kernel's gradient.
    """
    model, rngs = plain_model(preset, fits, seed), nnx.Rngs(quantize=seed)
    gather = None
    if mesh is not None:
        now = recipe.at(step) if isinstance(recipe, fp4.Schedule) else recipe
        gather = travel.quantized(now, mesh, gradient_dtype)
    fp4.nnx.quantize_model(model, _policy(preset, recipe), rngs=rngs, step=step, gather=gather)
    return model if mesh is None else travel.rest_as_multiplied(model, mesh)


def _fitted(config: Any, fits: Mapping[str, int]) -> Any:
    if isinstance(config, MoEConfig):
        return dataclasses.replace(config, transformer=_fitted(config.transformer, fits))
    return dataclasses.replace(config, **fits)


def _policy(preset: Preset, recipe: fp4.Recipe | fp4.Schedule) -> fp4.Policy:
    return fp4.Policy.keep_ends(preset.keep_first, preset.keep_last, recipe)


def make_run(
    preset: Preset,
    recipe: fp4.Recipe | fp4.Schedule,
    found: Corpus | Images,
    training: Training,
    seed: int,
    adapt: Callable[[Any], Any] = lambda model: model,
    mesh: Mesh | None = None,
) -> Run:
    """A run before its first step.

    Args:
      preset: the model.
      recipe: of the linear layers in all blocks but those kept in BF16.
      found: what to train on.
      training: how.
      seed: of weights, batches and stochastic rounding.
      adapt: changes the quantized model, but not its parameters and random streams.
      mesh: of the devices to run on; one device unless given.

    Raises:
      MeshError: a batch cannot be divided among the devices.
    """
    mesh = make_mesh() if mesh is None else mesh

    def model_at(step: int) -> Any:
        dtype = training.gradient_dtype
        return adapt(make_model(preset, found.fits, recipe, seed, step, mesh, dtype))

    return Run(model_at, _policy(preset, recipe).starts, found, training, seed, mesh)


def check_names(what: str, names: Sequence[str], allowed: Collection[str]) -> None:
    """Raises ValueError unless the names are some of those allowed, none twice."""
    for name in names:
        if name not in allowed:
            raise ValueError(f"unknown {what} '{name}'; allowed: {', '.join(allowed)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"name each {what} once; got {list(names)} of {', '.join(allowed)}")
