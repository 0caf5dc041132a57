"""What a scaled matmul kernel is given: an operand as it lies in memory."""

from typing import NamedTuple

from jax import Array


class Packed(NamedTuple):
    """An NVFP4 matrix, contracted over its last axis, of length K.

    Attributes:
      codes: uint8 [rows, K/2], the even index in the low nibble.
      scales: float8_e4m3fn [rows, K/16].
      tensor: float32 scalar, multiplies the result.
    """

    codes: Array
    scales: Array
    tensor: Array
