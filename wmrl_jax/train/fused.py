"""The fused step: a whole step of single-turn WMRL as one compiled program, and the loop around it.

Sampling, submission of the anchors, scoring, collection of what came back, both corrections and
the update are one XLA program; submission and collection are host callbacks on the run's queue.
The pieces are those of the staged loop: with `anchors.wait` both give the same parameters to the
order of float32 sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh

from wmrl_jax.method import debias
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.sandbox.callbacks import HostFaults
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.tasks.grading import precheck
from wmrl_jax.train import in_flight as flight
from wmrl_jax.train import loop
from wmrl_jax.train.checkpoint import Checkpoints
from wmrl_jax.train.config import Config
from wmrl_jax.train.in_flight import Executed, Pending
from wmrl_jax.train.ledger import Ledger
from wmrl_jax.train.mesh import by_group, put_by_group, replicated
from wmrl_jax.train.programs import decode_completions
from wmrl_jax.train.records import RunLog, StepEnd
from wmrl_jax.types import Outcome, Rollouts, ScoredBatch, TrainState

ScoreFn = Callable[[Any, Rollouts], jax.Array]
"""(parameters of the world model, rollouts) -> float32 [G, N]; usable inside `jax.jit`."""

ReferenceFn = Callable[[Any, Rollouts], jax.Array]
"""(parameters of the KL reference, rollouts) -> log-probs float32 [G, N, T]."""


class Frozen(NamedTuple):
    """Parameters that training leaves as they are.

    Attributes:
      world_model: None where nothing is predicted.
      reference: of the KL term; None without one.
    """

    world_model: Any
    reference: Any


class StepInputs(NamedTuple):
    """What a step is about.

    Attributes:
      tasks: int32 [G], indices into the host's task names.
      prompts: int32 [G, P], padded on the right.
      prompt_lengths: int32 [G].
    """

    tasks: jax.Array
    prompts: jax.Array
    prompt_lengths: jax.Array


class StepOutputs(NamedTuple):
    """What the host wants to know of a step.

    Attributes:
      metrics: of the train step.
      rollouts: what was sampled.
      is_anchor: bool [G].
    """

    metrics: Any
    rollouts: Rollouts
    is_anchor: jax.Array


FusedStepFn = Callable[[TrainState, Frozen, StepInputs], tuple[TrainState, StepOutputs]]


class AnchorHost:
    """The host's side of the fused step: prechecks, submits, carries and hands back anchors.

    Its two methods are called by the compiled program, `submit` before `collect` in every step.
    No array of the device is touched here but those that come as arguments.

    Args:
      config: its section anchors decides who is waited for.
      queue: executes and grades.
      tokenizer: of the agent.
      task_names: the training tasks.
      ledger: gets the seconds of waiting.
      waiting: groups in flight, already submitted, oldest first.

    Attributes:
      waiting: groups in flight now.
      back: anchor groups that joined the newest step.
      faults: what a callback raised; its `raised` goes around each call of the step.
    """

    def __init__(
        self,
        config: Config,
        queue: SandboxQueue,
        tokenizer: Tokenizer,
        task_names: Sequence[str],
        ledger: Ledger,
        waiting: Sequence[Pending] = (),
    ) -> None:
        self._config, self._queue, self._tokenizer = config, queue, tokenizer
        self._task_names, self._ledger = task_names, ledger
        self.waiting = list(waiting)
        self.back: list[Executed] = []
        self.faults = HostFaults()
        self._fresh: flight.Arrays = {}
        self._checked: list[list[Outcome | str]] = []
        self._anchored: list[Pending] = []
        self._places: list[int] = []

    def submit(self, step: Any, tasks: Any, rollouts: Rollouts, is_anchor: Any) -> np.int32:
        """Sends the step's anchors to the queue; returns their number, int32."""
        with self.faults.remembered():
            step, tasks, rollouts = jax.tree.map(np.asarray, (step, tasks, rollouts))
            completions = decode_completions(self._tokenizer, rollouts)
            self._checked = [[precheck(text) for text in group] for group in completions]
            self._fresh = loop.to_host(rollouts)
            self._places = np.flatnonzero(np.asarray(is_anchor)).tolist()
            self._anchored = [
                loop.submit(
                    loop.pending_group(
                        int(step), self._task_names[int(tasks[i])], i,
                        self._fresh, completions, self._checked,
                    ),
                    self._queue,
                )
                for i in self._places
            ]  # fmt: skip
            return np.int32(len(self._places))

    def collect(
        self, step: Any, submitted: Any, is_anchor: Any, predicted: Any, reference_logprobs: Any
    ) -> ScoredBatch:
        """The step's batch: returned anchors in the anchors' places, see `loop.assemble`.

        `submitted` is what `submit` returned: the compiled program must have called it before.
        """
        del submitted
        with self.faults.remembered(), self._ledger.time("waiting"):
            fresh, has_reference = self._fresh, reference_logprobs is not None
            fresh["predicted"] = loop.with_known(predicted, self._checked)
            if has_reference:
                fresh["reference_logprobs"] = np.asarray(reference_logprobs)
            self.waiting += [
                loop.with_scores(group, fresh, i)
                for group, i in zip(self._anchored, self._places, strict=True)
            ]
            self.back, self.waiting = loop.collect(
                self._config, self._queue, self.waiting, int(step), len(self._places)
            )
            return loop.assemble(fresh, np.asarray(is_anchor), self.back, has_reference)


