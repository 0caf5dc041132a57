"""Which GPU a program is traced for."""

import re

import jax

# Of devices that are described and not there, only the name is known.
_BY_NAME = {r"\bG?H\d00\b": (9, 0), r"\bG?B200\b": (10, 0)}


def compute_capability() -> tuple[int, int] | None:
    """Of the device that the mesh in context describes, else of the first GPU; None without one."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        kind = described.device_kind
        found = [value for name, value in _BY_NAME.items() if re.search(name, kind)]
        if found:
            return found[0]
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:  # JAX knows no CUDA here
        return None
    major, minor = gpu.compute_capability.split(".")
    return int(major), int(minor)
