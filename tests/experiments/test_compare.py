"""The main job, end to end, with a model and a text small enough to train in seconds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import compare
from fp4jax.models import HybridConfig

NANO = HybridConfig(
    vocab_size=256,
    d_model=32,
    pattern="M-*-",  # the last block stays in BF16
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=64,
    mamba_heads=4,
    mamba_head_dim=16,
    mamba_groups=2,
    mamba_state=16,
    chunk=16,
)
SMALL = "--steps 6 --batch 2 --sequence 32 --evals 2 --validation 4".split()


@pytest.fixture(autouse=True)
def _nano(monkeypatch):
    monkeypatch.setitem(compare.MODELS, "nano", lambda: NANO)


@pytest.fixture(autouse=True)
def _lenient(lenient_promotion):
    """All of these train."""


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d. " % (i, i * i) for i in range(2000)))
    return str(path)


def run(out: Path, text: str, *args: str) -> dict:
    command = ["--model", "nano", "--data", text, "--out", str(out), *SMALL, *args]
    assert compare.main(command) == 0
    return json.loads((out / "results.json").read_text())


def test_end_to_end(tmp_path, text):
    results = run(tmp_path / "a", text)

    assert {"config", "corpus", "versions", "runs", "gaps"} <= set(results)
    assert results["corpus"]["bytes"] == Path(text).stat().st_size
    assert set(results["corpus"]) == {"name", "bytes", "sha256"}
    assert results["config"]["training"]["steps"] == 6
    assert results["versions"]["python"] == sys.version.split()[0]
    assert [run["recipe"] for run in results["runs"]] == ["bf16", "fp8_block", "nvfp4"]
    for found in results["runs"]:
        assert found["seed"] == 0
        assert found["steps"] == 6
        assert found["tokens"] == 6 * 2 * 32
        assert found["status"] == "finished"
        assert [step for step, _ in found["val_curve"]] == [0, 3, 6]
        assert found["final_val_loss"] == found["val_curve"][-1][1] < found["val_curve"][0][1]
        assert found["tokens_per_second"] > 0
        assert found["params"] == results["runs"][0]["params"]
    bf16, fp8, nvfp4 = (found["saved_bytes_per_linear"] for found in results["runs"])
    assert nvfp4 < fp8 < bf16

    gaps = {gap["recipe"]: gap for gap in results["gaps"]}
    assert set(gaps) == {"fp8_block", "nvfp4"}
    losses = {found["recipe"]: found["final_val_loss"] for found in results["runs"]}
    for recipe, gap in gaps.items():
        expected = 100 * (losses[recipe] / losses["bf16"] - 1)
        assert gap["relative_gap_percent"] == pytest.approx(expected)
        assert gap["per_seed"] == pytest.approx([expected])
        assert gap["baseline"] == "bf16"
        assert gap["ci95"] is None
    assert (tmp_path / "a" / "report.md").read_text().startswith("# bf16, fp8_block, nvfp4")

    # The same recipe and seed give the same bits, whatever else is run and in which order.
    again = run(tmp_path / "b", text, "--recipes", "nvfp4", "bf16")
    curves = [
        {found["recipe"]: (found["val_curve"], found["train_curve"]) for found in done["runs"]}
        for done in (results, again)
    ]
    assert curves[1] == {recipe: curves[0][recipe] for recipe in ("nvfp4", "bf16")}
    assert again["config"]["baseline"] == "nvfp4", "the first one, unless named"
    (gap,) = again["gaps"]
    assert gap["recipe"] == "bf16"
    assert gap["relative_gap_percent"] == pytest.approx(
        100 * (losses["bf16"] / losses["nvfp4"] - 1)
    )


def test_saved_bytes_are_the_mean_over_the_linears_under_the_recipe():
    training = compare.Training(steps=10, batch=2, sequence=32)
    model = compare.make_model("nano", compare.RECIPES["bf16"](), seed=0)
    # Inputs of Mamba's two layers, the first MLP's two and attention's four, in bfloat16.
    features = [32, 64, 32, 64, 32, 32, 32, 32]
    expected = 2 * 32 * sum(features) / len(features) * 2
    assert compare.mean_saved_bytes(model, training) == expected


def test_ctrl_c_leaves_a_report_of_what_was_done(tmp_path, text):
    out = tmp_path / "out"
    command = ["--model", "nano", "--data", text, "--out", str(out), "--steps", "100000"]
    command += "--batch 2 --sequence 32 --evals 10000 --validation 4 --recipes bf16 nvfp4".split()
    # A process of its own, with the nano model put among the models, as the fixture does here, and
    # with Ctrl-C as on a terminal: a shell that runs tests in the background has it ignored.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from experiments import compare; from fp4jax.models import HybridConfig; "
        f"compare.MODELS['nano'] = lambda: {NANO!r}; sys.exit(compare.main({command!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if "step 0/" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=120)[0]
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 130, rest
    assert "interrupted after" in rest
    results = json.loads((out / "results.json").read_text())
    (partial,) = results["runs"]
    assert partial["status"] == "interrupted"
    assert partial["final_val_loss"] is None
    assert partial["val_curve"][0][0] == 0
    assert results["gaps"] == []
    report = (out / "report.md").read_text()
    assert "bf16, seed 0: interrupted after" in report
    assert "1 run not started" in report
    assert (out / "loss.png").exists()


def test_an_interruption_in_a_later_run_keeps_the_earlier_one(tmp_path, text, monkeypatch):
    real_train = compare.train

    def interrupted_train(model, corpus, training, seed):
        for progress in real_train(model, corpus, training, seed):
            if interrupted_train.runs == 2 and progress.step == 3:
                raise KeyboardInterrupt
            yield progress
        interrupted_train.runs += 1

    interrupted_train.runs = 1
    monkeypatch.setattr(compare, "train", interrupted_train)
    command = ["--model", "nano", "--data", text, "--out", str(tmp_path), *SMALL]
    assert compare.main([*command, "--recipes", "bf16", "--seeds", "5", "6"]) == 130
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(run["seed"], run["status"], run["steps"]) for run in results["runs"]] == [
        (5, "finished", 6),
        (6, "interrupted", 0),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--recipes bf16 fp5", "unknown recipe 'fp5'; allowed: bf16, fp8_tensor, fp8_block, mxfp8"),
        ("--recipes", "name each recipe once"),
        ("--recipes bf16 bf16", "name each recipe once"),
        ("--recipes nvfp4 --baseline bf16", "unknown baseline 'bf16'; allowed: nvfp4"),
        ("--model huge", "unknown model 'huge'; allowed: tiny, nano"),
        ("--seeds -1", "seeds must be different numbers from 0 up"),
        ("--seeds 1 1", "seeds must be different numbers from 0 up"),
        ("--seeds one", "--seeds"),
        ("--steps 0", "steps must be above zero, not 0"),
        ("--learning-rate nan", "learning_rate must be above zero"),
        ("--colour blue", "--colour"),
        ("--data missing.txt", "no file or folder 'missing.txt'"),
        ("--data stdlib sotu", "stands alone"),
        ("--sequence 99999", "at most 65535"),
    ],
)
def test_unusable_options_end_before_anything_is_compiled(args, message, capsys, monkeypatch):
    def never(*args):
        raise AssertionError("came as far as making a model")

    monkeypatch.setattr(compare, "make_model", never)
    try:
        code = compare.main(args.split())
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said


def test_an_output_path_that_is_a_file_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--out", text])
    assert "out must be a folder" in capsys.readouterr().err
