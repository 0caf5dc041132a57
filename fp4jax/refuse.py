"""A derivative that must not be taken silently: an error instead of wrong numbers."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

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
