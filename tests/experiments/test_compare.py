"""The main job, end to end, with models and data small enough to train in seconds."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import nano
import numpy as np
import pytest

import fp4jax as fp4
from experiments import compare, plots, zoo
from experiments.objective import Measures
from experiments.optimization import Training
from experiments.train import Progress
from experiments.zoo import Preset
from fp4jax.models import MoEConfig, ViTConfig

HYBRID = dataclasses.replace(nano.HYBRID, pattern="M-*-", mlp_dim=64)  # the last block in BF16
TRANSFORMER = dataclasses.replace(nano.TRANSFORMER, mlp_dim=64, mlp="squared_relu")
VIT = ViTConfig(
    image_size=8,
    patch_size=4,
    channels=1,
    num_classes=10,
    d_model=32,
    num_blocks=2,
    num_heads=2,
    mlp_dim=64,
)
SMALL = "--steps 6 --sequence 32 --evals 2 --validation 4".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d. " % (i, i * i) for i in range(2000)))
    return str(path)


@pytest.fixture(autouse=True)
def _nano(monkeypatch, text, lenient_promotion, compile_fast):
    """All of these train; where they compare bits, both runs compile the same program alike."""
    small = {"batch": 2}
    for name, preset in {
        "nano": Preset(TRANSFORMER, data=(text,), training=small),
        "nano_hybrid": Preset(
            dataclasses.replace(HYBRID, pattern="-*"), data=(text,), training=small
        ),
        "nano_vit": Preset(VIT, data=("digits",), training={"batch": 4}),
    }.items():
        monkeypatch.setitem(zoo.MODELS, name, preset)


def run(out: Path, *args: str) -> dict:
    """The results of the comparison that a command asks for."""
    assert compare.main(["--out", str(out), *SMALL, *args]) == 0
    return json.loads((out / "results.json").read_text())


def curves(results: dict, model: str) -> dict:
    """All losses of a model's runs, by recipe."""
    return {
        run["recipe"]: (run["val_curve"], run["train_curve"])
        for run in results["runs"]
        if run["model"] == model
    }


def said(text: str) -> str:
    """What was printed, without frames and line breaks."""
    return " ".join(text.replace("│", " ").split())


def test_end_to_end_and_the_schema_of_results(tmp_path, text):
    """Programs elsewhere read results.json: what is here must stay; more keys may come."""
    results = run(tmp_path / "a", "--model", "nano_hybrid")

    assert {"config", "corpus", "versions", "runs", "gaps"} <= set(results)
    assert results["corpus"]["name"] == f"{text} (1 file)"
    assert results["corpus"]["bytes"] == Path(text).stat().st_size
    assert set(results["corpus"]) == {"name", "bytes", "sha256"}
    assert len(bytes.fromhex(results["corpus"]["sha256"])) == 32
    assert results["config"]["training"]["steps"] == 6
    assert results["versions"]["python"] == sys.version.split()[0]
    assert [run["recipe"] for run in results["runs"]] == ["bf16", "fp8_block", "nvfp4"]
    for found in results["runs"]:
        assert {
            *("recipe", "seed", "params", "steps", "tokens", "final_val_loss", "val_curve"),
            *("tokens_per_second", "saved_bytes_per_linear"),
        } <= set(found)
        assert found["seed"] == 0
        assert found["steps"] == 6
        assert found["tokens"] == 6 * 2 * 32
        assert found["status"] == "finished"
        assert [step for step, _ in found["val_curve"]] == [0, 3, 6]
        assert found["final_val_loss"] == found["val_curve"][-1][1] < found["val_curve"][0][1]
        assert found["val_curve"][0][1] == pytest.approx(np.log(256), rel=0.3), "near chance"
        assert 0 <= found["accuracy"] <= 1
        assert found["tokens_per_second"] > 0
        assert found["params"] == results["runs"][0]["params"]
    bf16, fp8, nvfp4 = (found["saved_bytes_per_linear"] for found in results["runs"])
    assert nvfp4 < fp8 < bf16

    gaps = {gap["recipe"]: gap for gap in results["gaps"]}
    assert set(gaps) == {"fp8_block", "nvfp4"}
    losses = {found["recipe"]: found["final_val_loss"] for found in results["runs"]}
    for recipe, gap in gaps.items():
        assert {"recipe", "baseline", "relative_gap_percent", "per_seed", "ci95"} <= set(gap)
        expected = 100 * (losses[recipe] / losses["bf16"] - 1)
        assert gap["relative_gap_percent"] == pytest.approx(expected)
        assert gap["per_seed"] == pytest.approx([expected])
        assert gap["baseline"] == "bf16"
        assert gap["ci95"] is None
    assert (tmp_path / "a" / "report.md").read_text().startswith("# bf16, fp8_block, nvfp4")


