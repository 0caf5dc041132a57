"""Which parts of a blocked array can be cut out, and where they lie in its packed arrays."""

import dataclasses
from typing import Any

Index = int | slice


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a blocked array.

    Attributes:
      number: its number, for messages.
      size: its length in elements.
      block: how many elements along it stay together.
    """

    number: int
    size: int
    block: int

    def checked(self, index: Any) -> Index:
        """An integer, or a slice with explicit start and stop, that leaves all blocks whole.

        Raises:
          IndexError: if there is no such index; it says what is allowed.
        """
        if isinstance(index, int):
            if self.block > 1:
                raise IndexError(f"axis {self.number} has blocks of {self.block}: use a slice")
            if not -self.size <= index < self.size:
                raise IndexError(f"index {index} is out of range on axis {self.number}")
            return index
        if not isinstance(index, slice):
            raise IndexError(f"axis {self.number} takes an integer or a slice, not {index!r}")
        start, stop, step = index.indices(self.size)
        whole = start % self.block == 0 and (stop % self.block == 0 or stop == self.size)
        if step != 1 or start >= stop or not whole:
            raise IndexError(
                f"axis {self.number} of length {self.size} takes slices of whole blocks of "
                f"{self.block}, not {index}"
            )
        return slice(start, stop)


def per(index: Index, elements: int) -> Index:
    """An index of elements as one of units of ``elements`` each, the last perhaps not full."""
    if isinstance(index, int):
        return index
    return slice(index.start // elements, -(-index.stop // elements))
