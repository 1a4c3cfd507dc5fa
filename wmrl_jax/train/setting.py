"""What the stages of a run share: the tasks with their prompts, and the compiled functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from wmrl_jax.errors import UserError, did_you_mean
from wmrl_jax.models.model import Model, build_model
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.rollout.sampler import SampleFn, make_sampler
from wmrl_jax.tasks.prompt import prompt_text
from wmrl_jax.tasks.suite import default_root, materialise
from wmrl_jax.tasks.task import Task, load_tasks
from wmrl_jax.train.config import Config
from wmrl_jax.train.data import pad_prompts
from wmrl_jax.train.mesh import make_mesh


class TaskSet:
    """The tasks of a run, chosen and split as configured.

    Args:
      config: its section `tasks`.

    Attributes:
      tasks: every task of the folder by name, chosen or not.
      train: names of the training tasks.
      heldout: names of the held-out tasks.

    Raises:
      UserError: a fault in a task folder, or a configured name that is no task.
    """

    def __init__(self, config: Config) -> None:
        root = default_root() if config.tasks.folder is None else Path(config.tasks.folder)
        if config.tasks.folder is None:
            materialise(root)
        self.tasks: dict[str, Task] = load_tasks(root)
        self.train = self._chosen(config.tasks.train, "train")
        self.heldout = self._chosen(config.tasks.heldout, "heldout")
        both = sorted(set(self.train) & set(self.heldout))
        if both:
            raise UserError(
                f"{', '.join(both)} stands under tasks.train and tasks.heldout; keep it in one"
            )
        if not self.train:
            raise UserError(f"no task of {root} is for training; name some under tasks.train")

    def _chosen(self, names: Sequence[str], split: str) -> tuple[str, ...]:
        for name in names:
            if name not in self.tasks:
                raise UserError(
                    f"tasks.{split} names {name!r}, which is no task"
                    f"{did_you_mean(name, self.tasks)}"
                )
        return tuple(names) or tuple(n for n, t in self.tasks.items() if t.split == split)

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen tasks, training ones first."""
        return (*self.train, *self.heldout)

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Prompt text of each chosen task."""
        return {name: prompt_text(self.tasks[name]) for name in self.names}

    def split_of(self, name: str) -> str:
        """`train` or `heldout`."""
        return "train" if name in self.train else "heldout"


class Setting:
    """Tokenizer, model and compiled functions of a run; nothing is compiled before it is used.

    Args:
      config: the whole configuration.
      tasks: its tasks.
      tokenizer: of the agent.
      model: a published one; None: one from scratch, of the configured sizes.
      mesh: default: all devices.
    """

    def __init__(
        self,
        config: Config,
        tasks: TaskSet,
        tokenizer: Tokenizer,
        model: Model | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.config, self.tasks, self.tokenizer = config, tasks, tokenizer
        self.mesh = mesh or make_mesh()
        self.model: Model = model or build_model(
            config.model, tokenizer.vocab_size, remat=config.model.remat
        )
        self._rows = {name: tokenizer.encode_prompt(text) for name, text in tasks.prompts.items()}
        longest = max(self._rows, key=lambda name: len(self._rows[name]))
        if len(self._rows[longest]) > config.model.prompt_tokens:
            raise UserError(
                f"the prompt of {longest} has {len(self._rows[longest])} tokens and "
                f"model.prompt_tokens is {config.model.prompt_tokens}; raise it"
            )

    def prompt_arrays(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts int32 [n, P], padded on the right, and their lengths int32 [n]."""
        rows = [self._rows[name] for name in names]
        return pad_prompts(rows, self.config.model.prompt_tokens, self.tokenizer.pad_id)

    @cached_property
    def sampler(self) -> SampleFn:
        """The compiled sampler, of the shape that training and evaluation share."""
        return make_sampler(
            self.model,
            group_size=self.config.train.group_size,
            prompt_tokens=self.config.model.prompt_tokens,
            new_tokens=self.config.model.new_tokens,
            eos_id=self.tokenizer.eos_id,
            pad_id=self.tokenizer.pad_id,
            mesh=self.mesh,
        )

    def key(self, role: str) -> jax.Array:
        """The run's key for one role."""
        return jax.random.fold_in(jax.random.key(self.config.seed), _ROLES.index(role))


_ROLES = ("warm_start", "world_model", "training", "evaluation", "cases", "adapters")
