"""Reports, at run time, that a named tensor holds a NaN or an inf."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Watch:
    """What a tensor is reported as, and to whom.

    Attributes:
      name: of the tensor.
      report: called on the host with the message; None to make the computation fail with it.
    """

    name: str
    report: Callable[[str], None] | None = None

    def look(self, x: Array) -> None:
        """Reports the name and the number of elements if any is not finite.

        Works under every transformation of JAX, jit included; costs a pass over ``x`` and a call to
        the host. A failure is a ``jax.errors.JaxRuntimeError`` that quotes a FloatingPointError.
        """
        shape = x.shape

        def tell(count: int) -> None:
            if count:
                size = math.prod(shape)
                text = f"{self.name}: {count} of {size} elements are not finite, {shape}"
                if self.report is None:
                    raise FloatingPointError(text)
                self.report(text)

        jax.debug.callback(tell, jnp.sum(~jnp.isfinite(x), dtype=jnp.int32))
