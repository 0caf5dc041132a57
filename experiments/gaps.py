"""How far a recipe's loss is from the baseline's, and how sure that is."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Gap:
    """Relative gaps over paired seeds, in percent; above zero is worse than the baseline.

    Attributes:
      per_seed: 100 * (loss / baseline loss - 1) of each seed.
      mean: their mean.
      ci95: Student's t interval of the mean at 95% confidence; None for a single seed.
    """

    per_seed: tuple[float, ...]
    mean: float
    ci95: tuple[float, float] | None


def relative_gap(losses: Sequence[float], baseline: Sequence[float]) -> Gap:
    """The gap between two recipes run with the same seeds, in the same order, at least one."""
    per_seed = 100 * (np.asarray(losses) / np.asarray(baseline) - 1)
    mean = float(per_seed.mean())
    return Gap(tuple(per_seed.tolist()), mean, _interval(per_seed, mean))


def _interval(per_seed: np.ndarray, mean: float) -> tuple[float, float] | None:
    n = len(per_seed)
    if n == 1:
        return None
    quantile = stdtrit(n - 1, (1 + CONFIDENCE) / 2)
    half = float(quantile * per_seed.std(ddof=1) / math.sqrt(n))
    return mean - half, mean + half
