"""Policy: which recipe each layer of a model gets, by ordered rules over the layers' paths."""

import dataclasses
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

from flax import linen, nnx

from fp4jax.layers import Layer, Path, linen_layers, nnx_layers
from fp4jax.recipe import Recipe
from fp4jax.recipes import bf16, nvfp4
from fp4jax.schedule import Schedule

Choice = Recipe | Schedule | None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Selects the layers of a model's repeated blocks: all, or those of its first and last ones.

    A block is what the first number in a layer's path counts: an element of a list
    (``blocks.3.mixer.in_proj`` is in block 3 of ``blocks``) or a module around the layer whose
    name ends in an underscore and a number (``Block_3.Dense_0`` is in block 3 of ``Block``). Other
    layers, such as an output head, are in none. Where a model has several such stacks, first and
    last count in each.

    Attributes:
      first: how many blocks at the start: a number, or a fraction of the stack below 1; None with
        ``last`` None for all blocks.
      last: how many at the end.
    """

    first: int | float | None = None
    last: int | float | None = None

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = getattr(self, name)
            if value is not None:  # NumPy's numbers as Python's
                value = float(value) if isinstance(value, float) else operator.index(value)
                object.__setattr__(self, name, value)
            if value is not None and not 0 <= value < (1 if isinstance(value, float) else math.inf):
                raise ValueError(
                    f"{name} must be a number of blocks from 0 up, or a float below 1 for a "
                    f"fraction, not {value}"
                )

    def select(self, layers: Sequence[Layer]) -> set[Path]:
        """The paths of the layers in such blocks."""
        stacks: dict[Path, set[int]] = {}
        for layer in layers:
            if (block := _block(layer.path)) is not None:
                stacks.setdefault(block[0], set()).add(block[1])
        chosen: set[tuple[Path, int]] = set()
        for stack, numbers in stacks.items():
            order = sorted(numbers)
            if self.first is None and self.last is None:
                picked = order
            else:
                first, last = (_count(n or 0, len(order)) for n in (self.first, self.last))
                picked = order[:first] + order[len(order) - min(last, len(order)) :]
            chosen |= {(stack, number) for number in picked}
        return {layer.path for layer in layers if _block(layer.path) in chosen}

    def __str__(self) -> str:
        if self.first is None and self.last is None:
            return "all blocks"
        ends = [("first", self.first), ("last", self.last)]
        return ", ".join(f"{name} {n} blocks" for name, n in ends if n)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A choice of layers, and what they get.

    Attributes:
      where: `Blocks`; or a pattern for dotted paths, in which ``*`` stands for anything, dots
        included (``*.mlp.*``); or a function of a `Layer`.
      recipe: a `Recipe`, a `Schedule`, or None to leave the layers as they are.
      convolutions: whether convolutions are meant too.
    """

    where: Blocks | str | Callable[[Layer], bool]
    recipe: Choice
    convolutions: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.where, Blocks | str) and not callable(self.where):
            raise TypeError(f"where must be Blocks, a pattern or a function, not {self.where!r}")
        if not isinstance(self.recipe, Choice):
            raise TypeError(f"recipe must be a Recipe, a Schedule or None, not {self.recipe!r}")

    def select(self, layers: Sequence[Layer]) -> set[Path]:
        """The paths of the layers that the rule matches."""
        candidates = [layer for layer in layers if self.convolutions or not layer.convolution]
        if isinstance(self.where, Blocks):
            return self.where.select(candidates)
        if isinstance(self.where, str):
            pattern = self.where
            return {a.path for a in candidates if fnmatch.fnmatchcase(a.name, pattern)}
        return {layer.path for layer in candidates if self.where(layer)}

    def __str__(self) -> str:
        where = self.where
        named = getattr(where, "__name__", str(where)) if callable(where) else str(where)
        return f"{named!r} -> {_name(self.recipe)}"


