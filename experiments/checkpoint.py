"""Checkpoints of a run: written in the background, verified when read, the newest good one wins.

Orbax writes them, each into a folder that only appears when it is complete. Beside the arrays lie
their digests: a file that was cut short or changed on the disk is noticed, and the checkpoint
before it is taken.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

T = TypeVar("T")


class Checkpoints:
    """The checkpoints in a folder.

    Args:
      folder: made if it is missing.
      keep: how many to keep, the newest.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._damaged: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        """Waits until all is written."""
        self._manager.close()

    def save(self, step: int, state: Any) -> None:
        """Saves a pytree of arrays, unless that step is there; returns before all is written.

        A checkpoint that `restore` found damaged is replaced.
        """
        if step in self._damaged:
            self._manager.delete(step)
            self._damaged.remove(step)
        elif step in self._manager.all_steps():
            return
        # Copies: the next training step takes the memory of its state while this is being written.
        arrays = {name: jnp.copy(array) for name, array in _plain(state).items()}
        digests = {name: _digest(array) for name, array in arrays.items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays), digests=ocp.args.JsonSave(digests)
            ),
        )

    def restore(self, like: T, warn: Callable[[str], None]) -> tuple[int, T] | None:
        """The step and state of the newest checkpoint that is whole, or None if there is none.

        Args:
          like: a state of the same structure, shapes and dtypes.
          warn: told of each checkpoint that is not whole, and why.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return step, self._read(step, like)
            # Whatever is wrong with it, the one before it may be good.
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                warn(f"checkpoint {step} cannot be used ({reason}); trying the one before it")
                self._damaged.add(step)
        return None

    def _read(self, step: int, like: T) -> T:
        wanted = {name: _shape(array) for name, array in _plain(like).items()}
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(wanted), digests=ocp.args.JsonRestore()
            ),
        )
        for name, array in read.state.items():
            if _digest(array) != read.digests[name]:
                raise ValueError(f"{name} is not what was written")
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(
            structure,
            [
                jax.random.wrap_key_data(read.state[name]) if _is_key(leaf) else read.state[name]
                for leaf, name in zip(leaves, wanted, strict=True)
            ],
        )


def _plain(state: Any) -> dict[str, Any]:
    """The leaves by path, in order, random keys as the integers that they are."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
        )
        for path, leaf in leaves
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _digest(array: Any) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
