"""Kernels in programs that are divided among devices: each device runs its part by itself.

To the compiler a kernel is opaque. Here it learns which axes of arguments and results go together,
so that what lies in shards is not gathered first.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

# For each axis of an array the name of what it counts, or None if it must stay whole. Axes of one
# name are divided alike; their lengths may differ.
Axes = tuple[str | None, ...]


def divided(
    function: Callable[..., Sequence[Array]],
    arguments: Sequence[Axes],
    results: Sequence[Axes],
    whole: bool = False,
) -> Callable[..., tuple[Array, ...]]:
    """``function``, run by each device on its shards; under vmap once for each entry.

    Args:
      function: from arrays to a tuple of arrays. From its arguments' i-th parts along the axes of
        a name it must compute its results' i-th parts, whatever the number of parts.
      arguments: each one's axes.
      results: each one's axes.
      whole: whether it runs undivided after all, since it has side effects.
    """

    def run(*arrays: Array) -> tuple[Array, ...]:
        return tuple(function(*arrays))

    def partition(mesh: Any, given: Any, wanted: Any) -> Any:
        arrays = list(zip((*arguments, *results), (*given, *wanted), strict=True))
        mesh_axes = _mesh_axes(mesh, arrays)

        def sharding(axes: Axes) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(mesh_axes.get(name) for name in axes)))

        return mesh, run, tuple(map(sharding, results)), tuple(map(sharding, arguments))

    if whole:
        return jax.custom_batching.sequential_vmap(run)
    partitioned = custom_partitioning(run)
    partitioned.def_partition(partition, sharding_rule=_rule(arguments, results))
    return jax.custom_batching.sequential_vmap(partitioned)


def _rule(arguments: Sequence[Axes], results: Sequence[Axes]) -> str:
    """The axes in the notation of the partitioner, where every axis has a name."""
    count = iter(range(1000))
    described = [
        [" ".join(name or f"whole{next(count)}" for name in axes) for axes in group]
        for group in (arguments, results)
    ]
    return " -> ".join(", ".join(group) for group in described)


def _mesh_axes(mesh: Any, arrays: list[tuple[Axes, Any]]) -> dict[str | None, Any]:
    """Which axes of the mesh divide what counts under a name: those that the compiler proposes.

    None, where that would not give equal parts or the mesh axes divide something else already.
    """
    chosen: dict[str | None, Any] = {}
    taken: set[str] = set()
    for axes, array in arrays:
        for name, proposed in zip(axes, array.sharding.spec, strict=False):
            if name is None or name in chosen or proposed is None:
                continue
            names = (proposed,) if isinstance(proposed, str) else tuple(proposed)
            parts = math.prod(mesh.shape[axis] for axis in names)
            lengths = [
                length
                for axes_, array_ in arrays
                for name_, length in zip(axes_, array_.shape, strict=True)
                if name_ == name
            ]
            if not taken & set(names) and all(length % parts == 0 for length in lengths):
                chosen[name] = proposed
                taken |= set(names)
    return chosen
