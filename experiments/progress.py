"""Shows how a run is getting on: a bar on a terminal, plain lines now and then elsewhere."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from experiments.train import Progress

LINE_EVERY = 15.0  # seconds

Show = Callable[[Progress], None]


@contextlib.contextmanager
def display(
    console: Console, label: str, steps: int, per_step: int, counted: str = "tok"
) -> Iterator[Show]:
    """Gives a function to call with every progress of one run.

    Args:
      console: where to show it.
      label: of the run.
      steps: of the whole run.
      per_step: how many tokens, or what else is counted, a step sees.
      counted: what that is.
    """
    clock = _Clock(steps, per_step, counted)
    if console.is_terminal:
        bar_column = BarColumn(bar_width=8)  # leaves room for the words on 80 columns
        columns = (TextColumn("{task.description}"), bar_column, TextColumn("{task.fields[text]}"))
        with Bar(*columns, console=console) as bar:
            task = bar.add_task(label, total=steps, text="starting")
            yield lambda p: bar.update(task, completed=p.step, text=clock.describe(p))
    else:
        console.print(f"{label}: starting", highlight=False)
        last_line = -LINE_EVERY

        def show(progress: Progress) -> None:
            nonlocal last_line
            words, now = clock.describe(progress), time.monotonic()
            if progress.step == steps or now - last_line >= LINE_EVERY:
                last_line = now
                console.print(f"{label}: {words}", highlight=False, soft_wrap=True)

        yield show


class _Clock:
    """Words for a progress; the time left is reckoned from the time since the first steps."""

    def __init__(self, steps: int, per_step: int, counted: str) -> None:
        self.steps, self.per_step, self.counted = steps, per_step, counted
        self.began: tuple[float, int] | None = None  # when, and at which step
        self.validation = math.nan  # the last one measured

    def describe(self, progress: Progress) -> str:
        now = time.monotonic()
        if progress.evaluation is not None:
            self.validation = float(progress.evaluation.loss)
        words = [f"step {progress.step}/{self.steps}"]
        if progress.losses:
            words.append(f"loss {progress.losses[-1]:.3f}")
        if not math.isnan(self.validation):
            words.append(f"val {self.validation:.3f}")
        if progress.losses:
            rate = len(progress.losses) * self.per_step / progress.seconds
            if self.began is None:  # not before: the time that compilation took does not come again
                self.began = now - progress.seconds, progress.step - len(progress.losses)
            when, first = self.began
            left = (now - when) * (self.steps - progress.step) / (progress.step - first)
            words += [f"{rate:,.0f} {self.counted}/s", f"{_minutes(left)} left"]
        return "  ".join(words)


def _minutes(seconds: float) -> str:
    return "{}:{:02}".format(*divmod(round(seconds), 60))