def test_several_models_in_one_report(tmp_path, text, monkeypatch, capsys):
    panels = []
    save = plots._save

    def noted(figure, path):
        panels.append((path.name, [axes.get_title() for axes in figure.axes]))
        save(figure, path)

    monkeypatch.setattr(plots, "_save", noted)
    results = run(tmp_path, "--model", "nano", "nano_vit", "--recipes", "bf16", "nvfp4")

    rows = [("nano", "bf16"), ("nano", "nvfp4"), ("nano_vit", "bf16"), ("nano_vit", "nvfp4")]
    assert [(run["model"], run["recipe"]) for run in results["runs"]] == rows
    assert results["config"]["model"] == ["nano", "nano_vit"]
    assert results["corpus"] == results["models"]["nano"]["corpus"]
    assert results["models"]["nano"]["corpus"]["name"] == f"{text} (1 file)"
    assert results["models"]["nano_vit"]["corpus"]["name"] == "scikit-learn's digits"
    assert [run["tokens"] for run in results["runs"]] == [6 * 2 * 32] * 2 + [6 * 4] * 2
    losses = {(run["model"], run["recipe"]): run["final_val_loss"] for run in results["runs"]}
    assert [(gap["model"], gap["recipe"], gap["baseline"]) for gap in results["gaps"]] == [
        ("nano", "nvfp4", "bf16"),
        ("nano_vit", "nvfp4", "bf16"),
    ]
    for gap in results["gaps"]:
        expected = 100 * (losses[gap["model"], "nvfp4"] / losses[gap["model"], "bf16"] - 1)
        assert gap["per_seed"] == pytest.approx([expected])

    table = [line for line in (tmp_path / "report.md").read_text().splitlines() if line[:1] == "|"]
    cells = [line.split(" | ") for line in table[2:]]
    assert [(model.removeprefix("| "), recipe) for model, recipe, *_ in cells] == rows
    assert [row[2] for row in cells] == [f"{losses[row]:.4f}" for row in rows]
    assert [name for name, _ in panels] == ["loss.png", "gap.png"]
    for _, (first, second) in panels:
        assert "nano, " in first and "nano_vit, scikit-learn's digits" in second
    printed = capsys.readouterr().out
    assert "nano, nvfp4, seed 0: step 6/6" in printed
    assert "nano_vit, nvfp4, seed 0: step 6/6" in printed and "images/s" in printed
    assert "…" not in printed

    # The same model, recipe and seed give the same bits, whatever else is run before.
    alone = run(tmp_path / "b", "--model", "nano_vit", "--recipes", "nvfp4")
    assert alone["config"]["baseline"] == "nvfp4"
    assert curves(alone, "nano_vit") == {"nvfp4": curves(results, "nano_vit")["nvfp4"]}
    assert [step for step, _ in curves(alone, "nano_vit")["nvfp4"][0]] == [0, 3, 6]


def test_each_model_has_its_own_defaults_and_what_is_asked_for_is_for_all():
    configs = compare.parse(["--model", "hybrid", "vit", "--steps", "7", "--seeds", "3"])
    assert list(configs) == ["hybrid", "vit"]
    hybrid, vit = configs.values()
    assert (hybrid.data, vit.data) == (("stdlib",), ("digits",))
    assert (hybrid.training.batch, vit.training.batch) == (8, 64)
    assert (hybrid.training.learning_rate, vit.training.learning_rate) == (3e-3, 1e-3)
    assert {config.training.steps for config in configs.values()} == {7}
    assert {config.seeds for config in configs.values()} == {(3,)}
    both = compare.parse(["--batch", "16", "--model=vit"])
    assert list(both) == ["vit"] and both["vit"].training.batch == 16
    assert list(compare.parse([])) == ["hybrid"]


def test_the_baseline_is_the_first_recipe_unless_named():
    def baseline(*args):
        (config,) = compare.parse(["--recipes", "nvfp4", "bf16", *args]).values()
        return config.compared_with

    assert baseline() == "nvfp4"
    assert baseline("--baseline", "bf16") == "bf16"


