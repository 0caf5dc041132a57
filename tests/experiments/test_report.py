"""The report: which seeds are paired, what is said of them, and what is written."""

import io
import json
import math

import numpy as np
import pytest
from matplotlib import pyplot as plt
from PIL import Image
from rich.console import Console

from experiments import plots, report
from experiments.objective import Measures
from experiments.report import Run
from experiments.terminal import Markdown
from experiments.train import Progress

STEPS = 20
CONFIG = {
    "recipes": ["bf16", "nvfp4"],
    "baseline": "bf16",
    "seeds": [0, 1],
    "command": "python -m experiments.compare --seeds 0 1",
}
TEXT = {
    "corpus": {"name": "some text", "bytes": 12345, "sha256": "ab" * 32},
    "training": {
        "steps": STEPS,
        "batch": 2,
        "sequence": 16,
        "learning_rate": 0.004,
        "validation": 4,
    },
    "decay_from": 16,
    "bf16_blocks": {"first": 0, "last": 1},
    "unit": "byte",
    "counted": "tokens",
    "targets": 16,
}
DIGITS = TEXT | {
    "corpus": {"name": "some digits", "bytes": 54321, "sha256": "cd" * 32},
    "unit": "image",
    "counted": "images",
    "targets": 1,
}
VERSIONS = {"jax": "0.10.2", "device": "a device"}
FIVE = dict.fromkeys(("hybrid", "transformer", "mamba", "moe"), TEXT) | {"vit": DIGITS}


def run(recipe: str, seed: int, *losses: float, kept: float = 4096.0, model="tiny") -> Run:
    """A run that evaluated before the first step, at half time and after the last."""
    result = Run(
        model=model,
        recipe=recipe,
        seed=seed,
        params=1234,
        saved_bytes_per_linear=kept,
        targets_per_step=32,
        until=STEPS,
    )
    for step, loss in zip((0, 10, 20), losses, strict=False):
        done = 10 if step else 0  # in 3.2 seconds, at 100 tokens a second
        evaluation = Measures(loss, step / 40)
        result.add(Progress(step, [9.0] * done + [loss], [1.0], evaluation, done * 0.32))
    return result


def results(*runs: Run, models=None, **config) -> dict:
    return report.results(CONFIG | config, models or {"tiny": TEXT}, VERSIONS, runs)


def of_models(models, seeds=(0,), recipes=("bf16", "nvfp4"), worse=1.0, kept=1024.0) -> dict:
    """Results of which the models differ a little, and nothing is missing."""
    runs = [
        run(
            recipe,
            seed,
            5,
            3,
            2 if recipe == recipes[0] else 2.02 + worse * (0.01 * i + 0.004 * seed),
            kept=4096 if recipe == recipes[0] else kept * (1 + i / 10),
            model=model,
        )
        for i, model in enumerate(models)
        for seed in seeds
        for recipe in recipes
    ]
    return results(*runs, models=models, recipes=recipes, baseline=recipes[0], seeds=seeds)


def findings(found: dict) -> list[str]:
    return [line[2:] for line in report.summary(found).splitlines() if line.startswith("- ")]


# The figures


