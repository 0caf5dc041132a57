"""The published conformance vectors are what this code gives, to the byte."""

import pathlib

import numpy as np
import pytest

import fp4jax as fp4
from experiments.conformance import VERSION, inputs, outputs

FILE = pathlib.Path(__file__).parents[1] / "conformance" / f"fp4jax-{VERSION}.npz"


@pytest.fixture(scope="module")
def published():
    return dict(np.load(FILE))


@pytest.mark.parametrize("case", sorted(inputs()))
def test_bytes(published, case):
    x = published[f"{case}/x"]
    assert x.tobytes() == inputs()[case].tobytes()
    made = outputs(x)
    names = {k.removeprefix(f"{case}/") for k in published if k.startswith(f"{case}/")}
    assert names == made.keys() | {"x"}
    differ = [k for k, v in made.items() if v.tobytes() != published[f"{case}/{k}"].tobytes()]
    assert differ == []


def test_docs_example_reads_an_entry(published):
    """The decoding recipe of docs/conformance.md, in numpy alone, gives dequantize()."""
    x = published["mixed_sizes/x"]
    codes = published["mixed_sizes/NVFP4/axis1/codes"]
    scales = published["mixed_sizes/NVFP4/axis1/block_scales"]
    tensor = published["mixed_sizes/NVFP4/axis1/tensor_scale"]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(20, 72)
    values = np.where(nibbles & 8, -1, 1) * grid[nibbles & 7]
    exponent, mantissa = scales >> 3, scales & 7
    e4m3 = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(int) - 10)
    )
    decoded = np.float32(values) * np.float32(e4m3.repeat(16, 1)[:, :72]) * tensor
    np.testing.assert_array_equal(decoded, fp4.quantize(x, fp4.NVFP4).dequantize())
