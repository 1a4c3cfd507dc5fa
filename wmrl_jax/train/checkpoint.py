"""Saving and resuming a training run through Orbax.

One checkpoint is one atomic composite: the train state, the position of the grain iterator, the
groups whose executions are in flight, and what the host must remember (configuration, ledger,
unfinished jobs). The last few and the best are kept.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from wmrl_jax.errors import UserError
from wmrl_jax.types import TrainState

log = logging.getLogger(__name__)

# What Orbax, TensorStore and the JSON items raise for files that are missing, cut or altered.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class Restored(NamedTuple):
    """A checkpoint read back: the train state, the in-flight arrays and the host's record."""

    state: TrainState
    in_flight: dict[str, Any]
    host: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: where they lie; made if missing.
      keep: how many of the newest are kept beside the best one.
      on_skip: called with one sentence when a checkpoint cannot be read.
    """

    def __init__(self, folder: Path, keep: int, on_skip: Callable[[str], None] = log.warning):
        self.folder = Path(folder).absolute()
        self._on_skip = on_skip
        self._saving: int | None = None
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(keep),
                        policies.BestN(get_metric_fn=lambda m: m["reward"], n=1),
                    ]
                ),
                cleanup_tmp_directories=True,
                step_prefix="step",
            ),
        )

    def save(
        self,
        state: TrainState,
        iterator: grain.DatasetIterator,
        in_flight: dict[str, Any],
        host: dict[str, Any],
        reward: float,
    ) -> None:
        """Saves in the background; errors of an earlier save surface here or in `wait`.

        Raises:
          UserError: too little room, or what went wrong with an earlier save.
        """
        self.wait()
        step = self._saving = int(state.step)
        self._check_room(step, (state, in_flight))
        with self._explained(step):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state._asdict()),  # pyright: ignore[reportCallIssue]
                    data=grain.checkpoint.CheckpointSave(iterator),  # pyright: ignore[reportCallIssue]
                    in_flight=ocp.args.StandardSave(in_flight),  # pyright: ignore[reportCallIssue]
                    host=ocp.args.JsonSave(host),  # pyright: ignore[reportCallIssue]
                ),
                metrics={"reward": reward},
            )

    def restore(
        self,
        like: TrainState,
        iterator: grain.DatasetIterator,
        in_flight_like: dict[str, Any],
    ) -> Restored | None:
        """Returns the newest readable checkpoint, None if there is none at all.

        A checkpoint that cannot be read is passed over with a word, and the one before it used.

        Args:
          like: a train state with the shapes, dtypes and shardings to restore to.
          iterator: set to the saved position.
          in_flight_like: arrays of the shapes that `save` was given.

        Raises:
          UserError: if there are checkpoints and none of them can be read.
        """
        step, got = self._newest_readable(
            {
                "state": ocp.args.StandardRestore(_abstract(like)),  # pyright: ignore[reportCallIssue]
                "data": grain.checkpoint.CheckpointRestore(iterator),  # pyright: ignore[reportCallIssue]
                "in_flight": ocp.args.StandardRestore(in_flight_like),  # pyright: ignore[reportCallIssue]
                "host": ocp.args.JsonRestore(),  # pyright: ignore[reportCallIssue]
            }
        )
        if step is None:
            return None
        for newer in [s for s in self._manager.all_steps() if s > step]:
            self._manager.delete(newer)
        return Restored(TrainState(**got["state"]), got["in_flight"], got["host"])

    def restore_state(self, like: TrainState) -> TrainState | None:
        """The train state alone of the newest readable checkpoint; see `restore`."""
        step, got = self._newest_readable(
            {"state": ocp.args.StandardRestore(_abstract(like))}  # pyright: ignore[reportCallIssue]
        )
        return None if step is None else TrainState(**got["state"])

    def _newest_readable(self, items: dict[str, Any]) -> tuple[int | None, Any]:
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                return step, self._manager.restore(step, args=ocp.args.Composite(**items))
            except UNREADABLE as error:
                self._on_skip(
                    f"the checkpoint of step {step} in {self.folder} cannot be read "
                    f"({type(error).__name__}: {_first_line(error)}); trying the one before it"
                )
        if steps:
            raise UserError(
                f"none of the checkpoints in {self.folder} can be read; move the folder away to "
                "start the training again"
            )
        return None, None

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Blocks until the last save is on disk."""
        with self._explained(self._saving):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for the last save and frees the threads."""
        self._manager.close()

    def _check_room(self, step: int, tree: Any) -> None:
        """Orbax has no good word for a full disk, so it is looked at before."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"the checkpoint of step {step} needs {needed / 1e6:.0f} MB and {self.folder} has "
                f"{free / 1e6:.0f} MB left; make room and start the run again: it goes on from the "
                "last complete checkpoint"
            )

    def _explained(self, step: int | None) -> _Explained:
        return _Explained(f"the checkpoint of step {step} in {self.folder}")


class _Explained:
    """Turns what Orbax raises while saving into one sentence."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (OSError, ValueError, RuntimeError)):
            raise UserError(
                f"{self._what} could not be saved ({_first_line(error)}); make room or mend the "
                "folder's permissions and start the run again: it goes on from the last complete "
                "checkpoint"
            ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _abstract(tree: TrainState) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree._asdict())


def save_params(folder: Path, params: Any) -> None:
    """Writes a parameter tree, replacing what was there, atomically."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), params, force=True)


def load_params(folder: Path, like: Any) -> Any:
    """Reads a parameter tree with the shapes, dtypes and shardings of `like`."""
    folder = Path(folder).absolute()
    if not folder.exists():
        raise UserError(
            f"there are no parameters in {folder}; make them with `wmrl run` or `wmrl sft`"
        )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, abstract)
