"""CPU quantizers of other projects, where installed: a name and a function for a float32 matrix.

Each quantizes a matrix to NVFP4 in blocks of 16 along the last axis and comes back to float32 (or,
where it says so, stops at packed codes). None of them is needed to use fp4jax.
"""

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def nvfp4_quantizers(x: np.ndarray) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields (name with version, function of nothing that quantizes ``x``)."""
    for load in (_qwix, _torchao):
        try:
            yield load(x)
        except ImportError:
            continue


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def _qwix(x: np.ndarray) -> tuple[str, Callable[[], Any]]:
    qwix = importlib.import_module("qwix")
    import jax

    @jax.jit
    def fake_quantize(x: jax.Array) -> jax.Array:
        how = {"channelwise_axes": (0,), "tiled_axes": {1: 16}}
        return qwix.dequantize(qwix.quantize(x, "nvfp4", **how))

    array = jax.numpy.asarray(x)
    return f"{_version('qwix')}, fake", lambda: fake_quantize(array)


def _torchao(x: np.ndarray) -> tuple[str, Callable[[], Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = importlib.import_module("torch")
        module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    tensor = torch.from_numpy(np.array(x))
    scale = torch.tensor(float(np.abs(x).max()) / (6 * 448))
    return (
        f"{_version('torchao')}, packed",
        lambda: module.nvfp4_quantize(tensor, 16, per_tensor_scale=scale),
    )
