"""What devices send each other in a compiled program, read from its HLO."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

# An instruction that moves data: result, then name. Where it is split in two, its second half.
_INSTRUCTION = re.compile(
    r"= (?P<result>.+?) (?P<op>all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|collective-permute|collective-broadcast|ragged-all-to-all)(-done)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)[a-z0-9]*)\[(?P<shape>[\d,]*)\]")


class Moved(NamedTuple):
    """One array that a collective operation leaves on each device.

    Attributes:
      op: such as ``all-gather``.
      dtype: HLO's name of it, such as ``u8``.
      shape: of the result on one device.
      bytes: of that.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def collectives(hlo: str) -> list[Moved]:
    """The results of all collective operations in ``compiled.as_text()``.

    An operation in the body of a loop is listed once, however often the loop runs.
    """
    moved = []
    for instruction in _INSTRUCTION.finditer(hlo):
        for array in _ARRAY.finditer(instruction["result"]):
            shape = tuple(int(n) for n in array["shape"].split(",") if n)
            bits = int(array["bits"] or 8)
            size = -(-math.prod(shape) * bits // 8)
            moved.append(Moved(instruction["op"], array["dtype"], shape, size))
    return moved


def moved_bytes(moved: Iterable[Moved], op: str) -> dict[str, int]:
    """Bytes of each dtype that operations of this name leave on a device."""
    total: dict[str, int] = {}
    for array in moved:
        if array.op == op:
            total[array.dtype] = total.get(array.dtype, 0) + array.bytes
    return total
