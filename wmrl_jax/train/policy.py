"""What of the policy is trained: all of its weights, or adapters beside frozen ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from wmrl_jax.models.lora import attach, init_adapters
from wmrl_jax.train.config import LoraConfig


class Policy(NamedTuple):
    """The parts of a policy's parameters.

    Attributes:
      initial: what is trained, before the first step.
      base: the weights beside which adapters are trained; None where all weights are trained.
      scale: of what the adapters add.
    """

    initial: Any
    base: Any
    scale: float

    def full(self, trained: Any) -> Any:
        """The parameters that a model's functions take; no weight is copied."""
        return trained if self.base is None else attach(self.base, trained, scale=self.scale)


def make_policy(config: LoraConfig, agent: Any, key: jax.Array) -> Policy:
    """The policy that starts as the warm-started agent.

    Args:
      config: with rank 0 all weights are trained.
      agent: its parameters; with adapters they are used as they are, never copied or changed.
      key: decides the adapters' first factors.

    Raises:
      UserError: the targets match no weight, or the rank fits one not.
    """
    if config.rank == 0:
        return Policy(agent, None, 1.0)
    adapters = init_adapters(key, agent, rank=config.rank, targets=config.targets)
    return Policy(adapters, agent, config.alpha / config.rank)
