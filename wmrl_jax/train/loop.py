"""The training loop, written out: data, sample, score, submit and collect, step, log, save."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wmrl_jax.method import anchors, debias
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.tasks.grading import precheck
from wmrl_jax.train import in_flight as flight
from wmrl_jax.train.checkpoint import Checkpoints
from wmrl_jax.train.config import Config
from wmrl_jax.train.in_flight import Executed, Pending
from wmrl_jax.train.ledger import Ledger
from wmrl_jax.train.mesh import put_by_group
from wmrl_jax.train.programs import decode_completions
from wmrl_jax.train.records import RunLog, StepEnd
from wmrl_jax.types import Job, Outcome, Rollouts, ScoredBatch, TrainState

log = logging.getLogger(__name__)

SampleFn = Callable[[Any, jax.Array, jax.Array, jax.Array], Rollouts]
"""(params, prompts int32 [G, P], prompt_lengths int32 [G], key) -> rollouts."""

ScoreFn = Callable[[Rollouts], jax.Array]
"""rollouts -> float32 [G, N], the world model's score of each, NaN where it gives none."""

LogprobFn = Callable[[Rollouts], jax.Array]
"""rollouts -> float32 [G, N, T], log-probabilities under the KL reference policy."""

StepFn = Callable[[TrainState, ScoredBatch], tuple[TrainState, Any]]


class Parts(NamedTuple):
    """What a run is composed of.

    Attributes:
      task_names: the training tasks; the data iterator yields indices into them.
      prompts: int32 [tasks, P], right-padded.
      prompt_lengths: int32 [tasks].
      tokenizer: of the agent.
      sample: draws a step's rollouts.
      score: the world model; None when nothing is predicted.
      reference: the KL reference; None without a KL term.
      train_step: the one compiled step.
      queue: executes and grades anchors.
      mesh: the devices.
    """

    task_names: tuple[str, ...]
    prompts: np.ndarray
    prompt_lengths: np.ndarray
    tokenizer: Tokenizer
    sample: SampleFn
    score: ScoreFn | None
    reference: LogprobFn | None
    train_step: StepFn
    queue: SandboxQueue
    mesh: Mesh


def train(
    config: Config,
    parts: Parts,
    state: TrainState,
    data: grain.DatasetIterator,
    checkpoints: Checkpoints,
    run_log: RunLog,
    ledger: Ledger,
) -> TrainState:
    """Runs the updates that are left and returns the last state.

    It goes on from the newest readable checkpoint. With `anchors.wait` every step's anchors are
    awaited and the run is bit-for-bit repeatable, also across a kill. SIGINT and SIGTERM end it
    after the step under way, with a checkpoint.

    Raises:
      KeyboardInterrupt: after that checkpoint, when a signal ended the run.
      UserError: a checkpoint cannot be written or none can be read.
    """
    state, waiting = resume(config, parts.queue, state, data, checkpoints, run_log, ledger)
    late: StepEnd | None = None

    with Signals() as signals:
        for step in range(int(state.step), config.train.steps):
            started = time.monotonic()
            chosen = next(data)
            names = [parts.task_names[int(i)] for i in chosen]
            is_anchor = np.asarray(select_anchors(config, state.key, step))
            places = [int(i) for i in np.flatnonzero(is_anchor)]
            with ledger.time("sampling"):
                rollouts = parts.sample(
                    state.params,
                    put_by_group(parts.mesh, parts.prompts[chosen]),
                    put_by_group(parts.mesh, parts.prompt_lengths[chosen]),
                    role_key(state.key, "sample", step),
                )
                completions = decode_completions(parts.tokenizer, rollouts)
            checked = [[precheck(text) for text in group] for group in completions]

            # Anchors without predictions go out first, so that they run while the device scores.
            fresh = to_host(rollouts)
            anchored = [
                submit(pending_group(step, names[i], i, fresh, completions, checked), parts.queue)
                for i in places
            ]
            with ledger.time("scoring"):
                fresh["predicted"] = predict(parts.score, rollouts, checked)
                if parts.reference is not None:
                    fresh["reference_logprobs"] = np.array(parts.reference(rollouts))
            waiting += [
                with_scores(group, fresh, i) for group, i in zip(anchored, places, strict=True)
            ]

            with ledger.time("waiting"):
                back, waiting = collect(config, parts.queue, waiting, step, len(places))
            batch = assemble(fresh, is_anchor, back, parts.reference is not None)
            ledger.count_groups(
                executed=[group.slot_seconds for group in back],
                predicted=0 if parts.score is None else int((~is_anchor).sum()),
            )
            with ledger.time("training"):
                state, metrics = parts.train_step(state, put_by_group(parts.mesh, batch))
                if late is not None:
                    run_log.write(late)
                jax.block_until_ready(metrics)
            late = StepEnd(
                step=step + 1,
                is_anchor=is_anchor,
                rollouts=rollouts,
                back=back,
                in_flight=len(waiting),
                metrics=metrics,
                curve=jax.device_get(debias.curve(state.debias)),
                seconds=time.monotonic() - started,
            )

            if due(config, step, signals):
                run_log.write(late)
                late = None
                save(config, checkpoints, state, data, waiting, run_log, ledger)
            end_if_stopped(config, step, signals, checkpoints)
    checkpoints.wait()
    return state


