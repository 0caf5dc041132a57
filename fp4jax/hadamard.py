"""The random Hadamard transform: spreads an outlier over its group before quantization."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax.rounding import narrowed

# The sign vector that NVIDIA TransformerEngine fixes for size 16 (mask 0xD7E8).
_SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """Multiplication of each group of ``size`` by ``diag(signs) H / sqrt(size)``, orthogonal.

    ``H`` is Sylvester's matrix. Both operands of a product transformed alike along the
    contraction axis leave the product unchanged (arXiv 2509.25149, section 4.2).

    Attributes:
      size: group size, a power of two.
      signs: ``size`` numbers +-1; for size 16 the default is TransformerEngine's vector.

    Raises:
      ValueError: for another size, or signs that are missing or not +-1.
    """

    size: int = 16
    signs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 2 or self.size & (self.size - 1):
            raise ValueError(f"size must be a power of two of at least 2, not {self.size}")
        signs = _SIGNS_16 if not self.signs and self.size == 16 else tuple(self.signs)
        object.__setattr__(self, "signs", signs)
        if len(self.signs) != self.size or any(abs(s) != 1 for s in self.signs):
            raise ValueError(
                f"signs must be {self.size} numbers +1 or -1 (size 16 alone has a default), "
                f"not {self.signs}"
            )

    def __call__(self, x: Array, axis: int, to_bfloat16: bool = False) -> Array:
        """The transform of float32 ``x`` along ``axis``, whose length is a multiple of ``size``.

        Args:
          x: the array.
          axis: to transform along.
          to_bfloat16: round the result, not the sums before it, to bfloat16.
        """
        return self._butterfly(self._flip(x, axis), axis, to_bfloat16)

    def inverse(self, x: Array, axis: int) -> Array:
        """Undoes `__call__` up to float32 rounding."""
        return self._flip(self._butterfly(x, axis, False), axis)

    def _flip(self, x: Array, axis: int) -> Array:
        axis = axis % x.ndim
        signs = np.tile(np.array(self.signs, np.float32), x.shape[axis] // self.size)
        return x * lax.broadcast_in_dim(jnp.asarray(signs), x.shape, (axis,))

    def _butterfly(self, x: Array, axis: int, to_bfloat16: bool) -> Array:
        # A fixed order of additions gives the same bits everywhere, which a matrix product,
        # free to sum in any order, would not; and a NaN never leaves its group.
        axis = axis % x.ndim
        y = x
        stride = 1
        while stride < self.size:
            # Two rounds at a time where two are left: half the passes over memory, same sums.
            radix = min(4, self.size // stride)
            y = y.reshape(*x.shape[:axis], -1, radix, stride, *x.shape[axis + 1 :])
            parts = [lax.index_in_dim(y, i, axis + 1) for i in range(radix)]
            sums = [parts[i] + parts[i + 1] for i in range(0, radix, 2)]
            differences = [parts[i] - parts[i + 1] for i in range(0, radix, 2)]
            if radix == 4:
                sums, differences = (
                    [sums[0] + sums[1], differences[0] + differences[1]],
                    [sums[0] - sums[1], differences[0] - differences[1]],
                )
            parts = [*sums, *differences]
            stride *= radix
            if stride == self.size:
                parts = [part * jnp.float32(1 / math.sqrt(self.size)) for part in parts]
                if to_bfloat16:
                    # Before they are joined, which is when compilers write them to memory. Not
                    # by astype alone, which compilers drop if the way back follows.
                    parts = [
                        narrowed(lax.reduce_precision(part, 8, 7), jnp.dtype(jnp.bfloat16))
                        for part in parts
                    ]
            y = lax.concatenate(parts, axis + 1)
        return y.reshape(x.shape)
