"""Where the arrays of a run lie on a mesh of devices: by name, for every model of the zoo."""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")

# The rows of a batch lie along both.
BATCH = PartitionSpec(("data", "fsdp"))
EVERYWHERE = PartitionSpec()

# Layers that read what lies along "tensor" and write to the residual stream, which does not.
_INTO_STREAM = {"o_proj", "out_proj", "down_proj"}


class MeshError(Exception):
    """What was asked for does not fit the devices; the message says why."""


@dataclasses.dataclass(frozen=True)
class Extents:
    """How many devices lie along each axis of the mesh; together they are all that a run uses."""

    data: int = 1
    """Copies of the parameters; each sees its own rows of a batch."""
    fsdp: int = 1
    """Parts of each weight, gathered where it multiplies; each device sees its own rows, too."""
    tensor: int = 1
    """Parts of each weight that multiply where they lie."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"mesh.{field.name} must be at least 1, not {getattr(self, field.name)}"
                )

    @property
    def devices(self) -> int:
        """How many there are in all."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return " x ".join(map(str, dataclasses.astuple(self)))


def make_mesh(extents: Extents = Extents()) -> Mesh:
    """The mesh, of the first devices there are; with several processes, of all.

    Raises:
      MeshError: there are not so many, or processes would be left out.
    """
    there, processes = jax.device_count(), jax.process_count()
    takes = f"a mesh of {extents} (data x fsdp x tensor) takes {extents.devices}"
    if extents.devices > there:
        raise MeshError(f"{takes} devices, and there are {there}; --cpu-devices N makes N of a CPU")
    if processes > 1 and extents.devices < there:
        raise MeshError(f"{takes} of {there} devices; with {processes} processes it must take all")
    names = tuple(field.name for field in dataclasses.fields(extents))
    return jax.make_mesh(
        dataclasses.astuple(extents), names, axis_types=(AxisType.Auto,) * len(names)
    )


def spec_of(
    names: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Where a parameter lies, or what the optimizer remembers of it.

    Kernels and embeddings are divided along their last two axes, one over "fsdp" and one over
    "tensor", where the devices divide them evenly; all else lies everywhere.

    Args:
      names: its path, from anywhere to the parameter.
      shape: of the whole array.
      mesh: with the axes of `Extents`.
    """
    if not {"kernel", "embedding"} & set(names) or "router" in names or len(shape) < 2:
        return EVERYWHERE
    lies: tuple[str | None, str | None] = ("fsdp", "tensor")
    if "embedding" in names or _INTO_STREAM & set(names):
        lies = ("tensor", "fsdp")
    elif "in_proj" in names:
        lies = ("fsdp", None)  # its result is five things, which go separate ways
    entries = [
        name if name is not None and size % mesh.shape[name] == 0 else None
        for name, size in zip(lies, shape[-2:], strict=True)
    ]
    return PartitionSpec(*[None] * (len(shape) - 2), *entries)


def specs(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """`spec_of` for each leaf, by its path."""

    def of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = (getattr(key, "key", getattr(key, "name", "")) for key in path)
        return spec_of(tuple(map(str, names)), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(of, tree)


def place(tree: T, mesh: Mesh) -> T:
    """The arrays on the mesh. Every process has all of them, and the same."""
    placed: T = jax.tree.map(
        lambda x, spec: _put(x, NamedSharding(mesh, spec)), tree, specs(tree, mesh)
    )
    return placed


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """`jax.device_put` takes no array of one process to the devices of several."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def lay(tree: T) -> T:
    """Inside of jit: arrays with the paths of parameters, made to lie where these do."""
    mesh = jax.sharding.get_abstract_mesh()
    # On one device XLA would drop it, but fuse less until then.
    laid: T = tree if mesh.size <= 1 else lax.with_sharding_constraint(tree, specs(tree, mesh))
    return laid


def lay_parts(parts: T) -> T:
    """Inside of jit: the parts of a batch, [parts, rows, ...], each divided as a batch is."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec(None, *BATCH)
    laid: T = parts if mesh.size <= 1 else lax.with_sharding_constraint(parts, spec)
    return laid


def mesh_of(tree: Any) -> Mesh:
    """The mesh on which the arrays lie."""
    mesh: Mesh = jax.tree.leaves(tree)[0].sharding.mesh
    return mesh


def batch_shape(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """What stands for a batch on the mesh, to compile for it."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, BATCH))


def _row_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in ("data", "fsdp"))


def rows_here(mesh: Mesh, size: int, parts: int = 1) -> slice:
    """The rows of a batch of ``size`` that this process's devices see.

    Raises:
      MeshError: the batch, or one of its ``parts``, does not divide evenly; or the rows lie apart.
    """
    shards = _row_shards(mesh)
    if size % (shards * parts):
        each = f" in {parts} parts" if parts > 1 else ""
        raise MeshError(
            f"a batch of {size}{each} cannot be divided among {shards} devices (data x fsdp)"
        )
    places = NamedSharding(mesh, BATCH).addressable_devices_indices_map((size,)).values()
    found = sorted({index[0].indices(size)[:2] for index in places if index is not None})
    start, stop = found[0][0], found[-1][1]
    if sum(b - a for a, b in found) != stop - start:
        raise MeshError(f"the rows of process {jax.process_index()} lie apart: {found}")
    return slice(start, stop)


def batch_of(rows: Any, mesh: Mesh, size: int) -> Any:
    """A batch of ``size`` rows on the mesh, of which this process has `rows_here`."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:])), rows
    )


def whole_batch(batch: Any, mesh: Mesh) -> Any:
    """A batch that every process has, of any size: one that does not divide lies everywhere."""

    def of(x: np.ndarray) -> jax.Array:
        spec = EVERYWHERE if len(x) % _row_shards(mesh) else BATCH
        return _put(x, NamedSharding(mesh, spec))

    return jax.tree.map(of, batch)