def resume(
    config: Config,
    queue: SandboxQueue,
    state: TrainState,
    data: grain.DatasetIterator,
    checkpoints: Checkpoints,
    run_log: RunLog,
    ledger: Ledger,
) -> tuple[TrainState, list[Pending]]:
    """The state to go on from and its groups in flight, submitted again.

    Data iterator, ledger and records are set back to it.
    """
    waiting: list[Pending] = []
    restored = checkpoints.restore(state, data, empty_in_flight(config))
    if restored is not None:
        state = restored.state
        ledger.load(restored.host["ledger"])
        waiting = flight.unpack(restored.in_flight, restored.host["in_flight"])
        waiting = [submit(group, queue) for group in waiting]
    run_log.rewind(int(state.step))
    return state, waiting


def due(config: Config, step: int, signals: Signals) -> bool:
    """Whether a checkpoint is to be saved after this step, counted from 0."""
    last = step + 1 == config.train.steps
    return last or signals.stop or (step + 1) % config.checkpoint.every == 0


def save(
    config: Config,
    checkpoints: Checkpoints,
    state: TrainState,
    data: grain.DatasetIterator,
    waiting: Sequence[Pending],
    run_log: RunLog,
    ledger: Ledger,
) -> None:
    """Begins to write a checkpoint of everything that `resume` sets back."""
    arrays, entries = flight.pack(waiting, empty_in_flight(config))
    host = {"ledger": ledger.state(), "in_flight": entries}
    checkpoints.save(state, data, arrays, host, run_log.smoothed_reward)


def end_if_stopped(config: Config, step: int, signals: Signals, checkpoints: Checkpoints) -> None:
    """Raises KeyboardInterrupt once a signal came, when its checkpoint is written."""
    if signals.stop and step + 1 < config.train.steps:
        checkpoints.wait()
        raise KeyboardInterrupt(
            f"stopped after step {step + 1} of {config.train.steps}; the checkpoint is "
            "saved and the same command goes on from it"
        )


def select_anchors(config: Config, key: jax.Array, step: int | jax.Array) -> jax.Array:
    """bool [G]: the groups of this step that are executed; chosen before any score is known."""
    groups = config.train.groups
    if config.reward.source != "mixed":
        return jnp.full(groups, config.reward.source == "execution")
    return anchors.select(
        role_key(key, "anchors", step),
        step,
        groups,
        fraction=config.anchors.fraction,
        minimum=config.anchors.minimum,
    )


def collect(
    config: Config, queue: SandboxQueue, waiting: Sequence[Pending], step: int, slots: int
) -> tuple[list[Executed], list[Pending]]:
    """Takes up to `slots` anchor groups that came back, oldest first.

    It waits for the oldest ones where it must: always with `anchors.wait`, for a group that would
    become staler than `anchors.max_staleness`, when more than `anchors.max_in_flight` groups are
    out, and when nothing else would be in the batch.

    Returns:
      The groups that join this step, and those still waiting.
    """
    back: list[Executed] = []
    left: list[Pending] = []
    must = len(waiting) if config.anchors.wait else 0
    must = max(must, len(waiting) - config.anchors.max_in_flight)
    must = max(must, sum(step - g.step >= config.anchors.max_staleness for g in waiting))
    if config.reward.source == "execution":
        must = max(must, 1)
    for group in waiting:
        if len(back) == slots:
            left.append(group)
            continue
        group = fetch(group, queue, timeout=None if len(back) < must else 0.0)
        outcomes = [w for w in group.work if isinstance(w, Outcome)]
        if len(outcomes) == len(group.work):
            back.append(Executed(group, outcomes))
        else:
            left.append(group)
    return back, left


