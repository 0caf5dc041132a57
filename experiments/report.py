"""What a comparison leaves behind: results.json, and report.md with two figures for a reader."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments import plots
from experiments.gaps import relative_gap
from experiments.train import Progress

Curve = list[tuple[int, float]]


@dataclasses.dataclass
class Run:
    """One training run as it goes on; what is here when it is cut short goes in the report.

    Attributes:
      model: its name.
      recipe: its name.
      seed: of the weights, the batches and the stochastic rounding.
      params: number of parameters.
      saved_bytes_per_linear: kept for the backward pass by one quantized linear layer, mean.
      targets_per_step: tokens, or images, in a batch.
      status: how it ended; that it was interrupted, until it has ended in another way.
      until: steps to do.
      steps: done.
      seconds: of training, without compilation and evaluation.
      val_curve: (step, validation loss), nats per byte, token or image.
      accuracy: of the last evaluation.
      train_curve: (step, training loss of one batch).
    """

    model: str
    recipe: str
    seed: int
    params: int
    saved_bytes_per_linear: float
    targets_per_step: int
    until: int
    status: Literal["interrupted", "diverged", "finished"] = "interrupted"
    steps: int = 0
    seconds: float = 0.0
    val_curve: Curve = dataclasses.field(default_factory=list)
    accuracy: float | None = None
    train_curve: Curve = dataclasses.field(default_factory=list)

    def add(self, progress: Progress) -> None:
        """Takes note of where the run stands."""
        self.steps = progress.step
        self.seconds += progress.seconds
        if progress.losses:
            self.train_curve.append((progress.step, progress.losses[-1]))
        if progress.evaluation is not None:
            loss, self.accuracy = map(float, progress.evaluation)
            self.val_curve.append((progress.step, loss))
            if not math.isfinite(loss):
                self.status = "diverged"
            elif progress.step == self.until:
                self.status = "finished"

    @property
    def tokens_per_second(self) -> float | None:
        """Of the training steps; images per second where those are counted."""
        return self.steps * self.targets_per_step / self.seconds if self.seconds else None

    @property
    def final_val_loss(self) -> float | None:
        return self.val_curve[-1][1] if self.status == "finished" else None


def results(
    config: dict[str, Any],
    models: Mapping[str, dict[str, Any]],
    versions: dict[str, str],
    runs: Sequence[Run],
) -> dict[str, Any]:
    """Everything there is to report, as plain values for JSON.

    Args:
      config: what was asked for.
      models: of each: its corpus, training, when the learning rate decays, and what it counts.
      versions: of the packages.
      runs: those that were begun.
    """
    return {
        "config": config,
        "corpus": next(iter(models.values()))["corpus"],
        "models": dict(models),
        "versions": versions,
        "runs": [_run(run) for run in runs],
        "gaps": [
            {"model": model} | gap
            for model in models
            for gap in _gaps(
                config["recipes"], config["baseline"], [run for run in runs if run.model == model]
            )
        ],
    }


def write(folder: Path, results: dict[str, Any]) -> None:
    """Writes results.json, report.md, loss.png and gap.png; all but the first from the first."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False, default=str)
    (folder / "results.json").write_text(text + "\n")
    plots.loss_curves(results, folder / "loss.png")
    plots.gap_curves(results, folder / "gap.png")
    (folder / "report.md").write_text(markdown(results))


def _run(run: Run) -> dict[str, Any]:
    return {
        "model": run.model,
        "recipe": run.recipe,
        "seed": run.seed,
        "status": run.status,
        "params": run.params,
        "steps": run.steps,
        "tokens": run.steps * run.targets_per_step,
        "final_val_loss": run.final_val_loss,
        "accuracy": run.accuracy if run.status == "finished" else None,
        "val_curve": _curve(run.val_curve),
        "train_curve": _curve(run.train_curve),
        "tokens_per_second": run.tokens_per_second,
        "saved_bytes_per_linear": run.saved_bytes_per_linear,
    }


def _curve(curve: Curve) -> list[list[float | None]]:
    # JSON has no word for a loss that is not finite.
    return [[step, loss if math.isfinite(loss) else None] for step, loss in curve]


