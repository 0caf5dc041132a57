"""Schedules: which recipe at which step."""

import numpy as np
import pytest

import fp4jax as fp4

BF16, NVFP4 = fp4.recipes.bf16(), fp4.recipes.nvfp4()


@pytest.mark.parametrize(
    ("forward", "backward", "switched"),
    [
        (True, False, {"fprop"}),
        (False, True, {"dgrad", "wgrad"}),
        (True, True, {"fprop", "dgrad", "wgrad"}),
    ],
)
def test_late_switch(forward, backward, switched):
    schedule = fp4.Schedule.late_bf16(NVFP4, 0.82, 100, forward=forward, backward=backward)
    assert [schedule.at(step) == NVFP4 for step in (0, 81)] == [True, True]
    late = schedule.at(82)
    assert late == schedule.at(99)
    for gemm in ("fprop", "dgrad", "wgrad"):
        expected = BF16 if gemm in switched else NVFP4
        assert getattr(late, gemm) == getattr(expected, gemm)


def test_steps_and_fractions():
    phases = ((0, BF16), (10, NVFP4), (0.5, BF16))
    schedule = fp4.Schedule(phases, steps=1000)
    assert schedule.starts == (0, 10, 500)
    assert [schedule.at(s).name for s in (0, 9, 10, 499, 500, 5000)] == [
        "bf16",
        "bf16",
        "nvfp4",
        "nvfp4",
        "bf16",
        "bf16",
    ]
    assert schedule.name == "bf16; nvfp4 from 10; bf16 from 500"
    assert schedule.needs_key
    assert schedule == fp4.Schedule(phases, steps=1000)
    numpy_ints = fp4.Schedule([(np.int64(start), r) for start, r in phases[:2]], steps=1000)
    assert numpy_ints.starts == (0, 10)
    assert hash(schedule) == hash(fp4.Schedule(phases, steps=1000))


def test_a_policy_knows_when_it_changes():
    rules = [
        fp4.Rule("a", fp4.Schedule.late_bf16(NVFP4, 70)),
        fp4.Rule("b", fp4.Schedule(((0, BF16), (20, NVFP4)))),
        fp4.Rule("c", NVFP4),
    ]
    assert fp4.Policy(rules).starts == (0, 20, 70)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp4.Schedule(((5, BF16),)), ValueError, r"start at step 0 and rise, not at \[5\]"),
        (lambda: fp4.Schedule(()), ValueError, r"start at step 0 and rise, not at \[\]"),
        (lambda: fp4.Schedule(((0, BF16), (0, NVFP4))), ValueError, r"rise, not at \[0, 0\]"),
        (lambda: fp4.Schedule(((0, BF16), (0.5, NVFP4))), ValueError, "0.5 is a fraction"),
        (lambda: fp4.Schedule(((0, BF16), (1.5, NVFP4)), 9), ValueError, "1.5 is a fraction"),
        (lambda: fp4.Schedule(((0, BF16),), 0), ValueError, "steps must be at least 1, not 0"),
        (lambda: fp4.Schedule(((0, "bf16"),)), TypeError, "phases must hold recipes, not 'bf16'"),
        (lambda: fp4.Schedule(((0, BF16),)).at(-1), ValueError, "step must be at least 0, not -1"),
        (
            lambda: fp4.Schedule.late_bf16(NVFP4, 5, forward=False),
            ValueError,
            "forward or backward must be True",
        ),
    ],
)
def test_what_cannot_be_honoured_raises(call, error, message):
    with pytest.raises(error, match=message):
        call()
