"""gpu_check, with a body that runs on CPUs: it finds wrong bytes and products, and says so."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import fp4jax as fp4
from experiments import gpu_bytes, gpu_check, gpu_times
from fp4jax.kernels import triton_quantize


@pytest.fixture
def few_arrays(monkeypatch):
    """Without the reference vectors, which tests/test_kernels.py has."""
    arrays = gpu_bytes.arrays
    monkeypatch.setattr(gpu_bytes, "arrays", lambda size: itertools.islice(arrays(size), 1))
    name = gpu_bytes.TOGETHER[0]
    for module in (gpu_bytes, gpu_times):
        monkeypatch.setattr(module, "CASES", {name: gpu_bytes.CASES[name]})


def check(size):
    options = gpu_check.Options(size=size, product=size, layers=(size,), rounds=1)
    return gpu_check.check(options, ["triton:interpret"], ["xla"], Console(quiet=True))


@pytest.mark.usefixtures("few_arrays", "lenient_promotion")
def test_equal_bytes_are_reported_and_timed():
    found = check(64)
    assert found.wrong == []
    assert {b.implementation for b in found.bytes} == {"xla", "triton:interpret"}
    assert all(b.different == 0 for b in found.bytes)
    # Codes, scales and tensor scales of both operands.
    rows = 64 * 32 + 64 * 4 + 4
    assert found.bytes[0].total == 2 * rows
    assert [e.result for e in found.errors] == ["y", "dx", "dw"] * 2
    text = gpu_check.report(found)
    assert f"| triton:interpret | 1 | {2 * rows:,} | 0 |" in text
    assert found.layers[0].kernels == "bf16"


@pytest.mark.usefixtures("few_arrays", "lenient_promotion")
def test_wrong_bytes_are_found_and_not_timed(monkeypatch):
    whole = triton_quantize.encode

    def encode(*args, **options):
        first, *others = whole(*args, **options)
        return first._replace(words=first.words ^ jnp.uint32(1 << 30)), *others

    monkeypatch.setattr(triton_quantize, "encode", encode)
    found = check(48)  # of a size that no other test has, or programs from there would run
    # One code in eight of the first operand, which is half a byte.
    assert {b.different for b in found.bytes if b.implementation != "xla"} == {48 * 6}
    assert found.wrong == ["triton:interpret", "triton:interpret + xla"]
    assert {q.implementation for q in found.quantizers} == {"xla"}
    assert [layer.kernels for layer in found.layers] == ["bf16", "xla + xla"]


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_results_are_written(monkeypatch, tmp_path):
    found = gpu_check.Found("a card", "jax 1", "2026-12-01", [], [])
    for module in (gpu_check, gpu_check.registry):
        monkeypatch.setattr(module, "compute_capability", lambda: (9, 0))
    asked = []
    monkeypatch.setattr(gpu_check, "check", lambda *args: asked.append(args[1:3]) or found)
    monkeypatch.setattr("sys.argv", ["gpu_check", "--out", str(tmp_path)])
    assert gpu_check.main() == 0
    newest = jax.__version_info__ >= (0, 12)
    expected = (["mosaic", "triton"], ["xla", "hopper"]) if newest else (["triton"], ["xla"])
    assert asked == [expected]
    assert json.loads((tmp_path / "gpu_check.json").read_text())["card"] == "a card"
    assert (tmp_path / "gpu_check.md").read_text().startswith("a card, jax 1, 2026-12-01.")


def test_labels():
    assert gpu_bytes.label(fp4.Kernels("triton:interpret", "xla")) == "triton:interpret + xla"
