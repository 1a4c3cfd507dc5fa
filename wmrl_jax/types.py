"""The types that cross module borders, each with its shapes.

Shape letters, the same in the whole project: G groups, N rollouts per group, B = G*N, T tokens,
V vocabulary, L layers, H heads, K key/value heads, D width, A anchor groups, P pairs.

Arrays that the compiled step sees are NamedTuples of arrays. What lives on the host (jobs,
executions, outcomes) are NamedTuples of plain Python values. Unknown is NaN, never zero.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal, NamedTuple, get_args

import jax

Status = Literal[
    "malformed",
    "syntax_error",
    "runtime_error",
    "timeout",
    "out_of_memory",
    "no_submission",
    "invalid_submission",
    "valid",
    "unknown",
]
"""What execution (or the world model) says of a solution; `unknown` is a fault of the machinery."""

STATUSES: tuple[Status, ...] = get_args(Status)

REWARD_LADDER: dict[Status, float] = {
    "malformed": 0.0,
    "syntax_error": 0.0,
    "runtime_error": 0.1,
    "timeout": 0.1,
    "out_of_memory": 0.1,
    "no_submission": 0.2,
    "invalid_submission": 0.2,
    "valid": 0.5,
    "unknown": math.nan,
}
"""Reward of each status; a valid submission adds half its leaderboard position."""


def reward_of(status: Status, position: float | None = None) -> float:
    """Reward in [0, 1] by the ladder; NaN for `unknown`.

    Args:
      status: one of `STATUSES`.
      position: share of the leaderboard that the metric value ties or beats, in [0, 1]; only
        read, and then required, for `valid`.
    """
    base = REWARD_LADDER[status]
    if status != "valid":
        return base
    if position is None:
        raise ValueError("a valid outcome needs its leaderboard position to have a reward")
    return base + 0.5 * position


class Limits(NamedTuple):
    """What one execution may use.

    Attributes:
      cpu_seconds: processor time of the whole process tree.
      wall_seconds: time from start to end.
      memory_mb: resident memory of the whole tree, MiB.
      processes: processes and threads at one time.
      file_mb: largest single file, MiB.
      scratch_mb: size of the one writable folder, MiB.
      output_kb: standard output and error kept (head and tail), KiB.
    """

    cpu_seconds: float = 20.0
    wall_seconds: float = 30.0
    memory_mb: int = 2048
    processes: int = 64
    file_mb: int = 64
    scratch_mb: int = 128
    output_kb: int = 64


class Job(NamedTuple):
    """One program to execute for one task. Equal jobs have equal outcomes.

    Attributes:
      task: the task's name.
      program: the Python text, executed exactly as written.
    """

    task: str
    program: str

    @property
    def key(self) -> str:
        """Hex digest that identifies the job across processes and restarts."""
        return hashlib.sha256(f"{self.task}\0{self.program}".encode()).hexdigest()


class Execution(NamedTuple):
    """What a sandbox backend saw of one program, before any grading.

    Attributes:
      status: `ok` (exit code 0), `runtime_error`, `timeout`, `out_of_memory`, or `unknown` for a
        fault of the machinery.
      output: standard output and error, bounded.
      exception: class name of the Python exception that ended the program, else None.
      submission: bytes of the submission file, None if there is none.
      submission_fault: why a submission path that exists cannot be read as a file (a symlink, a
        FIFO, too large), else None.
      seconds: slot-seconds used.
      cause: for `unknown`, what failed; else None.
    """

    status: Literal["ok", "runtime_error", "timeout", "out_of_memory", "unknown"]
    output: str
    exception: str | None
    submission: bytes | None
    submission_fault: str | None
    seconds: float
    cause: str | None = None


class Outcome(NamedTuple):
    """What is known of one solution after execution and grading.

    Attributes:
      status: one of `STATUSES`.
      reward: by `reward_of`; NaN for `unknown`.
      position: leaderboard position in [0, 1] where valid, else None.
      value: metric value where valid, else None.
      feedback: the text that an agent would get to see.
      exception: class name of the Python exception, else None.
      seconds: slot-seconds used; 0.0 where nothing was executed.
      cause: for `unknown`, what failed; else None.
    """

    status: Status
    reward: float
    position: float | None
    value: float | None
    feedback: str
    exception: str | None
    seconds: float
    cause: str | None = None


class Rollouts(NamedTuple):
    """What the sampler wrote. Rows are compact: prompt, completion, padding.

    Attributes:
      tokens: int32 [G, N, T].
      loss_mask: bool [G, N, T], true where the agent wrote the token (its end-of-text included).
      behaviour_logprobs: float32 [G, N, T]; entry t is the log-probability of tokens[t] given
        tokens[:t] under the sampling policy, 0 where `loss_mask` is false.
      prompt_lengths: int32 [G].
      lengths: int32 [G, N], prompt and completion together.
      finished: bool [G, N], true where the row ended by itself and not by the token limit.
    """

    tokens: jax.Array
    loss_mask: jax.Array
    behaviour_logprobs: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    finished: jax.Array


class ScoredBatch(NamedTuple):
    """One training batch of graded rollouts.

    A slot without a group (an anchor that is still in flight, say) has no true entry in
    `loss_mask` and NaN in `predicted` and `executed`: it contributes nothing.

    Attributes:
      tokens: int32 [G, N, T], compact rows as in `Rollouts`.
      loss_mask: bool [G, N, T].
      behaviour_logprobs: float32 [G, N, T], 0 where `loss_mask` is false.
      predicted: float32 [G, N], the world model's raw score, NaN where ungraded.
      executed: float32 [G, N], the reward by execution, NaN where not executed.
      is_anchor: bool [G].
      reference_logprobs: float32 [G, N, T] of the KL reference policy, or None without a KL term.
    """

    tokens: jax.Array
    loss_mask: jax.Array
    behaviour_logprobs: jax.Array
    predicted: jax.Array
    executed: jax.Array
    is_anchor: jax.Array
    reference_logprobs: jax.Array | None = None


class TrainState(NamedTuple):
    """Everything that must come back after a restart.

    Attributes:
      params: the policy's parameters, a pytree.
      opt_state: the optax state.
      debias: `debias.State`.
      denoise: `denoise.State`.
      key: the run's random key; folded with step and role, never advanced.
      step: int32 scalar, updates made.
    """

    params: Any
    opt_state: Any
    debias: Any
    denoise: Any
    key: jax.Array
    step: jax.Array
