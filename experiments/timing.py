"""Medians of interleaved runs: rivals take turns, so that a noisy machine slows them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def medians(contenders: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median wall time in milliseconds of each function, after warm-up.

    Args:
      contenders: by name, functions of nothing that return arrays.
      repeats: timed rounds; each round calls every function once.
    """
    for run in contenders.values():
        for _ in range(3):
            jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
