"""Submit and collect from inside compiled code, by host callbacks.

Shapes: G groups, N rollouts per group, T tokens. Both calls work under `jit` and inside
`shard_map`, where each device's callback sees its own shard. `collect` depends on the tickets
that `submit` returned, so compiled code cannot reorder the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.types import Job, Outcome

DecodeFn = Callable[[int, np.ndarray], Job | Outcome]
"""(task index, the completion's token ids) -> what to execute, or what is known without it."""

NO_TICKET = -1
"""The ticket of a row that was not submitted; its reward is NaN."""

SubmitFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
CollectFn = Callable[[jax.Array], jax.Array]


class QueueCallbacks(NamedTuple):
    """The queue as two functions of arrays.

    Attributes:
      submit: (tasks int32 [G], tokens int32 [G, N, T], starts int32 [G], lengths int32 [G, N],
        chosen bool [G]) -> tickets int32 [G, N]. Tokens `starts[g] : lengths[g, n]` are the
        completion; rows of groups not chosen get `NO_TICKET` and are never decoded.
      collect: tickets int32 of any shape -> rewards float32 of that shape, NaN where the outcome
        is not there yet or unknown. Does not wait; a ticket that was ready is given up.
      collect_all: the same, but waits until every outcome is there.
      errors: context manager around a call of compiled code: raises the callback's own
        exception instead of the runtime's report that some callback failed.
    """

    submit: SubmitFn
    collect: CollectFn
    collect_all: CollectFn
    errors: Callable[[], object]


def queue_callbacks(queue: SandboxQueue, decode: DecodeFn) -> QueueCallbacks:
    """Makes the two calls of `queue` usable in compiled code.

    Args:
      queue: where jobs go.
      decode: makes a job of a row of tokens; called on the host.
    """
    faults = HostFaults()

    def submit_on_host(tasks, tokens, starts, lengths, chosen) -> np.ndarray:
        with faults.remembered():
            tasks, tokens, starts, lengths, chosen = map(
                np.asarray, (tasks, tokens, starts, lengths, chosen)
            )
            tickets = np.full(lengths.shape, NO_TICKET, np.int32)
            for g in np.flatnonzero(chosen):
                rows = [row[starts[g] : n] for row, n in zip(tokens[g], lengths[g], strict=True)]
                tickets[g] = queue.submit([decode(int(tasks[g]), row) for row in rows])
            return tickets

    def collect_on_host(tickets, timeout: float | None) -> np.ndarray:
        with faults.remembered():
            tickets = np.asarray(tickets)
            wanted = [int(ticket) for ticket in tickets.ravel() if ticket != NO_TICKET]
            outcomes = queue.collect(wanted, timeout)
            rewards = [_reward(outcomes.get(int(ticket))) for ticket in tickets.ravel()]
            return np.asarray(rewards, np.float32).reshape(tickets.shape)

    def submit(
        tasks: jax.Array, tokens: jax.Array, starts: jax.Array, lengths: jax.Array,
        chosen: jax.Array,
    ) -> jax.Array:  # fmt: skip
        shape = jax.ShapeDtypeStruct(lengths.shape, jnp.int32)
        return io_callback(submit_on_host, shape, tasks, tokens, starts, lengths, chosen)

    def collector(timeout: float | None) -> CollectFn:
        def collect(tickets: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(tickets.shape, jnp.float32)
            return io_callback(lambda ids: collect_on_host(ids, timeout), shape, tickets)

        return collect

    return QueueCallbacks(submit, collector(0.0), collector(None), faults.raised)


class HostFaults:
    """Exceptions of host callbacks, kept as they are: the runtime turns them into text."""

    def __init__(self) -> None:
        self._faults: list[BaseException] = []

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Around the body of a callback."""
        try:
            yield
        except BaseException as fault:
            self._faults.append(fault)
            raise

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Around a call of compiled code and the wait for its results.

        Raises:
          BaseException: the first callback's own, instead of the runtime's report of it.
        """
        self._faults.clear()
        try:
            yield
        except jax.errors.JaxRuntimeError as report:
            if self._faults:
                raise self._faults[0] from report
            raise


def _reward(outcome: Outcome | None) -> float:
    return math.nan if outcome is None else outcome.reward