def _gaps(recipes: Sequence[str], baseline: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The gap of each recipe over the seeds that it and the baseline have both finished."""
    losses: dict[str, dict[int, float]] = {recipe: {} for recipe in recipes}
    for run in runs:
        if run.final_val_loss is not None:
            losses[run.recipe][run.seed] = run.final_val_loss
    gaps = []
    for recipe in recipes:
        seeds = [seed for seed in losses[recipe] if seed in losses[baseline]]
        if recipe != baseline and seeds:
            gap = relative_gap(
                [losses[recipe][seed] for seed in seeds], [losses[baseline][seed] for seed in seeds]
            )
            gaps.append(
                {
                    "recipe": recipe,
                    "baseline": baseline,
                    "relative_gap_percent": gap.mean,
                    "seeds": seeds,
                    "per_seed": list(gap.per_seed),
                    "ci95": list(gap.ci95) if gap.ci95 else None,
                }
            )
    return gaps


# The report in words


def markdown(results: dict[str, Any]) -> str:
    """report.md: what came out, how sure it is, and how to get it again."""
    config, models = results["config"], results["models"]
    sections = [
        f"# {', '.join(config['recipes'])}: the same weights, the same batches",
        summary(results),
        "![Validation loss](loss.png)",
        f"![Gap to {config['baseline']}](gap.png)",
        "## What was run",
        _listing(
            {
                "command": f"`{config['command']}`",
                "versions": ", ".join(f"{k} {v}" for k, v in results["versions"].items()),
            }
        ),
    ]
    for name, model in models.items():
        params = [run["params"] for run in results["runs"] if run["model"] == name]
        if params:
            sections += [f"### {name}", _described(model, params[0])]
    return "\n\n".join(sections) + "\n"


def _described(model: dict[str, Any], params: int) -> str:
    corpus, training, ends = model["corpus"], model["training"], model["bf16_blocks"]
    text = model["counted"] == "tokens"
    items = f"sequences of {training['sequence']} {model['unit']}s" if text else "images"
    return _listing(
        {
            "model": f"{params:,} parameters; BF16 in the linear layers of the first "
            f"{ends['first']} and last {ends['last']} blocks",
            "data": f"{corpus['name']}, {corpus['bytes']:,} bytes, sha256 `{corpus['sha256']}`",
            "training": f"{training['steps']} steps of {training['batch']} {items}, peak learning "
            f"rate {training['learning_rate']:g}",
            "evaluation": f"{training['validation']} held-out {items}",
        }
    )


def summary(results: dict[str, Any]) -> str:
    """The part of the report that says what came out."""
    findings = "\n".join(f"- {sentence}" for sentence in _findings(results))
    return "\n\n".join(filter(None, [_unfinished(results), _table(results), findings]))


def _listing(items: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {text}" for name, text in items.items())


def _prefix(results: dict[str, Any], model: str) -> str:
    """What tells sentences about one model from those about others, where there are several."""
    return f"{model}, " if len(results["models"]) > 1 else ""


def _unfinished(results: dict[str, Any]) -> str:
    config, runs, models = results["config"], results["runs"], results["models"]
    lines = []
    for run in runs:
        if run["status"] != "finished":
            losses = [loss for _, loss in run["val_curve"]]
            last = "none yet" if not losses else _number(losses[-1])
            steps = models[run["model"]]["training"]["steps"]
            lines.append(
                f"{_prefix(results, run['model'])}{run['recipe']}, seed {run['seed']}: "
                f"{run['status']} after {run['steps']} of {steps} steps (last validation loss: "
                f"{last})."
            )
    missing = len(models) * len(config["recipes"]) * len(config["seeds"]) - len(runs)
    if missing:
        lines.append(f"{missing} run{'s' if missing > 1 else ''} not started.")
    return "\n".join(f"**{line}**  " for line in lines)


def _number(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _table(results: dict[str, Any]) -> str:
    """A row for each model and recipe."""
    models = results["models"]
    several = len(models) > 1
    units, counted = ({model[of] for model in models.values()} for of in ("unit", "counted"))
    columns = [  # short words: all of it fits a terminal of 80 columns
        *(["model"] if several else []),
        "recipe",
        f"held-out loss, nats/{units.pop()}" if len(units) == 1 else "held-out loss, nats",
        f"gap to {results['config']['baseline']}",
        "accuracy",
        f"{counted.pop()}/s" if len(counted) == 1 else "per s",
        "kept for backward",
    ]
    rows = [columns, ["---"] * len(columns), *_rows(results, several)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(results: dict[str, Any], several: bool) -> Iterator[list[str]]:
    baseline = results["config"]["baseline"]
    gaps = {(gap["model"], gap["recipe"]): gap for gap in results["gaps"]}
    for model in results["models"]:
        for recipe in results["config"]["recipes"]:
            runs = [r for r in results["runs"] if (r["model"], r["recipe"]) == (model, recipe)]
            losses = [run["final_val_loss"] for run in runs if run["final_val_loss"] is not None]
            hits = [run["accuracy"] for run in runs if run["accuracy"] is not None]
            speeds = [run["tokens_per_second"] for run in runs if run["tokens_per_second"]]
            kept = [run["saved_bytes_per_linear"] for run in runs]
            yield [
                *([model] if several else []),
                recipe,
                f"{_mean(losses):.4f}" if losses else "-",
                "baseline" if recipe == baseline else _gap_cell(gaps.get((model, recipe))),
                f"{100 * _mean(hits):.2f}%" if hits else "-",
                f"{_mean(speeds):,.0f}" if speeds else "-",
                f"{_mean(kept) / 1024:,.0f} KiB" if kept else "-",
            ]


def _gap_cell(gap: dict[str, Any] | None) -> str:
    if gap is None:
        return "-"
    cell = f"{gap['relative_gap_percent']:+.2f}%"
    return f"{cell} ({_interval(gap['ci95'])})" if gap["ci95"] else cell


def _findings(results: dict[str, Any]) -> list[str]:
    device = results["versions"]["device"]
    return [
        *_gap_sentences(results),
        *_memory(results),
        f"Low-precision products are emulated: the speeds are those of this program on {device}, "
        "compilation and evaluation left out, not of hardware with such products.",
    ]


def _gap_sentences(results: dict[str, Any]) -> list[str]:
    """One for each gap; with several models, a common one for all gaps of a single seed."""
    gaps = results["gaps"]
    if len(results["models"]) == 1:
        return [_finding(gap) for gap in gaps]
    sure = [gap for gap in gaps if gap["ci95"]]
    sentences = [f"{gap['model']}, {_finding(gap)}" for gap in sure]
    if len(sure) < len(gaps):
        which = "Gaps without an interval" if sure else "The gaps"
        sentences.append(f"{which} are of one seed: nothing here tells how much of them is chance.")
    return sentences


def _finding(gap: dict[str, Any]) -> str:
    recipe, baseline, percent = gap["recipe"], gap["baseline"], gap["relative_gap_percent"]
    side = "above" if percent > 0 else "below"
    amount = f"{recipe} ends {abs(percent):.2f}% {side} {baseline}"
    if gap["ci95"] is None:
        return f"{amount}, with one seed: nothing here tells how much of that is chance."
    low, high = gap["ci95"]
    interval = f"95% interval {_interval(gap['ci95'])}, {len(gap['seeds'])} paired seeds"
    if low <= 0 <= high:
        return f"{amount} on average, but zero lies within the {interval}: no difference is shown."
    return f"{amount} ({interval}); the interval leaves out zero."


def _interval(ci95: Sequence[float]) -> str:
    return f"{ci95[0]:+.2f}% to {ci95[1]:+.2f}%"


def _memory(results: dict[str, Any]) -> list[str]:
    """One for each recipe; with several models, their range."""
    baseline, several = results["config"]["baseline"], len(results["models"]) > 1
    kept = {(run["model"], run["recipe"]): run["saved_bytes_per_linear"] for run in results["runs"]}
    ratios: dict[str, list[float]] = {}
    for (model, recipe), size in kept.items():
        if recipe != baseline and kept.get((model, baseline)):
            ratios.setdefault(recipe, []).append(size / kept[model, baseline])
    if several:
        return [
            f"For its backward pass, a linear layer keeps in {recipe} {_range(found)} times what "
            f"it keeps in {baseline}."
            for recipe, found in ratios.items()
        ]
    return [
        f"For its backward pass, a linear layer in {recipe} keeps {ratio:.2f} times what it keeps "
        f"in {baseline}."
        for recipe, (ratio,) in ratios.items()
    ]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
