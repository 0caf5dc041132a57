"""Policy: which recipe each linear layer of a model gets, decided by the layers' paths."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Self

import jax
from flax import nnx

from fp4jax.recipe import Recipe
from fp4jax.recipes import bf16, nvfp4

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Policy:
    """One recipe for the linear layers of the middle blocks, BF16 for those of the end blocks.

    A block is what the first number in a layer's path counts (``blocks.3.mixer.in_proj`` is in
    block 3). Layers outside blocks, such as an output head, are left as they are. The paper keeps
    the first 2 and last 8 of 62 blocks in BF16 (arXiv 2509.25149, section 4.1).

    Attributes:
      recipe: for the middle blocks.
      first: how many blocks at the start stay in BF16.
      last: how many at the end.
    """

    recipe: Recipe
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")

    @classmethod
    def keep_ends(cls, first: int = 0, last: int = 0, recipe: Recipe | None = None) -> Self:
        """``recipe`` (by default NVFP4's) for all blocks but the first and last ones."""
        return cls(nvfp4() if recipe is None else recipe, first, last)

    def assign(self, paths: Iterable[Path]) -> dict[Path, Recipe]:
        """The recipe of every layer that gets one.

        Raises:
          ValueError: if no path lies in a block, or no block is left for the recipe.
        """
        block = {path: number for path in paths if (number := _block(path)) is not None}
        if not block:
            raise ValueError("policy reaches no layer: no linear layer's path has a block number")
        count = 1 + max(block.values())
        if self.first + self.last >= count:
            raise ValueError(
                f"first + last must leave a block for the recipe: {self.first} + {self.last} "
                f"of {count} blocks"
            )
        middle = range(self.first, count - self.last)
        return {path: self.recipe if n in middle else bf16() for path, n in block.items()}

    def explain(self, model: nnx.Module) -> str:
        """A table of the model's linear layers: path, parameters, recipe."""
        layers = dict(linear_layers(model))
        recipes = self.assign(layers)
        rows = [("layer", "parameters", "recipe")]
        for path, layer in layers.items():
            name = recipes[path].name if path in recipes else "untouched"
            size = sum(math.prod(leaf.shape) for leaf in _leaves(layer))
            rows.append((".".join(map(str, path)), f"{size:,}", name))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{path:<{widths[0]}}  {size:>{widths[1]}}  {recipe}" for path, size, recipe in rows
        )


def linear_layers(model: nnx.Module) -> Iterator[tuple[Path, nnx.Module]]:
    """The model's layers that multiply by a weight matrix, with their paths, in order."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral | nnx.Einsum):
            yield path, module


def _block(path: Path) -> int | None:
    return next((part for part in path if isinstance(part, int)), None)


def _leaves(layer: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(layer, nnx.Param))
