"""The planner: arrivals by brute force, prices by hand, and the world model of a run's pairs."""

import json

import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.train import planning
from wmrl_jax.train.planning import FRACTIONS, make_plan, scores_from_pairs


def write_pairs(folder, n, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    executed = rng.choice([0.1, 0.3, 0.5, 0.7, 0.9], size=n)
    predicted = 0.2 + 0.5 * executed + noise * rng.normal(size=n)
    lines = [
        json.dumps({"step": 1, "predicted": float(p), "executed": float(e)})
        for p, e in zip(predicted, executed, strict=True)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")


def test_arrival_is_the_first_step_whose_moving_mean_is_at_the_target():
    rng = np.random.default_rng(0)
    gaps = np.exp(-np.arange(200) / 40) * (1 + 0.2 * rng.normal(size=(5, 200)))
    for row, got in zip(gaps, planning._arrival(gaps, 0.2), strict=True):
        means = [row[i - 20 : i].mean() for i in range(20, 201)]
        assert got == 20 + next(i for i, m in enumerate(means) if m <= 0.2)


def test_a_target_out_of_reach_is_never_arrived_at():
    assert planning._arrival(np.ones((1, 50)), 0.5)[0] == np.inf


def test_a_price_is_steps_times_the_price_of_a_step():
    steps = np.array([100.0] + [50.0] * (len(FRACTIONS) - 1))
    gap = np.array([np.repeat([[1.0] * int(n) + [0.0] * (300 - int(n))], 3, axis=0) for n in steps])
    prices = np.arange(1.0, len(FRACTIONS) + 1)
    plan = planning._priced(gap, prices, 0.05, seed=0)
    arrived = [row.steps for row in plan.rows]
    assert arrived == [n + 19 for n in steps]  # the mean of 20 gaps is below 0.05 at the 20th zero
    assert [row.cost for row in plan.rows] == list(np.array(arrived) * prices)
    assert plan.fraction == FRACTIONS[0]
    assert plan.sure == 1.0
    assert plan.saving == pytest.approx(1 - 119 * 1 / (69 * len(FRACTIONS)))


def test_a_plan_that_no_fraction_reaches_says_so():
    gap = np.ones((len(FRACTIONS), 2, 40))
    plan = planning._priced(gap, np.ones(len(FRACTIONS)), 0.05, seed=0)
    assert np.isnan(plan.fraction)
    assert plan.sure == 0.0


def test_pairs_of_a_run_give_back_the_world_model_that_made_them(tmp_path):
    write_pairs(tmp_path, 4000, noise=0.1)
    rewards, means, noise = scores_from_pairs(tmp_path)
    np.testing.assert_allclose(means, 0.2 + 0.5 * rewards, atol=0.02)
    assert noise == pytest.approx(0.1, rel=0.05)


def test_a_folder_without_pairs_and_one_with_few_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no pairs\.jsonl"):
        scores_from_pairs(tmp_path)
    write_pairs(tmp_path, 5)
    with pytest.raises(UserError, match="holds 5 anchor pairs, a plan needs 32"):
        scores_from_pairs(tmp_path)


def test_an_unknown_shape_is_refused_with_the_nearest_right_one():
    with pytest.raises(UserError, match=r"satrating.*saturating"):
        make_plan(cost_execution=1.0, cost_score=1.0, bias_shape="satrating")


@pytest.mark.slow
def test_dear_executions_ask_for_few_anchors_and_free_ones_for_all():
    dear = make_plan(cost_execution=200.0, cost_score=0.5, bias_size=0.3, noise=0.1, runs=16)
    assert 0.0 < dear.fraction <= 0.25
    assert dear.saving > 0.5
    assert dear.saving_low <= dear.saving <= dear.saving_high
    free = make_plan(cost_execution=0.001, cost_score=0.5, bias_size=0.3, noise=0.1, runs=16)
    assert free.fraction == 1.0
