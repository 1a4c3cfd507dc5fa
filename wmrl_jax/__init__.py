"""World Model RL in JAX: the public functional API.

Everything here is pure: functions of arrays and of NamedTuples of arrays, for use under `jax.jit`,
`jax.vmap` and `jax.shard_map`. The names are loaded at first use, so that a process which only
needs a sandbox, say, does not pay for a compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wmrl_jax.method import anchors, debias, denoise
    from wmrl_jax.method.advantages import group_advantages
    from wmrl_jax.method.isotonic import isotonic_regression
    from wmrl_jax.method.losses import policy_loss
    from wmrl_jax.train.fused import make_fused_step
    from wmrl_jax.train.step import make_train_step
    from wmrl_jax.types import ScoredBatch, TrainState

__all__ = [
    "ScoredBatch",
    "TrainState",
    "anchors",
    "debias",
    "denoise",
    "group_advantages",
    "isotonic_regression",
    "make_fused_step",
    "make_train_step",
    "policy_loss",
]

_HOMES = {
    "ScoredBatch": "wmrl_jax.types",
    "TrainState": "wmrl_jax.types",
    "anchors": "wmrl_jax.method.anchors",
    "debias": "wmrl_jax.method.debias",
    "denoise": "wmrl_jax.method.denoise",
    "group_advantages": "wmrl_jax.method.advantages",
    "isotonic_regression": "wmrl_jax.method.isotonic",
    "make_fused_step": "wmrl_jax.train.fused",
    "make_train_step": "wmrl_jax.train.step",
    "policy_loss": "wmrl_jax.method.losses",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if _HOMES[name].endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    return __all__
