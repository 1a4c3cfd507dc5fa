"""What must fit together in a configuration, one sentence each, and what is worth a remark."""

from __future__ import annotations

import dataclasses
import math
import re

from wmrl_jax.errors import UserError
from wmrl_jax.train.config import Config


def check_config(config: Config) -> None:
    """Raises a `UserError` on the first combination of values that cannot work together."""
    fault = (
        _folder_fault(config)
        or _model_fault(config)
        or _group_fault(config)
        or _correction_fault(config)
        or _anchor_fault(config)
    )
    if fault:
        raise UserError(fault)


def config_notices(config: Config) -> list[str]:
    """Sentences on combinations that work but may surprise, to be printed at the start of a run."""
    notices = []
    if config.reward.source == "mixed" and config.anchors.fraction == 1:
        notices.append(
            "anchors.fraction is 1, so every group is executed: this trains like "
            "reward.source: execution and saves nothing."
        )
    if config.anchors.wait and config.reward.source != "world_model":
        notices.append(
            "anchors.wait is on, so every step waits for its executions: repeatable, but slower."
        )
    if config.corrections.debias and config.reward.source == "mixed":
        pairs = config.train.steps * anchors_per_step(config) * config.train.group_size
        if pairs < config.corrections.min_pairs:
            notices.append(
                f"the run will see about {pairs} anchor pairs, fewer than corrections.min_pairs "
                f"({config.corrections.min_pairs}), so debiasing will never start."
            )
    return notices


def anchors_per_step(config: Config) -> int:
    """Groups of a step that are executed, on average, rounded up."""
    if config.reward.source == "execution":
        return config.train.groups
    if config.reward.source == "world_model":
        return 0
    share = math.ceil(config.anchors.fraction * config.train.groups - 1e-9)
    return max(config.anchors.minimum, share)


def _folder_fault(config: Config) -> str | None:
    if not re.fullmatch(r"[\w][\w.\-]*", config.name):
        return (
            f"name is {config.name!r} but names the run's folder below out: use letters, digits, "
            "'.', '-' and '_' only"
        )
    both = sorted(set(config.tasks.train) & set(config.tasks.heldout))
    if both:
        return f"task {both[0]} stands in tasks.train and in tasks.heldout: take it out of one"
    return None


_OF_ANY_MODEL = {"path", "dtype", "remat", "prompt_tokens", "new_tokens"}


def _model_fault(config: Config) -> str | None:
    model = config.model
    if model.path is not None:
        for field in dataclasses.fields(model):
            set_here = getattr(model, field.name) != field.default
            if field.name not in _OF_ANY_MODEL and set_here:
                return (
                    f"model.{field.name} is {getattr(model, field.name)}, but model.path names a "
                    "published model, which decides that: take one of the two out"
                )
        return None
    if model.heads % model.kv_heads:
        return (
            f"model.kv_heads is {model.kv_heads} but must divide model.heads ({model.heads}), "
            "because each key/value head serves the same number of heads"
        )
    if model.head_dim % 2:
        return f"model.head_dim is {model.head_dim} but must be even for the rotary embedding"
    return None


def _group_fault(config: Config) -> str | None:
    train = config.train
    if train.fused and config.lora.rank:
        return (
            f"lora.rank is {config.lora.rank} and train.fused is on; the fused step trains all "
            "weights only: take one of the two out"
        )
    if train.group_size == 1:
        return (
            "train.group_size is 1, and a group of one rollout has no group-relative signal: "
            "set it to at least 2"
        )
    if train.groups % train.microbatches:
        return (
            f"train.microbatches is {train.microbatches} but must divide train.groups "
            f"({train.groups}) evenly"
        )
    return None


def _correction_fault(config: Config) -> str | None:
    corrections, source = config.corrections, config.reward.source
    switched_on = [name for name in ("debias", "denoise") if getattr(corrections, name)]
    if switched_on and source == "world_model":
        return (
            f"corrections.{switched_on[0]} is on, but with reward.source: world_model nothing is "
            "executed that it could learn from: set corrections.debias and corrections.denoise "
            "to off, or reward.source to mixed"
        )
    if switched_on and source == "execution":
        return (
            f"corrections.{switched_on[0]} is on, but with reward.source: execution nothing is "
            "predicted that it could correct: set corrections.debias and corrections.denoise to "
            "off, or reward.source to mixed"
        )
    if corrections.min_pairs > corrections.capacity:
        return (
            f"corrections.min_pairs is {corrections.min_pairs} but at most corrections.capacity "
            f"({corrections.capacity}) pairs are kept, so debiasing would never start"
        )
    if source == "mixed" and config.anchors.fraction == 0:
        if switched_on:
            return (
                f"anchors.fraction is 0, so corrections.{switched_on[0]} would never see an "
                "executed group: set anchors.fraction above 0, or turn both corrections off and "
                "set reward.source to world_model"
            )
        return (
            "anchors.fraction is 0, so nothing would be executed: set it above 0, or "
            "reward.source to world_model"
        )
    return None


def _anchor_fault(config: Config) -> str | None:
    anchors, groups = config.anchors, config.train.groups
    if config.reward.source == "mixed" and anchors.minimum > groups:
        return (
            f"anchors.minimum is {anchors.minimum}, more than the {groups} groups of a step "
            "(train.groups)"
        )
    wanted = anchors_per_step(config)
    if anchors.max_in_flight < wanted:
        return (
            f"anchors.max_in_flight is {anchors.max_in_flight}, fewer than the {wanted} groups "
            "that one step executes: raise it"
        )
    return None
