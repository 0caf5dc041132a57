"""What must not be tried silently: an error that says what to do instead."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array

F = TypeVar("F", bound=Callable[..., Any])


def refuse_derivative(message: str, static: int) -> Callable[[F], F]:
    """Makes differentiating the decorated function raise ``NotImplementedError(message)``.

    Args:
      message: says what to do instead.
      static: how many leading arguments are not arrays.
    """

    def decorate(function: F) -> F:
        guarded = jax.custom_jvp(function, nondiff_argnums=tuple(range(static)))

        @guarded.defjvp
        def _(*args: Any) -> Any:
            raise NotImplementedError(message)

        return guarded  # type: ignore[return-value]

    return decorate


def refuse_explicit(**arrays: Array) -> None:
    """Raises ValueError if an array is divided along mesh axes of type Explicit.

    There every reshape has to say where its result lies; the work in blocks leaves that to the
    compiler.
    """
    for name, array in arrays.items():
        if any(jax.typeof(array).sharding.spec):
            raise ValueError(
                f"{name} is {jax.typeof(array)}, divided along mesh axes of type Explicit; make "
                "the mesh with axis_types=(jax.sharding.AxisType.Auto, ...), or call this inside "
                "jax.sharding.auto_axes"
            )
