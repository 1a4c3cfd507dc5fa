"""Prompts rounded up to buckets: the rows of the widest sampler, from few compiled programs."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import build_model
from wmrl_jax.rollout.buckets import bucket_prompts
from wmrl_jax.rollout.sampler import make_sampler
from wmrl_jax.train.config import ModelConfig

SMALL = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=24)
VOCABULARY, PAD, NEW, ROWS, WIDEST = 12, 0, 8, 4, 12
MODEL = build_model(SMALL, VOCABULARY)
PARAMS = MODEL.init(jax.random.key(0))


def make(width, model=MODEL):
    return make_sampler(
        model, group_size=ROWS, prompt_tokens=width, new_tokens=NEW, eos_id=1, pad_id=PAD
    )


def prompts_of(lengths, width):
    prompts = np.random.default_rng(0).integers(2, VOCABULARY, (len(lengths), width))
    return np.where(np.arange(width) < np.asarray(lengths)[:, None], prompts, PAD).astype(np.int32)


def test_rows_are_those_of_the_widest_sampler_and_compiled_programs_are_counted():
    traced = []  # a program computes its prompts once, so a trace of `prefill` is a program

    def prefill(params, tokens, lengths):
        traced.append(tokens.shape)
        return MODEL.prefill(params, tokens, lengths)

    counting = replace(MODEL, prefill=prefill)
    bucketed = bucket_prompts(lambda width: make(width, counting), (WIDEST, 5), pad_id=PAD)
    widest = make(WIDEST)
    counts = []
    for seed, (lengths, width) in enumerate(
        [([3, 5], 5), ([4, 1], 9), ([2, 2], 4), ([6, 1], 6), ([12, 3], 12), ([1, 9], 15)]
    ):
        prompts, lengths = prompts_of(lengths, width), np.array(lengths, np.int32)
        wide = np.full((2, WIDEST), PAD, np.int32)
        wide[:, : min(width, WIDEST)] = prompts[:, :WIDEST]

        rows = bucketed.sample(PARAMS, prompts, lengths, jax.random.key(seed), temperature=1.5)

        expected = widest(PARAMS, wide, lengths, jax.random.key(seed), temperature=1.5)
        for name, own, other in zip(rows._fields, rows, expected, strict=True):
            assert own.shape == other.shape, name
            np.testing.assert_allclose(own, other, atol=1e-5, err_msg=name)
        counts.append(bucketed.programs())
    assert counts == [1, 1, 1, 2, 2, 2]
    assert traced == [(2, 5), (2, WIDEST)]


def test_prompts_that_fit_no_bucket_and_widths_that_are_none_are_refused():
    bucketed = bucket_prompts(make, [5, 8], pad_id=PAD)
    with pytest.raises(UserError, match="a prompt has 9 tokens and the widest bucket 8"):
        bucketed.sample(PARAMS, prompts_of([9], 9), np.array([9]), jax.random.key(0))
    with pytest.raises(UserError, match="length is 7 and the prompts are 6 wide"):
        bucketed.sample(PARAMS, prompts_of([6], 6), np.array([7]), jax.random.key(0))
    for widths in ([], [0, 4]):
        with pytest.raises(UserError, match="widths of at least 1 token"):
            bucket_prompts(make, widths, pad_id=PAD)
    assert bucketed.programs() == 0
