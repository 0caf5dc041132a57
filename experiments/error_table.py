"""What each format, rounding and scale rule does to four kinds of data: table and picture.

``python -m experiments.error_table`` writes ``error_table.md``, ``.json`` and ``.png``.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tyro
from jax import Array
from rich.console import Console
from rich.progress import track

import fp4jax as fp4
from fp4jax.diagnostics import Damage, damage

NVFP4, RHT = fp4.NVFP4, fp4.Hadamard(16)
SR = {bits: fp4.Stochastic(bits) for bits in (8, 16, 32)}

QUANTIZERS: dict[str, fp4.Quantizer] = {
    "NVFP4": fp4.Quantizer(NVFP4),
    "NVFP4 16x16": fp4.Quantizer(NVFP4, tile=(16, 16)),
    "NVFP4 row-scaled": fp4.Quantizer(NVFP4, scale_rule=fp4.RowScaled()),
    "NVFP4 4/6 MAE 256": fp4.Quantizer(NVFP4, scale_rule=fp4.FourOverSix("mae", 256)),
    "NVFP4 4/6 MSE 256": fp4.Quantizer(NVFP4, scale_rule=fp4.FourOverSix("mse", 256)),
    "NVFP4 4/6 MSE 448": fp4.Quantizer(NVFP4, scale_rule=fp4.FourOverSix("mse", 448)),
    "NVFP4 16x16 4/6 MSE 256": fp4.Quantizer(
        NVFP4, tile=(16, 16), scale_rule=fp4.FourOverSix("mse", 256)
    ),
    "NVFP4 RHT": fp4.Quantizer(NVFP4, hadamard=RHT),
    "NVFP4 SR8": fp4.Quantizer(NVFP4, rounding=SR[8]),
    "NVFP4 SR16": fp4.Quantizer(NVFP4, rounding=SR[16]),
    "NVFP4 SR32": fp4.Quantizer(NVFP4, rounding=SR[32]),
    "NVFP4 SR32 headroom": fp4.Quantizer(
        NVFP4, rounding=SR[32], scale_rule=fp4.AmaxScale(headroom=17 / 16)
    ),
    "NVFP4 SR32 4/6 MSE 256": fp4.Quantizer(
        NVFP4, rounding=SR[32], scale_rule=fp4.FourOverSix("mse", 256)
    ),
    "NVFP4 SR32 RHT": fp4.Quantizer(NVFP4, rounding=SR[32], hadamard=RHT),
    "NVINT4": fp4.Quantizer(fp4.NVINT4),
    "IF4": fp4.Quantizer(fp4.IF4),
    "FP4 UE5M3": fp4.Quantizer(fp4.FP4_UE5M3),
    **{
        f"{format.name.upper()} {mode}": fp4.Quantizer(format, scale_rule=fp4.PowerOfTwo(mode))
        for format in (fp4.MXFP4, fp4.MXFP8_E4M3, fp4.MXFP8_E5M2)
        for mode in ("floor", "rceil", "ceil", "even")
    },
    "MXFP4 floor SR32": fp4.Quantizer(fp4.MXFP4, rounding=SR[32]),
    "MXFP4 rceil SR32": fp4.Quantizer(
        fp4.MXFP4, rounding=SR[32], scale_rule=fp4.PowerOfTwo("rceil")
    ),
    "FP8 block 1x128": fp4.Quantizer(fp4.FP8_BLOCK),
    "FP8 block 128x128": fp4.Quantizer(fp4.FP8_BLOCK, tile=(128, 128)),
    "FP8 tensor E4M3": fp4.Quantizer(fp4.FP8_TENSOR),
    "FP8 tensor E5M2": fp4.Quantizer(fp4.FP8_TENSOR_E5M2),
}


def _outlier_channels(key: Array, shape: tuple[int, int]) -> Array:
    """Gaussian with every 64th channel 30 times larger."""
    channel = jnp.arange(shape[1]) % 64 == 0
    return jax.random.normal(key, shape) * jnp.where(channel, 30.0, 1.0)[None]


DATA: dict[str, Callable[[Array, tuple[int, int]], Array]] = {
    "Gaussian": jax.random.normal,
    "Laplace": jax.random.laplace,
    "Student t, 3 degrees": lambda key, shape: jax.random.t(key, 3.0, shape),
    "outlier channels": _outlier_channels,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Errors of all quantizers on random matrices."""

    rows: int = 1024
    """Rows of each matrix."""
    columns: int = 1024
    """Columns, along which the blocks run."""
    seed: int = 0
    """Of the data and of stochastic rounding."""
    out: Path = Path("runs/error_table")
    """Folder for the results."""


def measure(config: Config) -> dict[str, dict[str, Damage]]:
    """The damage by quantizer and kind of data."""
    keys = jax.random.split(jax.random.key(config.seed), len(DATA) + 1)
    shape = (config.rows, config.columns)
    data = {name: make(key, shape) for (name, make), key in zip(DATA.items(), keys, strict=False)}
    table: dict[str, dict[str, Damage]] = {}
    for name, quantizer in track(QUANTIZERS.items(), description="quantizing"):
        key = keys[-1] if quantizer.needs_key else None
        table[name] = {
            kind: jax.device_get(damage(x, fp4.fake_quantize(x, quantizer, key=key)))
            for kind, x in data.items()
        }
    return table


def markdown(table: dict[str, dict[str, Damage]]) -> str:
    """A row per quantizer; relative error, SQNR and bias for each kind of data."""
    lines = [
        f"| quantizer | {' | '.join(f'{kind}: error, SQNR, bias' for kind in DATA)} |",
        "| --- |" + " --- |" * len(DATA),
    ]
    for name, row in table.items():
        cells = [
            f"{d.relative_error:.4f}, {d.sqnr_db:.1f} dB, {100 * d.bias:+.3f}%"
            for d in row.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(table: dict[str, dict[str, Damage]], path: Path) -> None:
    """SQNR and bias, a line of dots per quantizer and a colour per kind of data."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 0.24 * len(table) + 1.2), sharey=True, layout="constrained"
    )
    height = np.arange(len(table))
    for kind, marker in zip(DATA, "osD^", strict=True):
        rows = [row[kind] for row in table.values()]
        style = {"marker": marker, "linestyle": "", "markersize": 4, "label": kind}
        left.plot([d.sqnr_db for d in rows], height, **style)
        right.plot([100 * d.bias for d in rows], height, **style)
    left.set_yticks(height, list(table), fontsize=8)
    left.set_ylim(len(table) - 0.5, -0.5)
    left.set_xlabel("signal to quantization noise (dB)")
    right.set_xlabel("bias along the signal (%)")
    right.set_xscale("symlog", linthresh=0.01)
    right.axvline(0, color="0.4", linewidth=0.8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measures, writes and prints the table."""
    config = tyro.cli(Config)
    table = measure(config)
    config.out.mkdir(parents=True, exist_ok=True)
    text = markdown(table)
    (config.out / "error_table.md").write_text(text)
    values = {
        name: {kind: {k: float(v) for k, v in d._asdict().items()} for kind, d in row.items()}
        for name, row in table.items()
    }
    (config.out / "error_table.json").write_text(json.dumps(values, indent=1) + "\n")
    draw(table, config.out / "error_table.png")
    Console().print(text, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
