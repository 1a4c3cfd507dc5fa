"""The fused step: the staged loop's parameters, late anchors within bounds, real errors."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import (
    STEPS,
    Exchange,
    compile_parts,
    make_config,
    outcome,
    run,
    run_fused,
    score,
    without_times,
)

from wmrl_jax.train.fused import StepInputs, make_fused_step
from wmrl_jax.types import Outcome

WITHIN = dict(rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def compiled():
    return compile_parts()


@pytest.fixture(scope="module")
def eight():
    """Parts for eight groups on eight devices, with their fused step."""
    parts = compile_parts(devices=8, groups=8)
    exchange: Any = Exchange()
    step = make_fused_step(
        make_config(groups=8, wait=True), parts.mesh, exchange,
        sample=parts.sampler,
        score=lambda world_model, rollouts: score(rollouts) + 0 * world_model,
        reference=None,
        train_step=parts.steps[True],
    )  # fmt: skip
    parts.fused[True] = (exchange, step)
    return parts


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


def test_on_eight_devices_it_gives_the_parameters_of_the_staged_loop_on_one(tmp_path, eight):
    config = make_config(groups=8, wait=True)
    one, lines, _ = run(tmp_path / "one", compile_parts(groups=8), config)
    state, ours, _, step = run_fused(tmp_path / "eight", eight, config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **WITHIN), state.params, one.params)
    assert step._cache_size() == 1
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
@pytest.mark.parametrize("devices", [1, 8])
def test_a_callback_that_raises_ends_the_run_with_its_own_error(
    tmp_path, request, monkeypatch, callback, devices
):
    def broken(*args):
        raise ZeroDivisionError(f"{callback} is broken")

    parts = request.getfixturevalue("compiled" if devices == 1 else "eight")
    monkeypatch.setattr(f"wmrl_jax.train.loop.{callback}", broken)
    with pytest.raises(ZeroDivisionError, match=f"{callback} is broken"):
        run_fused(tmp_path, parts, make_config(groups=parts.groups, wait=True))
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_another_number_of_groups_than_configured_is_refused(compiled):
    exchange: Any = Exchange()
    step = make_fused_step(
        make_config(groups=4), compiled.mesh, exchange,
        sample=compiled.sampler, score=None, reference=None, train_step=compiled.steps[False],
    )  # fmt: skip
    state: Any = None
    frozen: Any = None
    rows = jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match=r"must be \(4,\)"):
        step(state, frozen, StepInputs(rows, jnp.zeros((8, 4), jnp.int32), rows))


SLOW_AND_LARGE = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
from wmrl_jax.train.config import Config, TrainConfig
from wmrl_jax.train.fused import Frozen, StepInputs, make_fused_step
from wmrl_jax.train.mesh import make_mesh
from wmrl_jax.types import Rollouts, ScoredBatch, TrainState

G, N, T = 8, 4, 4096

class Host:
    seen = []
    def submit(self, step, tasks, rollouts, is_anchor):
        self.seen.append(int(step))
        assert (rollouts.tokens.ravel() == np.arange(G * N * T)).all()
        return is_anchor
    def collect(self, step, is_anchor, predicted, reference_logprobs):
        time.sleep(2)
        rows = np.broadcast_to(np.arange(G, dtype=np.float32)[:, None, None], (G, N, T))
        return ScoredBatch(
            rows.astype(np.int32), rows > 0, rows, predicted, predicted, is_anchor, None
        )

def sample(params, prompts, lengths, key):
    tokens = jnp.arange(G * N * T, dtype=jnp.int32).reshape(G, N, T)
    ends = jnp.full((G, N), T)
    return Rollouts(tokens, tokens >= 0, tokens / 1.0, lengths, ends, ends > 0)

def train_step(state, batch):
    return state._replace(step=state.step + 1), jnp.sum(batch.tokens[:, 0, 0])

step = make_fused_step(
    Config(train=TrainConfig(groups=G, group_size=N)), make_mesh(), Host(),
    sample=sample, score=None, reference=None, train_step=train_step,
)
state = TrainState(jnp.ones(3), None, None, None, jax.random.key(0), jnp.zeros((), jnp.int32))
rows = jnp.ones(G, jnp.int32)
for _ in range(2):
    state, outputs = step(state, Frozen(None, None), StepInputs(rows, rows[:, None], rows))
print(len(jax.devices()), Host.seen, int(outputs.metrics))
"""


@pytest.mark.parametrize("devices", [1, 8])
def test_executions_may_take_longer_than_devices_wait_for_each_other_and_arguments_be_large(
    devices,
):
    limit = "--xla_cpu_collective_call_{}_timeout_seconds=1"
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    flags += [limit.format("warn_stuck"), limit.format("terminate")]
    done = subprocess.run(
        [sys.executable, "-c", SLOW_AND_LARGE],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == f"{devices} [0, 1] 28\n", done.stderr[-3000:]
