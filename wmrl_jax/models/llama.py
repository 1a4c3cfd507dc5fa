"""Llama 2 and 3, and what shares their layout, SmolLM2 for one (arXiv 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wmrl_jax.models.dense import SKIPPED, dense_architecture, dense_weights
from wmrl_jax.models.families import Family, Settings
from wmrl_jax.models.model import make_dense
from wmrl_jax.models.transformer import Architecture


def architecture(config: Mapping[str, Any], dtype: str, remat: str) -> Architecture:
    """The architecture of a Llama `config.json`.

    Raises:
      UserError: a setting is missing or not supported.
    """
    return dense_architecture(Settings(config), qk_norm=False, theta=1e4, dtype=dtype, remat=remat)


FAMILY = Family(architecture, dense_weights, make_dense, SKIPPED)
