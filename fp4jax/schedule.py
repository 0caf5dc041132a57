"""Schedule: a recipe that changes during training, for the late switch to higher precision."""

import bisect
import dataclasses
import itertools
import operator
from typing import Self

from fp4jax.recipe import Recipe
from fp4jax.recipes import bf16


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Recipes by step, for a `Rule` in place of a recipe.

    A recipe is static: a jitted step is traced anew when the recipe changes, once a phase.

    Attributes:
      phases: pairs of a start and the recipe from there on, the first at 0. A start is a step
        (integer) or a fraction of ``steps`` (float between 0 and 1).
      steps: of the whole training; needed for fractions.

    Raises:
      ValueError: if the starts do not begin at 0 and rise, or a fraction lacks ``steps``.
    """

    phases: tuple[tuple[int | float, Recipe], ...]
    steps: int | None = None

    def __post_init__(self) -> None:
        phases = tuple(
            (start if isinstance(start, float) else operator.index(start), recipe)
            for start, recipe in self.phases
        )
        object.__setattr__(self, "phases", phases)
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        for start, recipe in self.phases:
            if not isinstance(recipe, Recipe):
                raise TypeError(f"phases must hold recipes, not {recipe!r}")
            if isinstance(start, float) and (self.steps is None or not 0 <= start < 1):
                raise ValueError(
                    f"phases: start {start} is a fraction, which must be from 0 to below 1 and "
                    f"needs steps (given: {self.steps}); a step is an integer"
                )
        starts = self.starts
        if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"phases must start at step 0 and rise, not at {list(starts)}")

    @classmethod
    def late_bf16(
        cls,
        recipe: Recipe,
        at: int | float,
        steps: int | None = None,
        *,
        forward: bool = True,
        backward: bool = False,
    ) -> Self:
        """``recipe``, and from ``at`` on BF16 in Fprop, or in Dgrad and Wgrad, or in all three.

        The paper switches shortly before the learning rate decays, at 82% of training; the
        forward pass alone recovers most of the loss (arXiv 2509.25149, section 5.1, appendix D).

        Raises:
          ValueError: if neither pass switches.
        """
        if not forward and not backward:
            raise ValueError("forward or backward must be True: nothing would switch")
        high, passes = bf16(), []
        changed = recipe
        if forward:
            changed = changed.replace(fprop=high.fprop)
            passes.append("forward")
        if backward:
            changed = changed.replace(dgrad=high.dgrad, wgrad=high.wgrad)
            passes.append("backward")
        changed = changed.replace(name=f"{recipe.name}, bf16 {' and '.join(passes)}")
        return cls(((0, recipe), (at, changed)), steps)

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps at which each phase begins."""
        return tuple(
            start if isinstance(start, int) else round(start * (self.steps or 0))
            for start, _ in self.phases
        )

    @property
    def name(self) -> str:
        """For tables: each phase's recipe and start."""
        first, *later = (recipe.name for _, recipe in self.phases)
        changes = [f"{name} from {at}" for name, at in zip(later, self.starts[1:], strict=True)]
        return "; ".join([first, *changes])

    @property
    def needs_key(self) -> bool:
        """Whether any phase draws random bits."""
        return any(recipe.needs_key for _, recipe in self.phases)

    def at(self, step: int) -> Recipe:
        """The recipe of a step, counted from 0."""
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        return self.phases[bisect.bisect_right(self.starts, step) - 1][1]
