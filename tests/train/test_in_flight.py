"""Groups in flight: what a checkpoint stores of them comes back."""

import numpy as np

from wmrl_jax.train.in_flight import Executed, Pending, blank, pack, unpack
from wmrl_jax.types import Job, Outcome

SETTLED = Outcome("syntax_error", 0.0, None, None, "line 1", "SyntaxError", 0.0)


def make_group(seed):
    rng = np.random.default_rng(seed)
    arrays = {name: value[0] for name, value in blank(1, 3, 5).items()}
    arrays = {
        name: rng.uniform(0, 9, value.shape).astype(value.dtype) for name, value in arrays.items()
    }
    work = [Job("t", "x = 1"), SETTLED, Job("t", "x = 2")]
    return Pending(seed, "t", arrays, ["a", "b", "c"], work, [4, None, 5])


def test_packed_groups_come_back_with_their_jobs_unsubmitted():
    groups = [make_group(0), make_group(1)]
    back = unpack(*pack(groups, blank(4, 3, 5)))
    assert len(back) == 2
    for group, got in zip(groups, back, strict=True):
        assert got.tickets == [None, None, None]
        assert got._replace(tickets=group.tickets, arrays=group.arrays) == group
        for name, value in group.arrays.items():
            np.testing.assert_array_equal(got.arrays[name], value)


def test_rewards_and_slot_seconds_are_those_of_the_outcomes():
    unknown = Outcome("unknown", float("nan"), None, None, "", None, 1.5, "sandbox down")
    executed = Executed(make_group(0), [SETTLED, unknown, SETTLED._replace(seconds=0.25)])
    np.testing.assert_array_equal(executed.rewards, np.asarray([0, np.nan, 0], np.float32))
    assert executed.slot_seconds == 1.75
