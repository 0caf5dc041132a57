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
def display(console: Console, label: str, steps: int) -> Iterator[Show]:
    """Gives a function to call with every progress of one run of `steps` steps."""
    clock = _Clock(steps)
    if console.is_terminal:
        bar_column = BarColumn(bar_width=8)  # leaves room for the words on 80 columns
        columns = (TextColumn("{task.description}"), bar_column, TextColumn("{task.fields[text]}"))
        with Bar(*columns, console=console) as bar:
            task = bar.add_task(label, total=steps, text="compiling")
            yield lambda p: bar.update(task, completed=p.step, text=clock.describe(p))
    else:
        console.print(f"{label}: compiling", highlight=False)
        last_line = -LINE_EVERY

        def show(progress: Progress) -> None:
            nonlocal last_line
            words, now = clock.describe(progress), time.monotonic()
            if progress.step == steps or now - last_line >= LINE_EVERY:
                last_line = now
                console.print(f"{label}: {words}", highlight=False, soft_wrap=True)

        yield show


class _Clock:
    """Words for a progress; the time left is reckoned from the time since the first one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.started: float | None = None
        self.validation = math.nan  # the last one measured

    def describe(self, progress: Progress) -> str:
        now = time.monotonic()
        if self.started is None:
            self.started = now
        if progress.validation_loss is not None:
            self.validation = progress.validation_loss
        words = [f"step {progress.step}/{self.steps}"]
        if progress.train_loss is not None:
            words.append(f"loss {progress.train_loss:.3f}")
        words.append(f"val {self.validation:.3f}")
        if progress.tokens_per_second is not None:
            left = (now - self.started) * (self.steps / progress.step - 1)
            words += [f"{progress.tokens_per_second:,.0f} tok/s", f"{_minutes(left)} left"]
        return "  ".join(words)


def _minutes(seconds: float) -> str:
    return "{}:{:02}".format(*divmod(round(seconds), 60))