def assemble(
    fresh: dict[str, np.ndarray], is_anchor: np.ndarray, back: Sequence[Executed], reference: bool
) -> ScoredBatch:
    """The step's batch: this step's predicted groups, and returned anchors in the anchors' places.

    A place whose anchor is not back stays empty.
    """
    arrays = {name: value.copy() for name, value in fresh.items()}
    executed = np.full(arrays["predicted"].shape, np.nan, np.float32)
    places = np.flatnonzero(is_anchor)
    arrays["loss_mask"][places] = False
    arrays["predicted"][places] = np.nan
    for i, group in zip(places, back, strict=False):
        for name in arrays:
            arrays[name][i] = group.group.arrays[name]
        executed[i] = group.rewards
    fields: dict[str, Any] = {**arrays, "executed": executed, "is_anchor": is_anchor}
    if not reference:
        fields["reference_logprobs"] = None
    return ScoredBatch(**fields)


def predict(
    score: ScoreFn | None, rollouts: Rollouts, checked: list[list[Outcome | str]]
) -> np.ndarray:
    """Scores float32 [G, N]; what compiling alone settles is not left to the world model."""
    if score is None:
        return np.full(rollouts.lengths.shape, np.nan, np.float32)
    return with_known(score(rollouts), checked)


def with_known(scores: Any, checked: list[list[Outcome | str]]) -> np.ndarray:
    """The scores float32 [G, N] with the rewards that `precheck` settled in their places."""
    predicted = np.array(scores, np.float32)
    for i, group in enumerate(checked):
        for j, known in enumerate(group):
            if isinstance(known, Outcome):
                predicted[i, j] = known.reward
    return predicted


def to_host(rollouts: Rollouts) -> flight.Arrays:
    """The rows of a step as NumPy arrays [G, N, ...], ungraded so far."""
    tokens, mask, behaviour = jax.device_get(
        (rollouts.tokens, rollouts.loss_mask, rollouts.behaviour_logprobs)
    )
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "behaviour_logprobs": behaviour,
        "reference_logprobs": np.zeros_like(behaviour),
        "predicted": np.full(tokens.shape[:2], np.nan, np.float32),
    }


def pending_group(
    step: int,
    task: str,
    index: int,
    fresh: flight.Arrays,
    completions: list[list[str]],
    checked: list[list[Outcome | str]],
) -> Pending:
    """Group `index` of a step as an anchor that is not submitted yet."""
    known = checked[index]
    return Pending(
        step=step,
        task=task,
        arrays={name: value[index] for name, value in fresh.items()},
        completions=completions[index],
        work=[c if isinstance(c, Outcome) else Job(task, c) for c in known],
        tickets=[None] * len(known),
    )


def with_scores(group: Pending, fresh: flight.Arrays, index: int) -> Pending:
    """The group with what was computed of it after it was submitted."""
    return group._replace(arrays={name: value[index] for name, value in fresh.items()})


def submit(group: Pending, queue: SandboxQueue) -> Pending:
    """Hands the group's jobs to the queue."""
    tickets = iter(queue.submit([w for w in group.work if isinstance(w, Job)]))
    return group._replace(
        tickets=[next(tickets) if isinstance(w, Job) else None for w in group.work]
    )


def fetch(group: Pending, queue: SandboxQueue, timeout: float | None) -> Pending:
    """The group with the outcomes that are there; with timeout None all of them."""
    ready = queue.collect([t for t in group.tickets if t is not None], timeout=timeout)
    work = [
        w if ticket is None else ready.get(ticket, w)
        for w, ticket in zip(group.work, group.tickets, strict=True)
    ]
    tickets = [None if ticket in ready else ticket for ticket in group.tickets]
    return group._replace(work=work, tickets=tickets)


def empty_in_flight(config: Config) -> flight.Arrays:
    """The arrays that a checkpoint stores for groups in flight, with room for as many as can be."""
    capacity = config.anchors.max_in_flight + config.train.groups
    length = config.model.prompt_tokens + config.model.new_tokens
    return flight.blank(capacity, config.train.group_size, length)


_ROLES = {"sample": 1, "anchors": 2}


def role_key(key: jax.Array, role: str, step: int | jax.Array) -> jax.Array:
    """The key of one role in one step; nothing else of the run shares it."""
    return jax.random.fold_in(jax.random.fold_in(key, _ROLES[role]), step)


class Signals:
    """While open, SIGINT and SIGTERM set `stop` instead of ending the process at once.

    A second signal is not held back.
    """

    def __init__(self) -> None:
        self.stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        log.warning("ending after this step, with a checkpoint; once more to end at once")
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
