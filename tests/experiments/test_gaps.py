"""Gaps to the baseline against figures worked out by hand."""

import numpy as np
import pytest

from experiments.gaps import relative_gap


def test_a_single_seed_has_a_gap_and_no_interval():
    gap = relative_gap([1.02], [1.00])
    assert gap.per_seed == pytest.approx((2.0,))
    assert gap.mean == pytest.approx(2.0)
    assert gap.ci95 is None


def test_a_gap_below_zero_is_better_than_the_baseline():
    assert relative_gap([0.99], [1.0]).mean == pytest.approx(-1.0)


def test_two_seeds_by_hand():
    # Gaps of 1% and 3%: mean 2, standard deviation sqrt(2), over sqrt(2): 1.
    # Student's t with one degree of freedom is Cauchy: its 97.5% quantile is tan(0.475 pi).
    gap = relative_gap([2.02, 4.12], [2.0, 4.0])
    assert gap.per_seed == pytest.approx((1.0, 3.0))
    assert gap.ci95 == pytest.approx((2 - 12.7062047, 2 + 12.7062047))
    assert np.tan(0.475 * np.pi) == pytest.approx(12.7062047)


def test_three_seeds_by_hand():
    # Gaps of 1, 2 and 3%: mean 2, standard deviation 1, over sqrt(3): 0.57735.
    # For two degrees of freedom the quantile is (2p - 1) sqrt(2 / (4p(1 - p))) = 4.30265.
    gap = relative_gap([1.01, 2.04, 5.15], [1.0, 2.0, 5.0])
    assert gap.mean == pytest.approx(2.0)
    half = 4.30265273 * 0.57735027
    assert gap.ci95 == pytest.approx((2 - half, 2 + half))


def test_the_mean_is_of_the_gaps_not_the_gap_of_the_means():
    assert relative_gap([1.1, 10.0], [1.0, 10.0]).mean == pytest.approx(5.0)
