"""The checked mode: the same numbers, and an error that names the tensor that went non-finite."""

import dataclasses
from collections.abc import Callable
from typing import overload

from fp4jax.formats import Format
from fp4jax.quantizer import Quantizer, as_quantizer
from fp4jax.recipe import Gemm, Recipe
from fp4jax.watch import Watch

Report = Callable[[str], None]


@overload
def checked(what: Recipe, name: str | None = None, report: Report | None = None) -> Recipe: ...
@overload
def checked(
    what: Quantizer | Format, name: str | None = None, report: Report | None = None
) -> Quantizer: ...
def checked(
    what: Recipe | Quantizer | Format, name: str | None = None, report: Report | None = None
) -> Recipe | Quantizer:
    """The same recipe or quantizer, made to fail where an operand holds a NaN or an inf.

    Unchecked, such an element makes its block NaN, which reaches the loss but does not say where
    it came from. Checked, the computation raises ``jax.errors.JaxRuntimeError`` with a message
    such as ``nvfp4.wgrad.rhs: 3 of 4096 elements are not finite``. It costs a pass over each
    operand and a call to the host: for finding a fault, not for every step.

    Args:
      what: a recipe, a quantizer or a format.
      name: to report under; by default the recipe's or the format's.
      report: called with the message in place of failing, by one process if there are several;
        `jax.effects_barrier` waits for it. On a mesh the devices that go on would wait for one
        that has failed.
    """
    if not isinstance(what, Recipe):
        quantizer = as_quantizer(what)
        return dataclasses.replace(quantizer, watch=Watch(name or quantizer.format.name, report))

    def gemm(which: str) -> Gemm:
        operands = getattr(what, which)
        sides = {
            side: dataclasses.replace(
                getattr(operands, side), watch=Watch(f"{name or what.name}.{which}.{side}", report)
            )
            for side in ("lhs", "rhs")
        }
        return dataclasses.replace(operands, **sides)

    return dataclasses.replace(what, fprop=gemm("fprop"), dgrad=gemm("dgrad"), wgrad=gemm("wgrad"))