def test_runs_in_json():
    found = results(run("bf16", 3, 5.5, 2.0, 1.5))["runs"]
    assert found == [
        {
            "model": "tiny",
            "recipe": "bf16",
            "seed": 3,
            "status": "finished",
            "params": 1234,
            "steps": 20,
            "tokens": 640,
            "final_val_loss": 1.5,
            "accuracy": 0.5,
            "val_curve": [[0, 5.5], [10, 2.0], [20, 1.5]],
            "train_curve": [[0, 5.5], [10, 2.0], [20, 1.5]],
            "tokens_per_second": pytest.approx(100.0),
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
    assert gap["model"] == "tiny"
    assert gap["recipe"] == "nvfp4"
    assert gap["baseline"] == "bf16"
    assert gap["seeds"] == [0, 1]
    assert gap["per_seed"] == pytest.approx([1, 3])
    assert gap["relative_gap_percent"] == pytest.approx(2)
    assert gap["ci95"] == pytest.approx([2 - 12.7062047, 2 + 12.7062047])


def test_gaps_are_of_the_same_model():
    found = results(
        run("bf16", 0, 5, 3, 2.0, model="a"),
        run("nvfp4", 0, 5, 3, 2.1, model="a"),
        run("bf16", 0, 5, 3, 1.0, model="b"),
        run("nvfp4", 0, 5, 3, 1.2, model="b"),
        models={"a": TEXT, "b": DIGITS},
    )
    assert [gap["model"] for gap in found["gaps"]] == ["a", "b"]
    percent = [gap["relative_gap_percent"] for gap in found["gaps"]]
    assert percent == pytest.approx([5, 20])
    assert found["corpus"] == TEXT["corpus"], "of the first model"


def test_no_gap_without_a_finished_pair():
    assert results(run("bf16", 0, 5, 3, 2), run("nvfp4", 0, 5, 3))["gaps"] == []
    assert results(run("bf16", 0, 5), run("nvfp4", 0, 5, 3, 2))["gaps"] == []
    assert results()["gaps"] == []


# The words


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


def test_several_models_of_one_seed_share_a_sentence():
    found = of_models(FIVE, recipes=("bf16", "fp8_block", "nvfp4"))
    said = findings(found)
    assert said[0] == "The gaps are of one seed: nothing here tells how much of them is chance."
    assert len(said) == 4, "that, memory for each recipe, and what the speeds are"


def test_intervals_are_said_of_each_model():
    found = of_models({"a": TEXT, "b": TEXT}, seeds=(0, 1))
    said = findings(found)
    assert said[0].startswith("a, nvfp4 ends 1.10% above bf16 on average, but zero lies within")
    assert said[1].startswith("b, nvfp4 ends 1.60% above bf16 (95% interval")
    assert not any("one seed" in sentence for sentence in said)


def test_a_gap_of_one_seed_among_intervals_is_said():
    runs = [run("bf16", seed, 5, 3, 1, model=model) for seed in (0, 1) for model in ("a", "b")]
    runs += [run("nvfp4", seed, 5, 3, 1.02 + 0.001 * seed, model="a") for seed in (0, 1)]
    runs += [run("nvfp4", 0, 5, 3, 1.5, model="b")]
    said = findings(results(*runs, models={"a": TEXT, "b": TEXT}))
    assert said[0].startswith("a, nvfp4 ends 2.05% above bf16 (95% interval")
    assert said[1] == (
        "Gaps without an interval are of one seed: nothing here tells how much of them is chance."
    )


def test_memory_of_several_models_is_a_range():
    said = findings(of_models(FIVE, kept=1024.0))  # and 10% more with each further model
    assert (
        "For its backward pass, a linear layer keeps in nvfp4 0.25 to 0.35 times what it keeps in "
        "bf16." in said
    )
    same = {"a": run("bf16", 0, 5, model="a"), "b": run("bf16", 0, 5, model="b")}
    runs = [*same.values(), *(run("nvfp4", 0, 5, model=model, kept=2048.0) for model in same)]
    said = findings(results(*runs, models={"a": TEXT, "b": TEXT}))
    assert any("keeps in nvfp4 0.50 times what it keeps in bf16" in line for line in said)


def test_the_table_and_the_memory():
    text = report.markdown(
        results(run("bf16", 0, 5, 3, 2.0), run("nvfp4", 0, 5, 3, 2.02, kept=1024.0))
    )
    assert (
        "| recipe | held-out loss, nats/byte | gap to bf16 | accuracy | tokens/s | "
        "kept for backward |" in text
    )
    assert "| bf16 | 2.0000 | baseline | 50.00% | 100 | 4 KiB |" in text
    assert "| nvfp4 | 2.0200 | +1.00% | 50.00% | 100 | 1 KiB |" in text
    assert "a linear layer in nvfp4 keeps 0.25 times what it keeps in bf16" in text
    for fact in (
        CONFIG["command"],
        TEXT["corpus"]["sha256"],
        "12,345 bytes",
        "jax 0.10.2",
        "1,234 parameters; BF16 in the linear layers of the first 0 and last 1 blocks",
        "20 steps of 2 sequences of 16 bytes, peak learning rate 0.004",
    ):
        assert fact in text


def test_the_table_of_a_text_and_an_image_model():
    text = report.markdown(of_models({"a": TEXT, "vit": DIGITS}))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == (
        "| model | recipe | held-out loss, nats | gap to bf16 | accuracy | per s | "
        "kept for backward |"
    )
    assert rows[2:] == [
        "| a | bf16 | 2.0000 | baseline | 50.00% | 100 | 4 KiB |",
        "| a | nvfp4 | 2.0200 | +1.00% | 50.00% | 100 | 1 KiB |",
        "| vit | bf16 | 2.0000 | baseline | 50.00% | 100 | 4 KiB |",
        "| vit | nvfp4 | 2.0300 | +1.50% | 50.00% | 100 | 1 KiB |",
    ]
    assert "20 steps of 2 images, peak learning rate" in text
    for corpus in (TEXT["corpus"], DIGITS["corpus"]):
        assert f"{corpus['name']}, {corpus['bytes']:,} bytes, sha256 `{corpus['sha256']}`" in text


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("models", "recipes"),
    [
        (FIVE, ("bf16", "fp8_block", "nvfp4")),
        (FIVE, ("fp8_tensor", "fp8_block", "nvfp4")),
        (
            dict.fromkeys(("hybrid", "transformer", "mamba", "moe", "other"), TEXT),
            ("bf16", "mxfp4"),
        ),
        (dict.fromkeys(("transformer_m100", "hybrid_m100"), TEXT), ("fp8_tensor", "nvfp4")),
    ],
)
def test_the_table_fits_80_columns(models, recipes, seeds):
    file = io.StringIO()
    console = Console(file=file, width=80, color_system=None)
    console.print(Markdown(report.summary(of_models(models, seeds, recipes))))
    shown = file.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = shown.split()
    for name in models:
        assert words.count(name) >= len(recipes), "in one piece, in each of its rows"
    for name in recipes:
        assert words.count(name) >= len(models)
    for word in ("2.0000", "50.00%", "baseline", "accuracy", "held-out", "backward"):
        assert word in words


def test_what_is_not_finished_is_said():
    text = report.markdown(results(run("bf16", 0, 5, 3, 2.0), run("nvfp4", 0, 5, 2.5)))
    first_lines = text.split("|")[0]
    assert "nvfp4, seed 0: interrupted after 10 of 20 steps" in first_lines
    assert "(last validation loss: 2.5000)" in first_lines
    assert "2 runs not started" in first_lines


def test_what_is_not_finished_of_several_models_is_said():
    runs = [run("bf16", 0, 5, 3, 2, model="a"), run("bf16", 0, model="b")]
    text = report.markdown(results(*runs, models={"a": TEXT, "b": TEXT}))
    first_lines = text.split("|")[0]
    assert "**b, bf16, seed 0: interrupted after 0 of 20 steps" in first_lines
    assert "(last validation loss: none yet)" in first_lines
    assert "6 runs not started" in first_lines, "of 2 models, 2 recipes and 2 seeds"


def test_a_diverged_run_is_no_number(tmp_path):
    diverged = run("nvfp4", 0, 5, math.nan)
    assert diverged.status == "diverged"
    found = results(run("bf16", 0, 5, 3, 2.0), diverged)
    report.write(tmp_path, found)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert found["gaps"] == []
    assert found["runs"][1]["val_curve"] == [[0, 5], [10, None]]
    text = (tmp_path / "report.md").read_text()
    assert "nvfp4, seed 0: diverged after 10 of 20 steps (last validation loss: not finite)" in text


# The pictures


@pytest.mark.parametrize("losses", [(), (5,), (5, 3), (5, 3, 2)])
def test_a_report_is_written_however_far_the_runs_came(tmp_path, losses):
    report.write(tmp_path / "new" / "folder", results(run("bf16", 0, *losses)))
    files = {path.name: path.stat().st_size for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(files) == {"results.json", "report.md", "loss.png", "gap.png"}
    assert 5_000 < files["loss.png"] < 300_000
    assert 5_000 < files["gap.png"] < 300_000


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws figures, which stay open."""
    figures = []

    def keep(figure, path):
        figure.canvas.draw()
        figures.append(figure)

    monkeypatch.setattr(plots, "_save", keep)

    def draw(found):
        report.write(tmp_path, found)
        return figures[-2:]

    yield draw
    plt.close("all")


@pytest.mark.parametrize(("names", "unused"), [("a", 0), ("ab", 0), ("abc", 1), ("abcde", 1)])
def test_figures_have_a_panel_for_each_model(drawn, names, unused):
    models = dict.fromkeys(names, TEXT) | {names[-1]: DIGITS}
    for figure, what in zip(drawn(of_models(models)), ("Validation loss", "Gap to"), strict=True):
        shown = [axes for axes in figure.axes if axes.axison]
        assert len(figure.axes) - len(shown) == unused
        titles = [axes.get_title() for axes in shown]
        assert len(titles) == len(names)
        for name, title in zip(names, titles, strict=True):
            assert title.startswith(what) and f": {name}, some" in title
        assert shown[-1].get_xlabel() == "training images"
        boxes = [axes.get_tightbbox() for axes in shown]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        (legend,) = figure.legends
        assert not any(legend.get_window_extent().overlaps(box) for box in boxes)
        labels = [text.get_text() for text in legend.get_texts()]
        assert labels == ["bf16", "nvfp4", "learning rate starts to decay"]


def test_what_is_drawn_are_losses_and_gaps_of_that_model(drawn):
    """Against tokens: 2 sequences of 16 in a step, or 2 images."""
    losses, gaps = drawn(of_models({"a": TEXT, "vit": DIGITS}))
    for number, (per_step, last) in enumerate([(32, 2.02), (2, 2.03)]):
        curve = {line.get_label(): line for line in losses.axes[number].lines}["nvfp4"]
        expected = [(0, 5), (10 * per_step, 3), (20 * per_step, last)]
        np.testing.assert_allclose(curve.get_xydata(), expected)
        gap = {line.get_label(): line for line in gaps.axes[number].lines}["nvfp4"]
        expected = [(10 * per_step, 0), (20 * per_step, 100 * (last / 2 - 1))]
        np.testing.assert_allclose(gap.get_xydata(), expected, atol=1e-9)


def test_pictures_of_five_models_are_small(tmp_path):
    found = of_models(FIVE, seeds=(0, 1, 2), recipes=("bf16", "fp8_block", "nvfp4"))
    rng = np.random.default_rng(0)
    for one in found["runs"]:  # jagged lines, which take the most bytes
        one["val_curve"] = [[step, rng.uniform(1, 2)] for step in range(STEPS + 1)]
    report.write(tmp_path, found)
    for name in ("loss.png", "gap.png"):
        assert (tmp_path / name).stat().st_size < 300_000
        with Image.open(tmp_path / name) as image:
            assert image.width < 1600 and image.height < 1600


def test_training_loss_of_a_run(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: kept.append(figure))
    lines = [{"step": i, "loss": 5 - i, "learning_rate": i / 100} for i in (1, 2, 3, 4)]
    lines[1]["validation_loss"], lines[3]["validation_loss"] = 3.5, 1.5
    plots.training_loss(tmp_path / "loss.png", lines, "byte")
    (figure,) = kept
    above, below = figure.axes
    training, held_out = above.lines
    assert training.get_xydata().tolist() == [[1, 4], [2, 3], [3, 2], [4, 1]]
    assert held_out.get_xydata().tolist() == [[2, 3.5], [4, 1.5]]
    assert below.lines[0].get_xydata().tolist() == [[1, 0.01], [2, 0.02], [3, 0.03], [4, 0.04]]
    assert above.get_ylabel() == "loss (nats per byte)"
    plt.close(figure)
