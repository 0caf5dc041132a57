"""Inside `jax.shard_map`: arrays that meet in a product vary over the same axes of the mesh.

JAX does this by itself for its own operations. A custom derivative has to do it beforehand, so
that what is the same on all devices, a weight for instance, gets the sum of all their gradients.
"""

from typing import Any

import jax
from jax import lax


def varying_alike(*trees: Any) -> Any:
    """The trees, each array made to vary over the manual mesh axes that any of them varies over."""
    axes = frozenset[str]().union(*(_varying(leaf) for leaf in jax.tree.leaves(trees)))

    def vary(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, trees)


def _varying(array: Any) -> frozenset[str]:
    axes: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return axes