def make_fused_step(
    config: Config,
    mesh: Mesh,
    host: AnchorHost,
    *,
    sample: loop.SampleFn,
    score: ScoreFn | None,
    reference: ReferenceFn | None,
    train_step: loop.StepFn,
) -> FusedStepFn:
    """Compiles a whole step into one program.

    The state is donated and replicated, inputs and rollouts are sharded over the mesh along the
    groups; the callbacks run once a step, with whole arrays. Which groups are anchors and what is
    drawn depends on the state's key and step alone, as in the staged loop.

    Args:
      config: as for the staged loop.
      mesh: the devices.
      host: the other end of the callbacks.
      sample: draws a step's rollouts; a compiled sampler is inlined.
      score: the world model; None where nothing is predicted.
      reference: of the KL term; None without one.
      train_step: from `make_train_step`.

    Returns:
      `(TrainState, Frozen, StepInputs) -> (TrainState, StepOutputs)`, compiled at its first call.
      Call it, and wait for its results, inside `host.faults.raised()`: what a callback raised then
      comes out as it was raised.
    """
    whole, split = replicated(mesh), by_group(mesh)

    def step(
        state: TrainState, frozen: Frozen, inputs: StepInputs
    ) -> tuple[TrainState, StepOutputs]:
        number = state.step
        rollouts = sample(
            state.params,
            inputs.prompts,
            inputs.prompt_lengths,
            loop.role_key(state.key, "sample", number),
        )
        is_anchor = loop.select_anchors(config, state.key, number)
        submitted = io_callback(
            host.submit, jax.ShapeDtypeStruct((), jnp.int32),
            number, inputs.tasks, rollouts, is_anchor,
        )  # fmt: skip
        # Scoring hangs on the submission, so that the anchors run while the device scores.
        scored, submitted = jax.lax.optimization_barrier((rollouts, submitted))
        ungraded = jnp.full(rollouts.lengths.shape, jnp.nan, jnp.float32)
        predicted = ungraded if score is None else score(frozen.world_model, scored)
        logprobs = None if reference is None else reference(frozen.reference, scored)
        batch = io_callback(
            host.collect,
            _batch_like(rollouts, reference is not None),
            number, submitted, is_anchor, predicted, logprobs,
        )  # fmt: skip
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, split), batch)
        state, metrics = train_step(state, batch)
        return state, StepOutputs(metrics, rollouts, is_anchor)

    return jax.jit(step, in_shardings=(whole, whole, split), donate_argnums=0)


def train(
    config: Config,
    step_fn: FusedStepFn,
    host: AnchorHost,
    frozen: Frozen,
    prompts: tuple[np.ndarray, np.ndarray],
    mesh: Mesh,
    state: TrainState,
    data: grain.DatasetIterator,
    checkpoints: Checkpoints,
    run_log: RunLog,
    ledger: Ledger,
) -> TrainState:
    """Runs the updates that are left, as `loop.train` does, by the fused step.

    The ledger counts a step as training, but for what it waited for executions.

    Args:
      config: the run's.
      step_fn: from `make_fused_step`.
      host: the one given to it, with the groups in flight.
      frozen: the parameters beside the state's.
      prompts: of all training tasks, int32 [tasks, P], and their lengths int32 [tasks].
      mesh: the devices.
      state: to go on from, see `loop.resume`.
      data: yields the tasks of a step.
      checkpoints: where to save.
      run_log: the records.
      ledger: the seconds.

    Raises:
      KeyboardInterrupt: after a checkpoint, when a signal ended the run.
      UserError: a checkpoint cannot be written.
    """
    late: StepEnd | None = None
    with loop.Signals() as signals:
        for step in range(int(state.step), config.train.steps):
            started = time.monotonic()
            chosen = next(data)
            inputs = (np.asarray(chosen, np.int32), *(rows[chosen] for rows in prompts))
            inputs = StepInputs(*put_by_group(mesh, inputs))
            with host.faults.raised(), ledger.time("training"):
                state, outputs = step_fn(state, frozen, inputs)
                if late is not None:
                    run_log.write(late)
                jax.block_until_ready(outputs.metrics)
            is_anchor = np.asarray(outputs.is_anchor)
            ledger.count_groups(
                executed=[group.slot_seconds for group in host.back],
                predicted=0 if frozen.world_model is None else int((~is_anchor).sum()),
            )
            late = StepEnd(
                step=step + 1,
                is_anchor=is_anchor,
                rollouts=outputs.rollouts,
                back=host.back,
                in_flight=len(host.waiting),
                metrics=outputs.metrics,
                curve=jax.device_get(debias.curve(state.debias)),
                seconds=time.monotonic() - started,
            )
            if loop.due(config, step, signals):
                run_log.write(late)
                late = None
                loop.save(config, checkpoints, state, data, host.waiting, run_log, ledger)
            loop.end_if_stopped(config, step, signals, checkpoints)
    checkpoints.wait()
    return state


def _batch_like(rollouts: Rollouts, reference: bool) -> ScoredBatch:
    """Shapes and dtypes of what `AnchorHost.collect` returns."""
    groups, size, length = rollouts.tokens.shape
    of = jax.ShapeDtypeStruct
    row = of((groups, size, length), jnp.float32)
    fields: dict[str, Any] = {
        "tokens": of(row.shape, jnp.int32),
        "loss_mask": of(row.shape, jnp.bool_),
        "behaviour_logprobs": row,
        "predicted": of((groups, size), jnp.float32),
        "executed": of((groups, size), jnp.float32),
        "is_anchor": of((groups,), jnp.bool_),
        "reference_logprobs": row if reference else None,
    }
    return ScoredBatch(**fields)
