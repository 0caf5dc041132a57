"""process_table: what it says of losses that agree and of those that do not."""

import numpy as np

from experiments.process_table import CASES, Joined, row


def test_a_row_says_where_losses_part_and_how_far():
    first, two = np.array([2.0, 1.0, 0.5]), Joined(2, 2)
    assert row(two, first, None) == "| 2 x 2 | 4 | 0.500000 | compared with |"
    assert row(two, first.copy(), first) == "| 2 x 2 | 4 | 0.500000 | yes |"
    alone = Joined(1, 4, coordinated=False)
    said = row(alone, np.array([2.0, 1.001, 0.51]), first)
    assert said == (
        "| 1 x 4, XLA adds | 4 | 0.510000 | from step 2 on 0.001 apart, at the end 0.02 |"
    )


def test_all_of_a_case_have_as_many_devices():
    for cases, devices in zip(CASES, (2, 4), strict=True):
        assert {joined.processes * joined.devices for joined in cases} == {devices}
        assert cases[0].processes == 1
