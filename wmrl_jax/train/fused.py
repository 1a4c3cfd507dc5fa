"""The fused step: a whole step of single-turn WMRL as one compiled program, and the loop around it.

Sampling, submission of the anchors, scoring, collection of what came back, both corrections and
the update are one XLA program; submission and collection are host callbacks on the run's queue.
The pieces are those of the staged loop: with `anchors.wait` both give the same parameters to the
order of float32 sums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from wmrl_jax.method import debias
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.tasks.grading import precheck
from wmrl_jax.train import in_flight as flight
from wmrl_jax.train import loop
from wmrl_jax.train.checkpoint import Checkpoints
from wmrl_jax.train.config import Config
from wmrl_jax.train.in_flight import Executed, Pending
from wmrl_jax.train.ledger import Ledger
from wmrl_jax.train.mesh import AXIS, by_group, put_by_group, replicated
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

    Its methods `submit` and `collect` are called by the compiled program with NumPy arrays, once a
    step, in this order. They never raise: a device that fails would leave the others waiting for it
    in a collective. What went wrong is kept for `check`, and the step goes on with an empty batch.

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
      fault: the first thing that went wrong here; None so far.
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
        self.fault: BaseException | None = None
        self._fresh: flight.Arrays = {}
        self._checked: list[list[Outcome | str]] = []
        self._anchored: list[Pending] = []
        self._places: list[int] = []

    def submit(
        self, step: np.ndarray, tasks: np.ndarray, rollouts: Rollouts, is_anchor: np.ndarray
    ) -> np.ndarray:
        """Sends the step's anchors to the queue; returns `is_anchor`, bool [G]."""
        with self._keeping_faults():
            completions = decode_completions(self._tokenizer, rollouts)
            self._checked = [[precheck(text) for text in group] for group in completions]
            self._fresh = loop.to_host(rollouts)
            self._places = np.flatnonzero(is_anchor).tolist()
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
        return is_anchor

    def collect(
        self,
        step: np.ndarray,
        is_anchor: np.ndarray,
        predicted: np.ndarray,
        reference_logprobs: np.ndarray | None,
    ) -> ScoredBatch:
        """The step's batch: returned anchors in the anchors' places, see `loop.assemble`."""
        has_reference = reference_logprobs is not None
        batch = self._empty_batch(has_reference)
        if self.fault is not None:
            return batch
        with self._keeping_faults(), self._ledger.time("waiting"):
            fresh = self._fresh
            fresh["predicted"] = loop.with_known(predicted, self._checked)
            if has_reference:
                fresh["reference_logprobs"] = reference_logprobs
            self.waiting += [
                loop.with_scores(group, fresh, i)
                for group, i in zip(self._anchored, self._places, strict=True)
            ]
            self.back, self.waiting = loop.collect(
                self._config, self._queue, self.waiting, int(step), len(self._places)
            )
            batch = loop.assemble(fresh, is_anchor, self.back, has_reference)
        return batch

    def check(self) -> None:
        """To be called after each step, when its results are there.

        Raises:
          BaseException: what went wrong in a callback, as it was raised there.
        """
        if self.fault is not None:
            raise self.fault

    @contextmanager
    def _keeping_faults(self) -> Iterator[None]:
        try:
            yield
        except BaseException as fault:
            self.fault = fault

    def _empty_batch(self, has_reference: bool) -> ScoredBatch:
        groups, size = self._config.train.groups, self._config.train.group_size
        length = self._config.model.prompt_tokens + self._config.model.new_tokens
        nothing = flight.blank(groups, size, length)
        return loop.assemble(nothing, np.zeros(groups, np.bool_), [], has_reference)


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
    groups; the host's methods run once a step, with whole arrays. Which groups are anchors and what
    is drawn depends on the state's key and step alone, as in the staged loop.

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
      Call it, wait for its results, then call `host.check()`: it raises what a callback raised.
      The call itself raises ValueError for inputs of another number of groups than `train.groups`.
    """
    whole, split = replicated(mesh), by_group(mesh)

    def step(
        state: TrainState, frozen: Frozen, inputs: StepInputs
    ) -> tuple[TrainState, StepOutputs]:
        if inputs.tasks.shape != (config.train.groups,):
            raise ValueError(
                f"inputs.tasks has the shape {inputs.tasks.shape}; with train.groups "
                f"{config.train.groups} it must be ({config.train.groups},)"
            )
        number = state.step
        rollouts = sample(
            state.params,
            inputs.prompts,
            inputs.prompt_lengths,
            loop.role_key(state.key, "sample", number),
        )
        is_anchor = loop.select_anchors(config, state.key, number)
        submitted = _on_host(
            host.submit,
            jax.ShapeDtypeStruct(is_anchor.shape, jnp.bool_),
            mesh,
            (number, inputs.tasks, rollouts, is_anchor),
        )
        # Scoring hangs on the submission, so that the anchors run while the device scores.
        scored, submitted = jax.lax.optimization_barrier((rollouts, submitted))
        ungraded = jnp.full(rollouts.lengths.shape, jnp.nan, jnp.float32)
        predicted = ungraded if score is None else score(frozen.world_model, scored)
        logprobs = None if reference is None else reference(frozen.reference, scored)
        like = _batch_like(rollouts, reference is not None)
        batch = _on_host(host.collect, like, mesh, (number, submitted, predicted, logprobs))
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
      BaseException: what a callback raised, after the step under way and without a checkpoint.
    """
    late: StepEnd | None = None
    with loop.Signals() as signals:
        for step in range(int(state.step), config.train.steps):
            started = time.monotonic()
            chosen = next(data)
            inputs = (np.asarray(chosen, np.int32), *(rows[chosen] for rows in prompts))
            inputs = StepInputs(*put_by_group(mesh, inputs))
            with ledger.time("training"):
                state, outputs = step_fn(state, frozen, inputs)
                if late is not None:
                    run_log.write(late)
                jax.block_until_ready(outputs.metrics)
            host.check()
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


