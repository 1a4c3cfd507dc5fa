"""Optimizers and learning-rate schedules by name, from optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from wmrl_jax.train.config import TrainConfig

ScheduleFn = Callable[[jax.Array], jax.Array]
"""Progress in [0, 1] from the end of the warm-up to the last step -> factor of the rate."""

_WSD_STABLE = 0.8  # share of the steps before the rate falls


def _cosine(progress: jax.Array) -> jax.Array:
    return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def _stable_then_linear(progress: jax.Array) -> jax.Array:
    return jnp.clip((1.0 - progress) / (1.0 - _WSD_STABLE), 0.0, 1.0)


SCHEDULES: dict[str, ScheduleFn] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine,
    "wsd": _stable_then_linear,  # warm-up, stable, decay: arXiv 2404.06395
}
"""What follows the warm-up; `constant` stays at the rate."""


class _Settings(NamedTuple):
    rate: optax.Schedule
    weight_decay: float
    beta1: float
    beta2: float


def _adamw(s: _Settings) -> optax.GradientTransformation:
    return optax.adamw(s.rate, s.beta1, s.beta2, weight_decay=s.weight_decay, mask=_matrices)


def _lion(s: _Settings) -> optax.GradientTransformation:
    return optax.lion(s.rate, s.beta1, s.beta2, weight_decay=s.weight_decay, mask=_matrices)


def _adafactor(s: _Settings) -> optax.GradientTransformation:
    decay = None
    if s.weight_decay:  # here it is not multiplied by the rate, in the others it is
        decay = lambda count: s.weight_decay * s.rate(count)  # noqa: E731
    return optax.adafactor(
        s.rate,
        multiply_by_parameter_scale=False,
        weight_decay_rate=decay,
        weight_decay_mask=_matrices,
    )


def _muon(s: _Settings) -> optax.GradientTransformation:
    def dimensions(params: Any) -> Any:
        stacked = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return jax.tree.map(lambda is_matrix: stacked if is_matrix else None, _matrices(params))

    return muon(
        s.rate,
        weight_decay=s.weight_decay,
        weight_decay_mask=_matrices,
        adam_b1=s.beta1,
        adam_b2=s.beta2,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,  # updates of AdamW's size, so that its rates serve (arXiv 2502.16982)
    )


def _sgd(s: _Settings) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(s.weight_decay, _matrices), optax.sgd(s.rate, momentum=s.beta1)
    )


OPTIMIZERS: dict[str, Callable[[_Settings], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
    "sgd": _sgd,
}
"""By name: AdamW (arXiv 1711.05101), Adafactor (1804.04235), Lion (2302.06675), Muon, SGD."""


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """The learning rate by step: a linear warm-up, then the schedule of that name.

    The first of W warm-up steps has 1 / W of the rate, the last one all of it.
    """
    warm = optax.linear_schedule(
        config.learning_rate / max(1, config.warmup_steps),
        config.learning_rate,
        max(0, config.warmup_steps - 1),
    )
    if config.schedule == "constant":
        return warm
    after = SCHEDULES[config.schedule]
    falling = max(1, config.steps - config.warmup_steps)

    def rate(count: Any) -> Any:
        progress = jnp.clip((count - config.warmup_steps) / falling, 0.0, 1.0)
        return warm(count) * after(progress)

    return rate


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The configured optimizer behind global-norm clipping.

    Weights that multiply activations are decayed, norms, biases and embeddings are not.
    """
    settings = _Settings(make_schedule(config), config.weight_decay, config.beta1, config.beta2)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm), OPTIMIZERS[config.optimizer](settings)
    )


def _matrices(params: Any) -> Any:
    """Which leaves are matrices of a layer: stacked [L, in, out]; a short convolution is none."""

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        return leaf.ndim == 3 and getattr(path[-1], "key", None) != "conv"

    return jax.tree_util.tree_map_with_path(is_matrix, params)