@dataclasses.dataclass(frozen=True)
class Policy:
    """Ordered rules; a layer gets what the first rule that matches it says.

    Layers that no rule matches stay as they are. Embeddings and norms have no product with a
    kernel and are never touched; convolutions are only where a rule asks for them.

    Attributes:
      rules: the rules.
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"rules must be a sequence of Rule, not of {rule!r}")

    @classmethod
    def keep_ends(
        cls, first: int | float = 0, last: int | float = 0, recipe: Recipe | Schedule | None = None
    ) -> Self:
        """``recipe`` (by default NVFP4's) for all blocks, but BF16 for the first and last ones.

        The paper keeps the first 2 and last 8 of 62 blocks in BF16 (arXiv 2509.25149, section 4.1).

        Args:
          first: how many blocks at the start, or what fraction, as in `Blocks`.
          last: how many at the end.
          recipe: for the blocks between.
        """
        middle = Rule(Blocks(), nvfp4() if recipe is None else recipe)
        ends = Blocks(first, last)
        return cls((Rule(ends, bf16()), middle) if first or last else (middle,))

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps, 0 first, at which some rule's recipe changes."""
        schedules = [rule.recipe for rule in self.rules if isinstance(rule.recipe, Schedule)]
        return tuple(sorted({0, *(start for schedule in schedules for start in schedule.starts)}))

    def assign(self, layers: Sequence[Layer]) -> dict[Path, Recipe | Schedule]:
        """What every layer that is to be quantized gets.

        Raises:
          ValueError: if a rule matches no layer, or only layers that earlier rules match too.
        """
        chosen: dict[Path, Choice] = {}
        for rule in self.rules:
            matched = rule.select(layers)
            fresh = [layer.path for layer in layers if layer.path in matched - chosen.keys()]
            if not fresh:
                if matched:
                    why = "an earlier rule has taken all layers that it matches"
                elif dataclasses.replace(rule, convolutions=True).select(layers):
                    why = "it matches only convolutions, which it must ask for (convolutions=True)"
                else:
                    why = "it matches none"
                names = ", ".join(layer.name for layer in layers) or "none"
                raise ValueError(
                    f"rule {rule} reaches no layer: {why}; the model's layers are: {names}"
                )
            chosen.update(dict.fromkeys(fresh, rule.recipe))
        return {path: choice for path, choice in chosen.items() if choice is not None}

    def explain(self, model: Any, *args: Any, **kwargs: Any) -> "Table":
        """A table of the model's layers: path, parameters, recipe.

        Args:
          model: an NNX model, or a Linen model with example inputs.
          *args: inputs of a Linen model, arrays or `jax.ShapeDtypeStruct`; it is only traced.
          **kwargs: likewise.
        """
        layers = layers_of(model, args, kwargs)
        chosen = self.assign(layers)
        rows = [("layer", "kernel", "parameters", "recipe")]
        for layer in layers:
            shape = "x".join(map(str, layer.shape))
            name = _name(chosen.get(layer.path))
            rows.append((layer.name, shape, f"{layer.parameters:,}", name))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return Table(
            "\n".join(
                f"{path:<{widths[0]}}  {shape:<{widths[1]}}  {size:>{widths[2]}}  {recipe}"
                for path, shape, size, recipe in rows
            )
        )


class Table(str):
    """A text that consoles and notebooks show as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def layers_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layer]:
    """The layers of an NNX model, or of a Linen model with example inputs.

    Raises:
      TypeError: if ``model`` is neither, or inputs are given for an NNX model.
    """
    if isinstance(model, linen.Module):
        return linen_layers(model, args, kwargs)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be a Flax NNX or Linen model, not {type(model).__name__}")
    if args or kwargs:
        raise TypeError("an NNX model needs no example inputs")
    return nnx_layers(model)


def _block(path: Path) -> tuple[Path, int] | None:
    """The stack that a layer is in and the number of its block."""
    for depth, part in enumerate(path):
        if isinstance(part, int):
            return path[:depth], part
        if depth < len(path) - 1 and (numbered := re.fullmatch(r"(.+)_(\d+)", part)):
            return (*path[:depth], numbered[1]), int(numbered[2])
    return None


def _count(n: int | float, of: int) -> int:
    return n if isinstance(n, int) else round(n * of)


def _name(choice: Choice) -> str:
    return "untouched" if choice is None else choice.name
