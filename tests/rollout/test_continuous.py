"""Continuous batching draws what the sampler of whole batches draws, in any number of slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import build_model
from wmrl_jax.rollout.buckets import bucket_prompts
from wmrl_jax.rollout.continuous import make_continuous_sampler
from wmrl_jax.rollout.sampler import make_sampler
from wmrl_jax.rollout.stopping import stop_table
from wmrl_jax.train.config import ModelConfig

PIECES = [b"", b"", *(bytes([97 + i]) for i in range(10))]
SIZES = dict(group_size=4, prompt_tokens=5, new_tokens=14, eos_id=1, pad_id=0)
LIMIT = np.array([[14, 3, 0, 9], [1, 14, 14, 2], [14, 14, 5, 14]])


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(layers=2, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=24)
    return build_model(config, len(PIECES))


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


PROMPTS = np.random.default_rng(0).integers(2, len(PIECES), (3, 5)).astype(np.int32)
LENGTHS = np.array([5, 2, 4], np.int32)


@pytest.mark.parametrize("slots", [1, 5, 12, 40])
def test_rows_have_the_tokens_of_whole_batches_whatever_the_slots(model, params, slots):
    stop = stop_table(PIECES, ["ab", "dd"])
    settings = dict(temperature=np.array([0.0, 1.0, 0.8]), top_k=6, limit=LIMIT)
    samplers = (
        make_sampler(model, **SIZES, stop=stop),
        make_continuous_sampler(model, slots=slots, **SIZES, stop=stop),
    )
    whole, continuous = (
        sample(params, PROMPTS, LENGTHS, jax.random.key(7), **settings) for sample in samplers
    )
    for name in ("tokens", "loss_mask", "lengths", "finished", "prompt_lengths"):
        np.testing.assert_array_equal(getattr(continuous, name), getattr(whole, name))
    np.testing.assert_allclose(continuous.behaviour_logprobs, whole.behaviour_logprobs, atol=1e-4)


def test_fewer_than_one_slot_is_refused(model):
    with pytest.raises(UserError, match="at least 1 slot"):
        make_continuous_sampler(model, slots=0, **SIZES)


def test_prompts_are_rounded_up_to_few_widths_and_rows_come_back_in_one_shape(model, params):
    def make(width):
        return make_sampler(model, **{**SIZES, "prompt_tokens": width})

    sampler = bucket_prompts(make, [8, 4], pad_id=0)
    key = jax.random.key(3)
    direct = make(8)(params, jnp.pad(PROMPTS, ((0, 0), (0, 3))), LENGTHS, key)
    rows = sampler.sample(params, PROMPTS, LENGTHS, key)
    np.testing.assert_array_equal(rows.tokens, direct.tokens)
    short = sampler.sample(params, PROMPTS[1:2], LENGTHS[1:2], key)
    assert short.tokens.shape == (1, 4, 8 + 14)
    again = sampler.sample(params, PROMPTS[1:2, :3], LENGTHS[1:2], jax.random.key(4))
    assert again.tokens.shape == (1, 4, 8 + 14)
    assert sampler.programs() == 2
    with pytest.raises(UserError, match="a prompt has 9 tokens and the widest bucket 8"):
        sampler.sample(params, np.ones((1, 9), np.int32), np.array([9]), key)
    with pytest.raises(UserError, match="at least 1 token"):
        bucket_prompts(make, [], pad_id=0)
