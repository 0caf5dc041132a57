"""Figures: a comparison's loss curves and gaps to the baseline, and the losses of one run."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

# Okabe and Ito's palette, told apart by most colour-blind readers; black is for the baseline.
BASELINE_COLOUR = "#000000"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]

Curve = dict[int, float]  # validation loss by step
Curves = dict[str, dict[int, Curve]]  # of one model, by recipe and seed


def loss_curves(results: dict[str, Any], path: Path) -> None:
    """Validation loss against training tokens: a thin line per seed, a thick one for the mean."""
    figure, panels = _panels(results)
    for name, axes in panels.items():
        curves, model = _curves(results, name), results["models"][name]
        for recipe, colour in _colours(results).items():
            _draw(axes, list(curves.get(recipe, {}).values()), colour, recipe, model)
        _frame(axes, name, model, f"validation loss (nats per {model['unit']})", "Validation loss")
        _skip_the_fall(axes, curves, model)
    _legend(figure, panels)
    _save(figure, path)


def gap_curves(results: dict[str, Any], path: Path) -> None:
    """Relative gap to the baseline, same seed and step, against training tokens."""
    baseline = results["config"]["baseline"]
    figure, panels = _panels(results)
    for name, axes in panels.items():
        curves, model = _curves(results, name), results["models"][name]
        axes.axhline(0, color=BASELINE_COLOUR, linewidth=1.5, label=baseline)
        for recipe, colour in _colours(results).items():
            if recipe != baseline:
                gaps = [
                    _gap(curve, curves.get(baseline, {}).get(seed, {}))
                    for seed, curve in curves.get(recipe, {}).items()
                ]
                _draw(axes, gaps, colour, recipe, model)
        _frame(axes, name, model, f"validation loss above {baseline} (%)", f"Gap to {baseline}")
    _legend(figure, panels)
    _save(figure, path)


def training_loss(path: Path, lines: list[dict[str, Any]], unit: str) -> None:
    """Losses of one run against its steps, and its learning rate, from the lines of its metrics."""
    figure, (axes, below) = plt.subplots(
        2, figsize=(7, 5), height_ratios=[4, 1], sharex=True, layout="constrained"
    )
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    dot = "." if len(lines) == 1 else None  # of which there is no line to draw
    axes.plot(
        steps, losses, color=COLOURS[0], lw=0.8, alpha=0.6, marker=dot, label="training, each batch"
    )
    held_out = {
        line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line
    }
    axes.plot(
        list(held_out),
        list(held_out.values()),
        color=BASELINE_COLOUR,
        marker="o",
        markersize=3.5,
        label="validation",
    )
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.legend(frameon=False, fontsize="small")
    below.plot(steps, [line["learning_rate"] for line in lines], color="0.4", lw=1, marker=dot)
    below.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    below.set_ylabel("learning rate", fontsize="small")
    below.set_xlabel("step")
    for each in (axes, below):
        each.grid(alpha=0.25)
    _save(figure, path)


def _panels(results: dict[str, Any]) -> tuple[plt.Figure, dict[str, Axes]]:
    """A figure with a panel for each model, two in a row."""
    names = list(results["models"])
    across = min(2, len(names))
    down = -(-len(names) // across)
    width, height = (7, 4.2) if across == 1 else (5.5, 3.6)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(width * across, height * down),
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
        squeeze=False,
    )
    for unused in grid.flat[len(names) :]:
        unused.set_axis_off()
    return figure, dict(zip(names, grid.flat, strict=False))


def _curves(results: dict[str, Any], model: str) -> Curves:
    curves: Curves = {}
    for run in results["runs"]:
        if run["model"] != model:
            continue
        curve = {step: loss for step, loss in run["val_curve"] if loss is not None}
        curves.setdefault(run["recipe"], {})[run["seed"]] = curve
    return curves


def _colours(results: dict[str, Any]) -> dict[str, str]:
    config = results["config"]
    others = [recipe for recipe in config["recipes"] if recipe != config["baseline"]]
    colours = {recipe: COLOURS[i % len(COLOURS)] for i, recipe in enumerate(others)}
    return {config["baseline"]: BASELINE_COLOUR} | colours


def _gap(curve: Curve, baseline: Curve) -> Curve:
    # Before the first step there is no gap that training made.
    return {s: 100 * (loss / baseline[s] - 1) for s, loss in curve.items() if s and s in baseline}


def _draw(axes: Axes, curves: list[Curve], colour: str, label: str, model: dict[str, Any]) -> None:
    each = _targets_per_step(model)
    if len(curves) > 1:
        for curve in curves:
            axes.plot(
                [s * each for s in curve], list(curve.values()), color=colour, alpha=0.35, lw=0.8
            )
    steps = sorted(set().union(*curves)) if curves else []
    shared = [s for s in steps if all(s in curve for curve in curves)]
    mean = [np.mean([curve[s] for curve in curves]) for s in shared]
    label = f"{label} (mean of {len(curves)} seeds)" if len(curves) > 1 else label
    x = [s * each for s in shared]
    axes.plot(x, mean, color=colour, lw=1.8, marker="o", markersize=3.5, label=label)


def _frame(axes: Axes, name: str, model: dict[str, Any], ylabel: str, title: str) -> None:
    decay = model["decay_from"] * _targets_per_step(model)
    axes.axvline(decay, color="0.6", lw=1, ls=":", label="learning rate starts to decay")
    of = " (bytes of text)" if model["unit"] == "byte" else ""
    axes.set_xlabel(f"training {model['counted']}{of}")
    axes.set_ylabel(ylabel)
    axes.set_title(f"{title}: {name}, {model['corpus']['name']}", fontsize="medium", wrap=True)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)


def _legend(figure: plt.Figure, panels: dict[str, Axes]) -> None:
    """One for all panels, below them, where it covers no curve."""
    found = [axes.get_legend_handles_labels() for axes in panels.values()]
    lines = {
        label: line
        for handles, labels in found
        for line, label in zip(handles, labels, strict=True)
    }
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=3 if len(panels) == 1 else 4,
        frameon=False,
        fontsize="small",
    )


def _skip_the_fall(axes: Axes, curves: Curves, model: dict[str, Any]) -> None:
    """Leaves the first tenth of the steps, a steep fall from chance level, above the frame."""
    steps = model["training"]["steps"]
    points = [(s, loss) for runs in curves.values() for c in runs.values() for s, loss in c.items()]
    late = [loss for step, loss in points if step >= steps / 10]
    if len({step for step, _ in points if step >= steps / 10}) > 1:
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - margin, max(late) + margin)


def _targets_per_step(model: dict[str, Any]) -> int:
    return model["training"]["batch"] * model["targets"]


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    # Few colours: a palette takes a third of the bytes.
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)
