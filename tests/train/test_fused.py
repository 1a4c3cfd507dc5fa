"""The fused step: the staged loop's parameters, late anchors within bounds, real errors."""

import dataclasses
import os
import signal
import threading

import jax
import numpy as np
import pytest
from loop_runs import STEPS, compile_parts, make_config, outcome, run, run_fused, without_times

from wmrl_jax.types import Outcome

WITHIN = dict(rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def compiled():
    return compile_parts()


@pytest.fixture(scope="module")
def staged(tmp_path_factory, compiled):
    return run(tmp_path_factory.mktemp("staged") / "run", compiled, make_config(wait=True))


def test_waiting_for_anchors_it_gives_the_parameters_of_the_staged_loop(tmp_path, compiled, staged):
    state, lines, ledger, step = run_fused(tmp_path, compiled, make_config(wait=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **WITHIN), state.params, staged[0].params
    )
    for ours, theirs in zip(without_times(lines), without_times(staged[1]), strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    assert ledger.summary()["groups_predicted"] == staged[2].summary()["groups_predicted"]
    assert ledger.summary()["groups_executed"] == STEPS
    assert step._cache_size() == 1


def test_on_eight_devices_it_gives_the_parameters_of_the_staged_loop_on_one(tmp_path):
    config = make_config(groups=8, wait=True)
    one, lines, _ = run(tmp_path / "one", compile_parts(groups=8), config)
    eight, ours, *_ = run_fused(tmp_path / "eight", compile_parts(devices=8, groups=8), config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **WITHIN), eight.params, one.params)
    assert [line["anchors_joined"] for line in ours] == [1.0] * STEPS
    assert [line["reward_executed"] for line in ours] == pytest.approx(
        [line["reward_executed"] for line in lines]
    )


def test_what_compiling_settles_is_not_left_to_the_world_model(tmp_path, compiled, monkeypatch):
    settled = Outcome("syntax_error", 0.0, None, None, "", None, 0.0)
    monkeypatch.setattr("wmrl_jax.train.fused.precheck", lambda text: settled)
    _, lines, *_ = run_fused(tmp_path, compiled, make_config(wait=True))
    assert [line["reward_predicted"] for line in lines] == [0.0] * STEPS
    assert [line["reward_executed"] for line in lines] == [0.0] * STEPS


def test_late_anchors_join_a_later_step_within_the_allowed_staleness(tmp_path, compiled):
    def slow(job, slot):
        threading.Event().wait(0.3)
        return outcome(job, slot)

    config = make_config(wait=False, max_staleness=2)
    _, lines, *_ = run_fused(tmp_path, compiled, config, execute=slow)
    staleness = [line["staleness"] for line in lines]
    assert lines[0]["anchors_joined"] == 0
    assert 1 <= max(staleness) <= 2
    assert sum(line["anchors_joined"] for line in lines) >= 2


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, compiled):
    config = make_config(wait=True)
    whole, expected, *_ = run_fused(tmp_path / "whole", compiled, config)

    def interrupt(job, slot):
        if len(seen) == 2 * config.train.group_size:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(job)
        return outcome(job, slot)

    seen = []
    with pytest.raises(KeyboardInterrupt, match="the checkpoint is saved"):
        run_fused(tmp_path / "parts", compiled, config, execute=interrupt)
    assert 0 < len(seen) < STEPS * config.train.group_size
    resumed, lines, *_ = run_fused(tmp_path / "parts", compiled, config)
    assert without_times(lines) == without_times(expected)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_a_staged_run_goes_on_from_a_fused_ones_checkpoint(tmp_path, compiled, staged):
    config = make_config(wait=True)
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    run_fused(tmp_path, compiled, short)
    state, lines, _ = run(tmp_path, compiled, config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **WITHIN), state.params, staged[0].params
    )


@pytest.mark.parametrize("callback", ["submit", "collect"])
def test_a_callback_that_raises_ends_the_run_with_its_own_error(
    tmp_path, compiled, monkeypatch, callback
):
    def broken(*args):
        raise ZeroDivisionError(f"{callback} is broken")

    monkeypatch.setattr(f"wmrl_jax.train.loop.{callback}", broken)
    with pytest.raises(ZeroDivisionError, match=f"{callback} is broken"):
        run_fused(tmp_path, compiled, make_config(wait=True))
