"""Writes fp4jax's own conformance vectors, for others to test their quantizers against.

``python -m experiments.conformance`` writes ``conformance/fp4jax-1.npz``; docs/conformance.md says
what is in it. The number in the name changes when any byte does.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import fp4jax as fp4
from experiments.error_table import QUANTIZERS
from fp4jax.rounding import key_words

VERSION = 1
KEY = 0  # seed of jax.random.key for the stochastic entries
Vectors = dict[str, np.ndarray]


def inputs() -> Vectors:
    """By name, float32 matrices [20, 72]: no axis is a multiple of a block."""
    rng = np.random.default_rng(2025)
    shape = (20, 72)
    normal = rng.standard_normal(shape)
    size = np.exp2(rng.integers(-24, 5, (20, 9))).repeat(8, axis=1)
    ties = rng.choice(np.arange(-48, 49) / 8, shape)
    ties[::4, ::16] = 6
    sparse = np.where(rng.random(shape) < 0.1, normal, 0)
    sparse[:, :32] = 0
    bad = normal.copy()
    bad[3, 40], bad[4, 7], bad[11, 71] = np.nan, np.inf, -np.inf
    heavy = rng.standard_t(2, shape)
    cases = {
        "normal": normal,
        "mixed_sizes": normal * size,
        "ties": ties,
        "sparse": sparse,
        "zeros": np.where(rng.random(shape) < 0.5, 0.0, -0.0),
        "heavy_tails": heavy,
        "tiny": normal * 1e-20,
        "huge": normal * 1e30,
        "not_finite": bad,
    }
    return {name: x.astype(np.float32) for name, x in cases.items()}


def outputs(x: np.ndarray) -> Vectors:
    """All quantizers along both axes: codes, block scales as bytes, tensor scale."""
    found: Vectors = {}
    for name, quantizer in QUANTIZERS.items():
        key = jax.random.key(KEY) if quantizer.needs_key else None
        for axis in (0, 1):
            q = fp4.quantize(jnp.asarray(x), quantizer, axis=axis, key=key)
            entry = f"{name}/axis{axis}"
            found[f"{entry}/codes"] = np.asarray(q.codes)
            if q.block_scales is not None:
                found[f"{entry}/block_scales"] = np.asarray(q.block_scales).view(np.uint8)
            if q.tensor_scale is not None:
                found[f"{entry}/tensor_scale"] = np.asarray(q.tensor_scale)
    return found


def vectors() -> Vectors:
    """Everything that goes in the file, by key."""
    made: Vectors = {"random_words": np.asarray(key_words(jax.random.key(KEY), 1)[0])}
    for name, x in inputs().items():
        made[f"{name}/x"] = x
        made |= {f"{name}/{entry}": value for entry, value in outputs(x).items()}
    return made


@dataclasses.dataclass(frozen=True)
class Config:
    """Where to write the vectors."""

    out: Path = Path("conformance") / f"fp4jax-{VERSION}.npz"
    """The file."""


def main() -> None:
    """Writes the file that the command line names."""
    config = tyro.cli(Config)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(config.out, **vectors())  # type: ignore[arg-type]
    print(f"{config.out}: {config.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
