"""Gather: a weight that lies in shards along a mesh axis travels quantized to where it multiplies.

In fully sharded data parallelism each device holds a part of every weight and needs all of it for
a product. Left to itself the compiler gathers what the product reads, floats. Here the shards are
quantized where they lie and the packed codes are gathered: with NVFP4 4.5 bits an element instead
of 16 or 32, once in Fprop and once in Dgrad. The bits are those of one device.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from fp4jax.qtensor import QTensor

_Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Gather:
    """How a weight lies on the mesh of `jax.set_mesh`, and the axis over which it is gathered.

    Attributes:
      spec: of the weight as it is given to the product, its gradient and its quantized copies
        between the passes: ``P("fsdp", "tensor")``.
      axis: the mesh axis to gather over; along all others the weight stays in shards.
      gradient_dtype: in which devices add their parts of the weight's gradient, float32 or
        bfloat16. The parts themselves are summed in float32, and so is everything in
        `fp4jax.ragged_dot`, which refuses another dtype. XLA on CPUs adds in float32 all the same.

    Raises:
      ValueError: if ``spec`` does not use the axis, or for another dtype.
    """

    spec: PartitionSpec
    axis: str = "fsdp"
    gradient_dtype: Any = np.float32

    def __post_init__(self) -> None:
        if not isinstance(self.spec, PartitionSpec):
            raise TypeError(f"spec must be a jax.P, not {self.spec!r}")
        if not any(self.axis in _names(entry) for entry in self.spec):
            raise ValueError(f"axis {self.axis!r} is not in {self.spec}: nothing would be gathered")
        object.__setattr__(self, "gradient_dtype", np.dtype(self.gradient_dtype))
        if self.gradient_dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"gradient_dtype must be float32 or bfloat16, not {self.gradient_dtype}"
            )

    def grouped(self, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> "Gather":
        """For the weight with each group of its axes flattened to one axis, in that order.

        Raises:
          ValueError: if shards would be no contiguous part of the flat axis: where one of a group
            is divided, it must be the first (longer than 1).
        """
        entries = [*self.spec, *[None] * (len(shape) - len(self.spec))]
        if len(entries) > len(shape):
            raise ValueError(
                f"{self.spec} has more entries than a weight of shape {shape} has axes"
            )
        flat = []
        for group in groups:
            long = [axis for axis in group if shape[axis] > 1]
            if any(_names(entries[axis]) for axis in group if axis not in long[:1]):
                raise ValueError(
                    f"{self.spec} divides a weight of shape {tuple(shape)} along an axis that a "
                    f"product flattens behind another: of {list(group)} only the first can be"
                )
            flat.append(entries[long[0]] if long else None)
        return dataclasses.replace(self, spec=PartitionSpec(*flat))

    def check(self, shape: Sequence[int], block: Sequence[int]) -> None:
        """Raises ValueError unless every shard of a weight of ``shape`` is whole blocks.

        Args:
          shape: of the weight.
          block: what stays together along each of its axes.
        """
        mesh = jax.sharding.get_abstract_mesh()
        for axis, (size, together, entry) in enumerate(zip(shape, block, self.spec, strict=True)):
            names = _names(entry)
            missing = [name for name in names if name not in mesh.axis_names]
            if missing:
                raise ValueError(
                    f"{self} names {missing}, which the mesh does not have: it has "
                    f"{list(mesh.axis_names)} (jax.set_mesh says which mesh a program runs on)"
                )
            kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
            if any(kinds[name] != AxisType.Auto for name in names):
                raise ValueError(
                    f"{self} needs mesh axes of type Auto, which the compiler may use; "
                    f"the mesh has {kinds}"
                )
            shards = math.prod(mesh.shape[name] for name in names)
            if shards > 1 and size % (shards * together):
                raise ValueError(
                    f"axis {axis} of a weight of shape {tuple(shape)} cannot be gathered as packed "
                    f"codes: {size} elements are no {shards} shards of whole blocks of {together}. "
                    f"Leave that axis of the weight undivided"
                )

    def lay(self, x: Array) -> Array:
        """``x``, of the weight's shape, in the weight's shards."""
        return lax.with_sharding_constraint(x, self.spec)

    def reduce(self, gradient: Array) -> Array:
        """The sum of all devices' parts of the weight's gradient, in the weight's shards.

        Said in two steps, a sum and a choice of shards, which GPUs and TPUs do as one
        reduce-scatter: else the compiler may prefer to move activations.
        """
        return self.lay(lax.with_sharding_constraint(gradient, self._without_axis(self.spec)))

    def travel(self, x: Array) -> Array:
        """``x``, of the weight's shape, from the weight's shards to every device of the axis."""
        return self._travel(x, tuple(self.spec))

    def travel_packed(self, q: QTensor) -> QTensor:
        """The quantized weight, likewise; nothing but its packed arrays moves."""
        # The block axis comes last in all of them.
        entries = list(self.spec)
        entries.append(entries.pop(q.ndim + q.axis))
        return jax.tree.map(lambda leaf: self._travel(leaf, tuple(entries[: leaf.ndim])), q)

    def _travel(self, x: Array, entries: tuple[str | _Names | None, ...]) -> Array:
        # As integers: XLA on CPUs moves 8- and 16-bit floats as wider ones.
        dtype, bits = x.dtype, {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
        if bits is not None:
            x = lax.bitcast_convert_type(x, bits)
        # Both ends are said, or the compiler would be free to gather first and quantize then.
        x = lax.with_sharding_constraint(x, PartitionSpec(*entries))
        x = lax.with_sharding_constraint(x, self._without_axis(entries))
        return x if bits is None else lax.bitcast_convert_type(x, dtype)

    def _without_axis(self, entries: Iterable[str | _Names | None]) -> PartitionSpec:
        kept = (tuple(n for n in _names(entry) if n != self.axis) for entry in entries)
        return PartitionSpec(*(names or None for names in kept))


def _names(entry: str | _Names | None) -> _Names:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
