"""The sizes of a benchmark of sampler or train step; the command line lists them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Workload:
    """The sizes of a measurement; the names are those of the command line.

    Attributes:
      num_prompts: G.
      num_generations: N.
      cache_slack: further tokens that the sampler's rows have room for and do not write.
    """

    layers: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ff: int = 768
    vocab: int = 4096
    num_prompts: int = 8
    num_generations: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 128
    cache_slack: int = 0
    repeats: int = 5

    @property
    def flags(self) -> list[str]:
        """The options as peers take them."""
        pairs = (
            (field.name.replace("_", "-"), getattr(self, field.name)) for field in fields(self)
        )
        return [part for name, value in pairs for part in (f"--{name}", str(value))]


BENCHES = {"sampler": "generate", "train": "train", "ragged": None}
"""Our names, and those that a peer knows; None where no peer is asked."""

IMPL = "wmrl_jax"
"""Who we are in a table of figures."""
