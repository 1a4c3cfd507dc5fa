"""Qwen3, dense: grouped-query attention with query and key norm (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wmrl_jax.models.dense import SKIPPED, dense_architecture, dense_weights
from wmrl_jax.models.families import Family, Settings
from wmrl_jax.models.model import make_dense
from wmrl_jax.models.transformer import Architecture


def architecture(config: Mapping[str, Any], dtype: str, remat: str) -> Architecture:
    """The architecture of a Qwen3 `config.json`.

    Raises:
      UserError: a setting is missing or not supported.
    """
    return dense_architecture(
        Settings({"head_dim": 128, **config}), qk_norm=True, theta=1e6, dtype=dtype, remat=remat
    )


FAMILY = Family(architecture, dense_weights, make_dense, SKIPPED)
