"""The queue in compiled code."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from wmrl_jax.sandbox.callbacks import queue_callbacks
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.types import Job, Outcome


def valid(reward: float) -> Outcome:
    return Outcome("valid", reward, 2 * (reward - 0.5), 1.0, "", None, 0.1)


def decode(task: int, tokens: np.ndarray) -> Job:
    return Job(f"task{task}", " ".join(map(str, tokens)))


def execute(job: Job, slot: int) -> Outcome:
    """Reward 0.5 + (task + last token) / 100: what arrives tells which row was executed."""
    return valid(0.5 + (int(job.task.removeprefix("task")) + int(job.program.split()[-1])) / 100)


def batch(groups: int):
    tokens = jnp.arange(groups * 2 * 4, dtype=jnp.int32).reshape(groups, 2, 4)
    return (
        jnp.arange(groups, dtype=jnp.int32),
        tokens,
        jnp.ones(groups, jnp.int32),
        jnp.full((groups, 2), 3, jnp.int32),
        jnp.arange(groups) != 1,
    )


def expected(groups: int) -> np.ndarray:
    last = np.arange(groups * 2 * 4).reshape(groups, 2, 4)[:, :, 2]
    rewards = 0.5 + (np.arange(groups)[:, None] + last) / 100
    rewards[1] = np.nan
    return rewards


@pytest.fixture
def queue(tmp_path):
    with SandboxQueue(execute, journal=tmp_path / "journal.sqlite") as queue:
        yield queue


def test_rewards_arrive_at_their_rows_and_unchosen_groups_are_nan(queue):
    calls = queue_callbacks(queue, decode)
    step = jax.jit(lambda *args: calls.collect_all(calls.submit(*args)))
    np.testing.assert_allclose(step(*batch(3)), expected(3), rtol=1e-6)


def test_a_second_call_of_the_compiled_step_submits_again(queue):
    calls = queue_callbacks(queue, decode)
    step = jax.jit(lambda *args: calls.collect_all(calls.submit(*args)))
    first, second = step(*batch(3)), step(*batch(3))
    np.testing.assert_array_equal(first, second)
    assert queue.stats().submitted == 8
    assert queue.stats().executed == 4


def test_collect_gives_nan_for_what_is_not_there_and_the_reward_later(tmp_path):
    gate = threading.Event()

    def slow(job, slot):
        gate.wait(20)
        return execute(job, slot)

    with SandboxQueue(slow, slots=4, journal=tmp_path / "journal.sqlite") as queue:
        calls = queue_callbacks(queue, decode)
        tickets = jax.jit(calls.submit)(*batch(2))
        assert np.isnan(jax.jit(calls.collect)(tickets)).all()
        gate.set()
        np.testing.assert_allclose(jax.jit(calls.collect_all)(tickets)[0], expected(2)[0], 1e-6)


def test_each_device_of_a_shard_map_submits_its_own_groups(queue):
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("groups",))
    calls = queue_callbacks(queue, decode)
    groups = 2 * len(devices)
    spec = PartitionSpec("groups")
    step = jax.jit(
        jax.shard_map(
            lambda *args: calls.collect_all(calls.submit(*args)),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
    )
    np.testing.assert_allclose(step(*batch(groups)), expected(groups), rtol=1e-6)


def test_an_error_in_a_callback_ends_the_call_with_that_error(queue):
    def broken(task, tokens):
        raise LookupError("no task has the index 7")

    calls = queue_callbacks(queue, broken)
    with pytest.raises(LookupError, match="no task has the index 7"), calls.errors():
        jax.block_until_ready(jax.jit(calls.submit)(*batch(2)))


def test_known_outcomes_are_not_executed(queue):
    calls = queue_callbacks(queue, lambda task, tokens: valid(0.75))
    rewards = jax.jit(lambda *args: calls.collect(calls.submit(*args)))(*batch(2))
    assert rewards[0, 0] == 0.75
    assert queue.stats().executed == 0
