"""What devices send each other in a compiled program, read from its HLO."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
}
# At the start of a line; instructions are indented.
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%(?P<name>\S+) \(")
# A type has no word before a parenthesis, so that the first such word is the operation.
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<result>.+?) (?P<op>[a-z][\w-]*?)(?P<end>-update|-done)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)[a-z0-9]*)\[(?P<shape>[\d,]*)\]")
# One computation, or several in braces; control-predecessors have braces, too, but no call.
_CALLED = re.compile(
    r"\b(?P<how>body|condition|calls|to_apply|(?:called|branch)_computations"
    r"|(?:true|false)_computation)=\{?(?P<names>%[^\s,}]+(?:, %[^\s,}]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Moved(NamedTuple):
    """One array that a collective operation leaves on each device.

    Attributes:
      op: such as ``all-gather``.
      dtype: HLO's name of it, such as ``u8``.
      shape: of the result on one device.
      bytes: of that.
      times: how often the operation runs, as it does in a loop.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    times: int = 1


def collectives(hlo: str) -> list[Moved]:
    """The results of all collective operations in ``compiled.as_text()``, in order.

    What a loop or a computation that is called several times does is counted as often as it runs;
    of a conditional all branches are, though a run takes one.

    Raises:
      ValueError: if a loop holds a collective operation and does not state how often it runs, or
        this is no text of a compiled program.
    """
    # What one run of a computation moves. In the text all follow those that they call.
    runs: dict[str, list[Moved]] = {}
    program: list[Moved] | None = None
    current: list[Moved] = []
    for line in hlo.splitlines():
        if computation := _COMPUTATION.match(line):
            current = runs[computation["name"]] = []
            if computation["entry"]:
                program = current
        elif instruction := _INSTRUCTION.match(line):
            # Of an operation in two halves the end has the result. If a start wraps a computation,
            # it calls it; an end that names it again does not.
            if instruction["op"] in _COLLECTIVES:
                current += _results(instruction["op"], instruction["result"])
            elif not instruction["end"] and ("=%" in line or "={%" in line):
                current += _called(instruction["name"], line, runs)
    if program is None:
        raise ValueError("hlo must be the text of a compiled program, and has no ENTRY computation")
    return program


def moved_bytes(moved: Iterable[Moved], op: str) -> dict[str, int]:
    """Bytes of each dtype that operations of this name leave on a device, in all their runs."""
    total: dict[str, int] = {}
    for array in moved:
        if array.op == op:
            total[array.dtype] = total.get(array.dtype, 0) + array.bytes * array.times
    return total


def _results(op: str, types: str) -> Iterator[Moved]:
    for array in _ARRAY.finditer(types):
        shape = tuple(int(n) for n in array["shape"].split(",") if n)
        bits = int(array["bits"] or 8)
        yield Moved(op, array["dtype"], shape, -(-math.prod(shape) * bits // 8))


def _called(name: str, line: str, runs: dict[str, list[Moved]]) -> Iterator[Moved]:
    """What the computations move that the instruction of this name and line calls."""
    for called in _CALLED.finditer(line):
        found = [moved for callee in called["names"].split(", ") for moved in runs[callee[1:]]]
        times = 1
        if found and called["how"] in ("body", "condition"):
            trips = _TRIPS.search(line)
            if trips is None:
                raise ValueError(
                    f"the loop {name} in hlo holds {found[0].op} and does not state how often it "
                    "runs, as one of jax.lax.scan does (known_trip_count)"
                )
            # The condition is also asked where the loop ends.
            times = int(trips[1]) + (called["how"] == "condition")
        yield from (moved._replace(times=moved.times * times) for moved in found)
