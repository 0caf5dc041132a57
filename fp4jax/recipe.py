"""Recipe: what each operand of a linear layer's three products is turned into."""

import dataclasses
import math
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from fp4jax.hadamard import Hadamard
from fp4jax.quantizer import Quantizer
from fp4jax.watch import Watch


@dataclasses.dataclass(frozen=True)
class Cast:
    """An operand that is not quantized, only converted to a floating-point dtype.

    Attributes:
      dtype: to convert to.
      hadamard: a transform of the contraction axis before that, to go with a quantized operand
        that is transformed; or None.
      watch: reports non-finite elements (see `fp4jax.checked`); or None.
    """

    dtype: np.dtype[Any]
    hadamard: Hadamard | None = None
    watch: Watch | None = None

    needs_key = False

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be floating, not {dtype}")
        if not isinstance(self.hadamard, Hadamard | None):
            raise TypeError(f"hadamard must be Hadamard(...) or None, not {self.hadamard!r}")
        object.__setattr__(self, "dtype", dtype)


OperandRule = Quantizer | Cast


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The operands of one product; both take the same Hadamard transform, which then cancels.

    Raises:
      ValueError: if only one operand is transformed, or the two transforms differ.
    """

    lhs: OperandRule
    rhs: OperandRule

    def __post_init__(self) -> None:
        if self.lhs.hadamard != self.rhs.hadamard:
            raise ValueError(
                "lhs and rhs must share one Hadamard transform, or the product would change: "
                f"lhs has {self.lhs.hadamard}, rhs has {self.rhs.hadamard}"
            )

    def without_hadamard(self) -> Self:
        """The same product with untransformed operands."""
        return self.with_hadamard(None)

    def with_hadamard(self, hadamard: Hadamard | None) -> Self:
        """The same product with both operands transformed."""
        lhs, rhs = (dataclasses.replace(rule, hadamard=hadamard) for rule in (self.lhs, self.rhs))
        return dataclasses.replace(self, lhs=lhs, rhs=rhs)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The operands of the three products of a linear layer ``y = x w`` (arXiv 2509.25149, fig. 5).

    Attributes:
      name: for tables; not part of comparisons.
      fprop: ``y = x w``, lhs x, rhs w, blocks along the input features.
      dgrad: ``dx = dy w^T``, lhs dy, rhs w, blocks along the output features.
      wgrad: ``dw = x^T dy``, lhs x, rhs dy, blocks along the tokens.
    """

    name: str = dataclasses.field(compare=False)
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm

    @property
    def gemms(self) -> tuple[Gemm, Gemm, Gemm]:
        return self.fprop, self.dgrad, self.wgrad

    @property
    def needs_key(self) -> bool:
        """Whether some operand is rounded stochastically."""
        rules = [rule for gemm in self.gemms for rule in (gemm.lhs, gemm.rhs)]
        return any(rule.needs_key for rule in rules)

    @property
    def weight_block(self) -> tuple[int, int]:
        """What must stay together along K and N of a weight [K, N] to be quantized, or rotated."""
        blocks = [1, 1]
        for rule, axis in ((self.fprop.rhs, -2), (self.dgrad.rhs, -1)):
            if rule.hadamard is not None:
                blocks[axis] = math.lcm(blocks[axis], rule.hadamard.size)
            if isinstance(rule, Quantizer):
                blocks = list(map(math.lcm, blocks, rule.window(axis) or (1, 1)))
        return blocks[0], blocks[1]

    def replace(self, **changes: Any) -> "Recipe":
        """A copy with some fields changed; unless named anew it is called ``NAME*``."""
        return dataclasses.replace(self, **{"name": self.name.rstrip("*") + "*", **changes})
