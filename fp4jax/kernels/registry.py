"""Which bodies the two operations have beside plain JAX, and which of them runs."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax

from fp4jax.kernels import operands, product
from fp4jax.kernels.device import compute_capability

XLA = "xla"
_INTERPRETED = ":interpret"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A body of an operation for NVIDIA GPUs.

    Attributes:
      name: what it is asked for by.
      module: that holds it; imported when it runs, since backends come and go with JAX.
      majors: of the compute capabilities that it is for.
      refusal: says why it does not take certain arguments, or None.
      interpreted: whether it can run as plain JAX, on any machine, slowly: ``NAME:interpret``.
      newest: whether it needs the interface of Mosaic GPU that came with JAX 0.12.
      proven: of ``majors`` those for which ``python -m experiments.gpu_check`` found the same
        bytes, on a card. On no other is it chosen without being asked for.
    """

    name: str
    module: str
    majors: tuple[int, ...]
    refusal: Callable[..., str | None]
    interpreted: bool = True
    newest: bool = True
    proven: tuple[int, ...] = ()

    def unavailable(self, interpret: bool = False) -> str | None:
        """What it needs that is missing here, in words; None if nothing is."""
        if self.newest and jax.__version_info__ < (0, 12):
            return f"JAX 0.12 or newer, not {jax.__version__}"
        major = _major()
        if interpret or major in self.majors:
            return None
        majors = " or ".join(map(str, self.majors))
        here = f"the GPU here has {major}" if major else "there is no GPU here"
        anywhere = f"; {self.name + _INTERPRETED!r} runs anywhere" if self.interpreted else ""
        return f"a GPU of compute capability {majors}; {here}{anywhere}"


# In the order of preference.
QUANTIZE = (
    Implementation("mosaic", "mosaic_quantize", (9, 10), operands.refusal),
    Implementation("triton", "triton_quantize", (8, 9, 10, 12), operands.refusal, newest=False),
)
SCALED_MATMUL = (
    Implementation("blackwell", "blackwell_matmul", (10,), product.refusal, interpreted=False),
    Implementation(
        "cudnn", "cudnn_matmul", (10,), product.refusal, interpreted=False, newest=False
    ),
    Implementation("hopper", "hopper_matmul", (9,), product.refusal),
)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which implementation each operation runs by.

    None picks, for the platform that a program is compiled for, what is proven there and takes the
    arguments; else plain JAX. A name forces one, and what it cannot do raises.

    Attributes:
      quantize: ``xla``, ``mosaic``, ``triton``, or one of the last two with ``:interpret``.
      scaled_matmul: ``xla``, ``blackwell``, ``cudnn``, ``hopper`` or ``hopper:interpret``.

    Raises:
      ValueError: for another name.
    """

    quantize: str | None = None
    scaled_matmul: str | None = None

    def __post_init__(self) -> None:
        _named(QUANTIZE, self.quantize)
        _named(SCALED_MATMUL, self.scaled_matmul)


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation that will run.

    Attributes:
      implementation: which one.
      interpret: whether as plain JAX.
      forced: whether on every platform; else on GPUs only, and plain JAX elsewhere.
    """

    implementation: Implementation
    interpret: bool
    forced: bool

    @property
    def body(self) -> Any:
        """The module of the kernels."""
        return importlib.import_module(f"fp4jax.kernels.{self.implementation.module}")


def choose(
    operation: tuple[Implementation, ...], name: str | None, *arguments: Any
) -> Choice | None:
    """The implementation for these arguments of an operation; None for plain JAX.

    Raises:
      ValueError: if one is named that does not exist, or cannot run here or with the arguments.
    """

    def refusal(implementation: Implementation) -> str | None:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return "inside jax.shard_map; leave the division to jax.jit"
        return implementation.refusal(*arguments)

    if name is None:
        for implementation in operation:
            # Asked in this order, so that nobody looks for a GPU where it does not matter.
            proven = implementation.proven and _major() in implementation.proven
            if proven and refusal(implementation) is None:
                return Choice(implementation, interpret=False, forced=False)
        return None
    found = _named(operation, name)
    if found is None:
        return None
    interpret = name.endswith(_INTERPRETED)
    if missing := found.unavailable(interpret):
        raise ValueError(f"implementation {name!r} needs {missing}")
    if reason := refusal(found):
        raise ValueError(f"implementation {name!r} does not take these arguments: {reason}")
    return Choice(found, interpret, forced=True)


def _major() -> int:
    """Of the GPU here; 0 without one."""
    return (compute_capability() or (0, 0))[0]


def _named(operation: tuple[Implementation, ...], name: str | None) -> Implementation | None:
    """The implementation of that name; None for None and for plain JAX."""
    if name is None or name == XLA:
        return None
    names = {implementation.name: implementation for implementation in operation}
    names |= {i.name + _INTERPRETED: i for i in operation if i.interpreted}
    if name not in names:
        allowed = ", ".join(map(repr, (XLA, *names)))
        raise ValueError(f"implementation must be None or one of {allowed}, not {name!r}")
    return names[name]