_PIECE = 1 << 16
"""Bytes of one argument of a callback. The CPU runtime copies larger ones (from 100 kB on) on the
threads that callbacks block, and waits for ever where all of them are blocked."""


def _on_host(function: Callable[..., Any], like: Any, mesh: Mesh, args: tuple[Any, ...]) -> Any:
    """Calls a host function from compiled code, once and with whole arrays for all devices.

    Each device waits for it in a callback of its own. Were one to call and the others to wait for
    its answer in a collective, the CPU runtime would end the process within a minute.

    Args:
      function: of NumPy arrays in the structure of `args`; must not raise.
      like: shapes and dtypes of what it returns, arrays with a leading axis [G].
      mesh: the devices; each gets its share of the answer's groups.
      args: trees of arrays.
    """
    leaves, tree = jax.tree.flatten(args)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shapes = [leaf.shape for leaf in leaves]
    once = _Once(
        lambda pieces: function(
            *tree.unflatten(
                np.concatenate([np.asarray(piece) for piece in row]).reshape(shape)
                for row, shape in zip(pieces, shapes, strict=True)
            )
        ),
        mesh.size,
    )

    def answer(device: Any, pieces: list[list[Any]]) -> Any:
        own = int(np.asarray(device))
        return jax.tree.map(lambda x: np.split(x, mesh.size)[own], once(pieces))

    def call(*leaves: jax.Array) -> Any:
        share = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] // mesh.size, *x.shape[1:]), x.dtype), like
        )
        pieces = [_pieces(leaf) if on_cpu else [leaf.reshape(-1)] for leaf in leaves]
        return io_callback(answer, share, jax.lax.axis_index(AXIS), pieces)

    return jax.shard_map(
        call,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )(*leaves)


def _pieces(x: jax.Array) -> list[jax.Array]:
    """The entries of an array in order, as vectors of at most `_PIECE` bytes."""
    entries, length = x.reshape(-1), _PIECE // x.dtype.itemsize
    return [entries[i : i + length] for i in range(0, entries.size, length)]


class _Once:
    """A function that each device calls once a step, and that runs for the first of them.

    No device asks again before all have their answer: the step's batch, made of it, is in between.
    """

    def __init__(self, function: Callable[[Any], Any], devices: int) -> None:
        self._function, self._devices = function, devices
        self._lock = threading.Lock()
        self._left = 0
        self._answer: Any = None

    def __call__(self, argument: Any) -> Any:
        with self._lock:
            if self._left == 0:
                self._answer = self._function(argument)
                self._left = self._devices
            self._left -= 1
            return self._answer


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