def test_models_may_be_named_in_a_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('model = ["transformer", "vit"]\nbatch = 2\n')
    configs = compare.parse(["--config", str(path), "--steps", "5"])
    assert {name: own.training.batch for name, own in configs.items()} == {
        "transformer": 2,
        "vit": 2,
    }
    assert {own.training.steps for own in configs.values()} == {5}


# What linear layers keep


def mean_saved(preset: Preset, fits: dict, recipe: fp4.Recipe) -> float:
    training = Training(steps=10, batch=2, sequence=32)
    return compare.mean_saved_bytes(zoo.make_model(preset, fits, recipe, 0), preset, training)


def test_saved_bytes_are_the_mean_over_the_linears_under_the_recipe():
    # Inputs of Mamba's two layers, the first MLP's two and attention's four, in bfloat16.
    features = [32, 64, 32, 64, 32, 32, 32, 32]
    expected = 2 * 32 * sum(features) / len(features) * 2
    assert mean_saved(Preset(HYBRID), {}, fp4.recipes.bf16()) == expected


@pytest.mark.parametrize(("pool", "rows"), [("mean", 4), ("token", 5)])
def test_saved_bytes_of_images_are_those_of_their_patches(pool, rows):
    preset = Preset(ViTConfig(**{**vars(VIT), "pool": pool}))
    features = [32, 32, 32, 32, 32, 64]  # attention's four, the MLP's two
    expected = 2 * rows * sum(features) / len(features) * 2
    assert mean_saved(preset, {}, fp4.recipes.bf16()) == expected


def test_saved_bytes_of_experts_are_left_out():
    preset = Preset(MoEConfig(transformer=TRANSFORMER, num_experts=2))
    assert mean_saved(preset, {}, fp4.recipes.bf16()) == 2 * 32 * 32 * 2, "attention's"


# Endings


def test_ctrl_c_leaves_a_report_of_what_was_done(tmp_path, text):
    out = tmp_path / "out"
    command = ["--model", "nano", "--data", text, "--out", str(out), "--steps", "100000"]
    command += "--batch 2 --sequence 32 --evals 10000 --validation 4 --recipes bf16 nvfp4".split()
    # A process of its own, with the nano model put among the models, as the fixture does here, and
    # with Ctrl-C as on a terminal: a shell that runs tests in the background has it ignored.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import jax; jax.config.update('jax_disable_most_optimizations', True); "
        "from experiments import compare, zoo; from fp4jax.models import TransformerConfig; "
        f"zoo.MODELS['nano'] = zoo.Preset({TRANSFORMER!r}); sys.exit(compare.main({command!r}))"
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


@pytest.fixture
def pretend(monkeypatch):
    """Makes runs of which nothing is compiled: each of these lists is one run's progress."""

    def do(*runs):
        real, left = zoo.make_run, list(runs)

        def go(steps):
            for step in steps:
                if not isinstance(step, Progress):
                    raise step
                yield step

        def make_run(*args):
            run, steps = real(*args), left.pop(0)
            run.go = lambda: go(steps)
            return run

        monkeypatch.setattr(zoo, "make_run", make_run)

    return do


def evaluated(step: int, loss: float) -> Progress:
    return Progress(step, [loss] * min(step, 3), [1.0], Measures(loss, 0.5), 0.1)


@pytest.mark.parametrize("ending", [KeyboardInterrupt("stop"), RuntimeError("out of memory")])
def test_what_ends_a_later_run_leaves_the_earlier_ones(tmp_path, pretend, ending):
    """Ctrl-C, or a fault; in the second of two models."""
    pretend([evaluated(0, 5), evaluated(3, 4), evaluated(6, 3)], [evaluated(0, 2), ending])
    command = ["--model", "nano", "nano_vit", "--recipes", "bf16", "--out", str(tmp_path), *SMALL]
    if isinstance(ending, KeyboardInterrupt):
        assert compare.main(command) == 130
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            compare.main(command)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(run["model"], run["status"], run["val_curve"]) for run in results["runs"]] == [
        ("nano", "finished", [[0, 5], [3, 4], [6, 3]]),
        ("nano_vit", "interrupted", [[0, 2]]),
    ]
    report = (tmp_path / "report.md").read_text()
    assert "nano_vit, bf16, seed 0: interrupted after 0 of 6 steps" in report


