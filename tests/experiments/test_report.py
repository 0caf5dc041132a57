"""The report: which seeds are paired, what is said of them, and what is written."""

import json
import math

import pytest

from experiments import report
from experiments.report import Run
from experiments.train import Progress

STEPS = 20
CONFIG = {
    "recipes": ["bf16", "nvfp4"],
    "baseline": "bf16",
    "seeds": [0, 1],
    "model": "tiny",
    "training": {
        "steps": STEPS,
        "batch": 2,
        "sequence": 16,
        "learning_rate": 0.004,
        "evals": 2,
        "validation": 4,
    },
    "command": "python -m experiments.compare --seeds 0 1",
    "decay_from": 16,
    "bf16_blocks": {"first": 1, "last": 1},
}
CORPUS = {"name": "some text", "bytes": 12345, "sha256": "ab" * 32}
VERSIONS = {"jax": "0.10.2", "device": "a device"}


def run(recipe: str, seed: int, *losses: float, kept: float = 4096.0) -> Run:
    """A run that evaluated before the first step, at half time and after the last."""
    result = Run(
        recipe=recipe,
        seed=seed,
        params=1234,
        saved_bytes_per_linear=kept,
        tokens_per_step=32,
        until=STEPS,
    )
    for step, loss in zip((0, 10, 20), losses, strict=False):
        result.add(Progress(step, loss if step else None, loss, 100.0 if step else None))
    return result


def results(*runs: Run) -> dict:
    return report.results(CONFIG, CORPUS, VERSIONS, runs)


def test_runs_in_json():
    found = results(run("bf16", 3, 5.5, 2.0, 1.5))["runs"]
    assert found == [
        {
            "recipe": "bf16",
            "seed": 3,
            "status": "finished",
            "params": 1234,
            "steps": 20,
            "tokens": 640,
            "final_val_loss": 1.5,
            "val_curve": [[0, 5.5], [10, 2.0], [20, 1.5]],
            "train_curve": [[10, 2.0], [20, 1.5]],
            "tokens_per_second": 100.0,
            "saved_bytes_per_linear": 4096.0,
        }
    ]


def test_gaps_pair_the_seeds_that_both_recipes_finished():
    (gap,) = results(
        run("bf16", 0, 5, 3, 2.0),
        run("nvfp4", 0, 5, 3, 2.02),
        run("bf16", 1, 5, 3, 4.0),
        run("nvfp4", 1, 5, 3, 4.12),
        run("bf16", 2, 5, 3, 1.0),
        run("nvfp4", 2, 5, 3),  # interrupted
    )["gaps"]
    assert gap["recipe"] == "nvfp4"
    assert gap["baseline"] == "bf16"
    assert gap["seeds"] == [0, 1]
    assert gap["per_seed"] == pytest.approx([1, 3])
    assert gap["relative_gap_percent"] == pytest.approx(2)
    assert gap["ci95"] == pytest.approx([2 - 12.7062047, 2 + 12.7062047])


def test_no_gap_without_a_finished_pair():
    assert results(run("bf16", 0, 5, 3, 2), run("nvfp4", 0, 5, 3))["gaps"] == []
    assert results(run("bf16", 0, 5), run("nvfp4", 0, 5, 3, 2))["gaps"] == []
    assert results()["gaps"] == []


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([1.02], "nvfp4 ends 2.00% above bf16, with one seed: nothing here tells how much"),
        ([0.99], "nvfp4 ends 1.00% below bf16, with one seed"),
        ([1.01, 1.03], "but zero lies within the 95% interval -10.71% to +14.71%, 2 paired seeds"),
        ([1.020, 1.021], "(95% interval +1.41% to +2.69%, 2 paired seeds); the interval leaves"),
    ],
)
def test_the_wording_follows_the_figures(losses, said):
    runs = [run("nvfp4", seed, 5, 3, loss) for seed, loss in enumerate(losses)]
    runs += [run("bf16", seed, 5, 3, 1.0) for seed in range(len(losses))]
    assert said in report.markdown(results(*runs))


def test_the_table_and_the_memory():
    text = report.markdown(
        results(run("bf16", 0, 5, 3, 2.0), run("nvfp4", 0, 5, 3, 2.02, kept=1024.0))
    )
    assert "| bf16 | 2.0000 | baseline | 100 | 4 KiB |" in text
    assert "| nvfp4 | 2.0200 | +1.00% | 100 | 1 KiB |" in text
    assert "a linear layer in nvfp4 keeps 0.25 times what it keeps in bf16" in text
    for fact in (CONFIG["command"], CORPUS["sha256"], "12,345 bytes", "jax 0.10.2", "1,234 param"):
        assert fact in text


def test_what_is_not_finished_is_said():
    text = report.markdown(results(run("bf16", 0, 5, 3, 2.0), run("nvfp4", 0, 5, 2.5)))
    first_lines = text.split("|")[0]
    assert "nvfp4, seed 0: interrupted after 10 of 20 steps" in first_lines
    assert "(last validation loss: 2.5000)" in first_lines
    assert "2 runs not started" in first_lines


def test_a_diverged_run_is_no_number(tmp_path):
    diverged = run("nvfp4", 0, 5, math.nan)
    assert diverged.status == "diverged"
    found = results(run("bf16", 0, 5, 3, 2.0), diverged)
    report.write(tmp_path, found)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert found["gaps"] == []
    assert found["runs"][1]["val_curve"] == [[0, 5], [10, None]]
    assert "nvfp4, seed 0: diverged after 10 of 20 steps" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("losses", [(), (5,), (5, 3), (5, 3, 2)])
def test_a_report_is_written_however_far_the_runs_came(tmp_path, losses):
    report.write(tmp_path / "new" / "folder", results(run("bf16", 0, *losses)))
    files = {path.name: path.stat().st_size for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(files) == {"results.json", "report.md", "loss.png", "gap.png"}
    assert 5_000 < files["loss.png"] < 300_000
    assert 5_000 < files["gap.png"] < 300_000
