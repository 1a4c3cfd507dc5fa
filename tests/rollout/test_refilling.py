"""Slots that are refilled: when, with what noise and weights, and that rows do not touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.method.logprobs import token_logprobs
from wmrl_jax.models.model import build_model
from wmrl_jax.rollout import continuous
from wmrl_jax.rollout.continuous import make_continuous_sampler
from wmrl_jax.rollout.sampler import make_sampler
from wmrl_jax.train.config import ModelConfig

SMALL = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=24)
VOCABULARY, PAD, EOS = 12, 0, 1
GROUPS, ROWS, PROMPT, NEW = 5, 8, 4, 16
LENGTHS = np.array([4, 2, 1, 3, 4], np.int32)
MODEL = build_model(SMALL, VOCABULARY)
PARAMS = jax.tree.map(lambda x: 2.0 * x, MODEL.init(jax.random.key(0)))
PROMPTS = np.random.default_rng(1).integers(2, VOCABULARY, (GROUPS, PROMPT)).astype(np.int32)
SIZES = {"group_size": ROWS, "prompt_tokens": PROMPT, "new_tokens": NEW, "pad_id": PAD}
BATCH = make_sampler(MODEL, eos_id=EOS, **SIZES)
# More than 32, so that the last rows are finished in smaller arrays.
SLOTS = make_continuous_sampler(MODEL, slots=33, eos_id=EOS, **SIZES)


def of(sampler=SLOTS, seed=3, params=PARAMS, **settings):
    return sampler(params, PROMPTS, LENGTHS, jax.random.key(seed), **settings)


def test_settings_and_limits_by_row_stay_with_their_row_over_refills_and_smaller_arrays():
    limit = np.random.default_rng(2).integers(-1, NEW + 4, (GROUPS, ROWS))
    limit[0, 0], limit[4, 7] = 0, -1
    settings = {
        "temperature": np.linspace(0.0, 2.0, GROUPS),
        "top_k": np.arange(GROUPS * ROWS).reshape(GROUPS, ROWS) % 4,
        "top_p": np.linspace(0.5, 1.0, GROUPS),
        "min_p": 0.1,
        "limit": limit,
    }

    ours, theirs = of(**settings), of(BATCH, **settings)

    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    assert not ours.loss_mask[0, 0].any() and not ours.loss_mask[4, 7].any()


def test_log_probs_equal_those_the_trainer_recomputes():
    rollouts = of()

    rows = rollouts.tokens.reshape(GROUPS * ROWS, -1)
    scored, _ = token_logprobs(
        jax.jit(MODEL.hidden)(PARAMS, rows)[:, :-1], MODEL.unembedding(PARAMS), rows[:, 1:], chunk=8
    )
    scored = jnp.pad(scored, ((0, 0), (1, 0))).reshape(rollouts.tokens.shape)
    expected = jnp.where(rollouts.loss_mask, scored, 0.0)
    np.testing.assert_allclose(rollouts.behaviour_logprobs, expected, atol=1e-4)


def test_what_a_row_draws_does_not_depend_on_the_other_rows():
    changed = np.zeros((GROUPS, ROWS), bool)
    changed[:, ::3] = True

    before = of()
    after = of(temperature=np.where(changed, 3.0, 1.0), limit=np.where(changed, 3, NEW))

    assert (np.asarray(before.tokens)[changed] != np.asarray(after.tokens)[changed]).any()
    np.testing.assert_array_equal(
        np.asarray(before.tokens)[~changed], np.asarray(after.tokens)[~changed]
    )


def test_rows_of_a_group_and_repeated_calls_draw_different_noise():
    calls = [np.asarray(of(seed=seed).tokens).reshape(-1, PROMPT + NEW) for seed in (0, 1)]

    texts = {tuple(row) for row in np.concatenate(calls)}

    assert len(texts) > 0.8 * 2 * GROUPS * ROWS


def test_new_weights_change_the_very_next_sample():
    other = {**PARAMS, "final_norm": -PARAMS["final_norm"]}

    before, after = of(), of(params=other)

    assert (before.tokens != after.tokens).any()
    np.testing.assert_array_equal(after.tokens, of(BATCH, params=other).tokens)


def test_a_free_slot_is_refilled_at_once_and_the_loop_ends_with_the_last_row(monkeypatch):
    sizes = []
    decoder = continuous.ragged_decoder

    def counting(model):
        decode = decoder(model)

        def counted(weights, prompt, groups, rows, tokens, steps):
            jax.debug.callback(lambda tokens: sizes.append(tokens.size), tokens)
            return decode(weights, prompt, groups, rows, tokens, steps)

        return counted

    monkeypatch.setattr(continuous, "ragged_decoder", counting)
    sample = make_continuous_sampler(MODEL, slots=3, eos_id=-1, **SIZES)
    limit = np.random.default_rng(0).integers(1, NEW, (GROUPS, ROWS))

    jax.block_until_ready(of(sample, limit=limit))
    jax.effects_barrier()

    free = [0, 0, 0]  # when each slot is free again, rows being served in order
    for length in limit.reshape(-1):
        free[free.index(min(free))] += int(length)
    assert sizes == [3] * max(free)


def test_bad_prompts_and_settings_are_refused():
    with pytest.raises(UserError, match="prompts of 4 tokens, these have 3"):
        SLOTS(PARAMS, PROMPTS[:, :3], LENGTHS, jax.random.key(0))
    with pytest.raises(UserError, match=r"top_p has the shape \(3,\)"):
        of(top_p=[0.5, 0.5, 0.5])