def test_a_run_that_diverges_ends_and_the_next_one_begins(tmp_path, pretend):
    never = AssertionError("went on")
    pretend(
        [evaluated(0, 5), evaluated(3, math.nan), never],
        [evaluated(0, 5), evaluated(3, 4), evaluated(6, 3)],
    )
    results = run(tmp_path, "--model", "nano", "--recipes", "bf16", "nvfp4")
    ends = [(run["status"], run["steps"], run["final_val_loss"]) for run in results["runs"]]
    assert ends == [("diverged", 3, None), ("finished", 6, 3)]
    assert results["gaps"] == []
    assert "last validation loss: not finite" in (tmp_path / "report.md").read_text()


def test_each_seed_and_recipe_has_a_run(tmp_path, pretend):
    pretend(*([evaluated(0, 5), evaluated(6, 3 + i / 10)] for i in range(4)))
    results = run(tmp_path, "--model", "nano", "--recipes", "bf16", "nvfp4", "--seeds", "4", "7")
    runs = [(run["seed"], run["recipe"], run["final_val_loss"]) for run in results["runs"]]
    assert runs == [(4, "bf16", 3.0), (4, "nvfp4", 3.1), (7, "bf16", 3.2), (7, "nvfp4", 3.3)]
    (gap,) = results["gaps"]
    assert gap["per_seed"] == pytest.approx([10 / 3, 10 / 3.2])
    mean, half = (10 / 3 + 10 / 3.2) / 2, 12.7062047 * (10 / 3 - 10 / 3.2) / 2
    assert gap["relative_gap_percent"] == pytest.approx(mean)
    assert gap["ci95"] == pytest.approx([mean - half, mean + half])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--recipes bf16 fp5", "unknown recipe 'fp5'; allowed: bf16, fp8_tensor, fp8_block, mxfp8"),
        ("--recipes", "name each recipe once"),
        ("--recipes bf16 bf16", "name each recipe once"),
        ("--recipes nvfp4 --baseline bf16", "unknown baseline 'bf16'; allowed: nvfp4"),
        ("--model huge", "unknown model 'huge'; allowed: hybrid, transformer, mamba, moe"),
        ("--model vit huge", "unknown model 'huge'; allowed: hybrid, transformer, mamba, moe"),
        ("--model vit vit", "name each model once"),
        ("--seeds -1", "seeds must be different numbers from 0 to 4294967295"),
        ("--seeds 1 1", "seeds must be different numbers from 0 to 4294967295"),
        ("--seeds one", "--seeds"),
        ("--steps 0", "steps must be above zero, not 0"),
        ("--learning-rate nan", "learning_rate must be above zero"),
        ("--colour blue", "--colour"),
        ("--data missing.txt", "model hybrid: there is no file or folder 'missing.txt'"),
        ("--model nano nano_vit --data digits", "model nano: 'digits' is a set of images"),
        ("--model nano nano_vit --data {text}", "model nano_vit: '{text}' is no set of images"),
        ("--model nano_vit --tokenizer a.json", "images have no tokens: leave out the tokenizer"),
        ("--model nano_vit --data {odd}", "image_size must be a multiple of patch_size=4; got 9"),
        ("--model nano_vit --data {oblong}", "are 8 x 12; allowed: squares"),
        ("--data stdlib sotu", "stands alone"),
        ("--sequence 99999", "at most 65535"),
    ],
)
def test_unusable_options_end_before_anything_is_compiled(
    args, message, capsys, monkeypatch, tmp_path, text
):
    def never(*args):
        raise AssertionError("came as far as making a model")

    monkeypatch.setattr(zoo, "make_model", never)
    files = {"text": text}
    for name, shape in {"odd": (9, 9), "oblong": (8, 12)}.items():
        files[name] = str(tmp_path / f"{name}.npz")
        labels = np.arange(20) % 3
        np.savez(files[name], images=np.zeros((20, *shape), np.uint8), labels=labels)
    try:
        code = compare.main(["--out", str(tmp_path / "out"), *args.format(**files).split()])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message.format(**files) in said(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_output_path_that_is_a_file_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--out", text])
    assert "out must be a folder" in said(capsys.readouterr().err)


def test_help_names_every_model_recipe_and_option(capsys):
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m experiments.compare")
    for name in (*zoo.RECIPES, "hybrid_m30", "transformer_m100", "vit", "--tokenizer", "--steps"):
        assert name in text
    assert "an .npz file. Without it each model has its own. (default: stdlib)" in said(text)
    with pytest.raises(SystemExit):
        compare.main(["--model", "vit", "--help"])
    assert "(default: digits)" in capsys.readouterr().out
