"""A checkpoint of one mesh goes on on another."""

from pathlib import Path

import jax
import numpy as np
import pytest
from bigrams import bits
from nano import SHARDED_VIT

from experiments import pretrain, processes, zoo
from experiments.checkpoint import Checkpoints
from experiments.mesh import mesh_of
from experiments.metrics import read
from experiments.train import Run

pytestmark = pytest.mark.usefixtures("lenient_promotion", "compile_fast")

COMMAND = (
    "--model nano --data digits --steps 9 --checkpoint-every 3 --batch 4 --evals 3 --validation 4 "
    "--no-tensorboard --ema 0.9"
).split()
ON = {
    8: ("--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"),
    4: ("--mesh.fsdp", "4"),
    1: (),
}


@pytest.fixture(autouse=True)
def _presets(monkeypatch):
    monkeypatch.setitem(zoo.MODELS, "nano", SHARDED_VIT)


def run_on(devices: int, out: Path) -> Run:
    config = pretrain.parse([*COMMAND, "--out", str(out), *ON[devices]])
    return pretrain.make_run(config, zoo.load(SHARDED_VIT, config.data, config.training.sequence))


def test_a_checkpoint_of_8_devices_goes_on_on_4_and_on_1_and_back(tmp_path):
    run = run_on(8, tmp_path)
    going = run.go(every=3)
    while next(going).step < 3:
        pass
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        checkpoints.save(3, run.state, {"data": run.batches.get_state()})
    saved, expected = bits(run.state), list(next(going).losses)
    for devices in (8, 4, 1):
        other = run_on(devices, tmp_path)
        with Checkpoints(tmp_path / "checkpoints", 2, owner=False) as checkpoints:
            assert pretrain.resume(other, checkpoints, pytest.fail)
        assert bits(other.state) == saved
        kernels = [x for x in jax.tree.leaves(other.state) if x.ndim == 2]
        assert mesh_of(other.state).size == devices
        assert any(x.sharding.is_fully_replicated for x in kernels) == (devices == 1)
        losses = list(next(other.go(every=3)).losses)
        assert len(losses) == len(expected)
        # The same batches and random bits; what is added in another order differs a little.
        np.testing.assert_allclose(losses, expected, rtol=0 if devices == 8 else 1e-2)


def test_a_run_goes_on_on_another_mesh_by_its_own_command(tmp_path, capsys):
    out = tmp_path / "run"
    command = [*COMMAND, "--out", str(out)]
    assert pretrain.main([*command, *ON[8]]) == 0
    before = read(out / "metrics.jsonl")
    assert pretrain.main([*command, *ON[4]]) == 0
    assert "going on after step 9" in capsys.readouterr().out
    assert read(out / "metrics.jsonl") == before
    code = pretrain.main([*command, "--mesh.fsdp", "3"])
    assert code == pretrain.UNUSABLE
    assert "a batch of 4 cannot be divided among 3 devices" in capsys.readouterr().err


def test_fake_devices_that_the_mesh_does_not_take_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "join", lambda asked: None)
    code = pretrain.main([*COMMAND, "--out", str(tmp_path / "run"), "--cpu-devices", "4"])
    assert code == pretrain.UNUSABLE
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "--cpu-devices 4 are more than the mesh of 1 x 1 x 1 (data x fsdp x tensor) takes" in said
    )
