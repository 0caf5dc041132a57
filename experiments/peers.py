"""NVFP4 of other projects on a CPU, where installed; none of them is needed to use fp4jax.

A quantizer turns a matrix into NVFP4 in blocks of 16 along the last axis and comes back to float32
(or, where its name says so, stops at packed codes).
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


def nvfp4_linear(x: Any, w: Any, dy: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields ("qwix", function of nothing): a float32 layer, forward and backward, in its NVFP4.

    All six operands are quantized in blocks of 16, without tensor scale, stochastic rounding,
    transform or square weight blocks, which qwix 0.1.8 does not have.
    """
    try:
        qwix = importlib.import_module("qwix")
    except ImportError:
        return
    import jax
    from flax import linen

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(w.shape[1], use_bias=False)(x)

    rule = qwix.QtRule(
        weight_qtype="nvfp4",
        act_qtype="nvfp4",
        tile_size=16,
        bwd_qtype="nvfp4",
        bwd_weight_grad_tile_size=16,
        # Its public options give Dgrad no tile.
        additional_qt_config={
            "dlhs_tile_size": 16,
            "dlhs_residual_qtype": "nvfp4",
            "drhs_residual_qtype": "nvfp4",
        },
    )
    model = qwix.quantize_model(Layer(), qwix.QtProvider([rule]))
    params = {"params": {"Dense_0": {"kernel": w}}}
    # It takes a matrix as large as the weight for a second weight: hence three axes.
    x, dy = (a.reshape(2, -1, a.shape[-1]) for a in (x, dy))

    @jax.jit
    def layer(params: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(model.apply, params, x)
        return y, *vjp(dy)

    yield "qwix", lambda: layer(params, x, dy)


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
