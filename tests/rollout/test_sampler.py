"""The sampler: what it draws, what it says of it, when it stops, and that nothing leaks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy import stats

from wmrl_jax.errors import UserError
from wmrl_jax.method.logprobs import token_logprobs
from wmrl_jax.models.model import Model, build_model
from wmrl_jax.rollout.sampler import make_sampler
from wmrl_jax.train.config import ModelConfig

SMALL = ModelConfig(layers=2, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=24)
VOCABULARY, PAD, EOS = 12, 0, 1
GROUPS, ROWS, PROMPT, NEW = 8, 8, 5, 16
LENGTHS = np.array([5, 3, 1, 4, 2, 5, 3, 4], np.int32)
MODEL = build_model(SMALL, VOCABULARY)
PARAMS = jax.tree.map(lambda x: 2.0 * x, MODEL.init(jax.random.key(0)))
PROMPTS = np.random.default_rng(1).integers(2, VOCABULARY, (GROUPS, PROMPT)).astype(np.int32)
PROMPTS[np.arange(PROMPT) >= LENGTHS[:, None]] = PAD
SIZES = {"prompt_tokens": PROMPT, "new_tokens": NEW, "eos_id": EOS, "pad_id": PAD, "segment": 8}
SAMPLE = make_sampler(MODEL, group_size=ROWS, **SIZES)


def sampled(seed=3, params=PARAMS, **settings):
    return SAMPLE(params, PROMPTS, LENGTHS, jax.random.key(seed), **settings)


@jax.jit
def recomputed(rollouts, params=PARAMS, temperature=1.0):
    """What a trainer computes of the rows, where they have a loss; entry t scores token t."""
    rows = rollouts.tokens.reshape(-1, rollouts.tokens.shape[-1])
    hidden = MODEL.hidden(params, rows)
    scored, _ = token_logprobs(
        hidden[:, :-1], MODEL.unembedding(params), rows[:, 1:], chunk=8, temperature=temperature
    )
    scored = jnp.pad(scored, ((0, 0), (1, 0))).reshape(rollouts.tokens.shape)
    return jnp.where(rollouts.loss_mask, scored, 0.0)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 6, "top_p": 0.9}]
)
def test_behaviour_logprobs_equal_those_the_trainer_recomputes(settings):
    rollouts = sampled(**settings)

    expected = recomputed(rollouts, temperature=settings.get("temperature", 1.0))

    assert rollouts.loss_mask.any()
    np.testing.assert_allclose(rollouts.behaviour_logprobs, expected, atol=1e-4)


def test_in_bfloat16_the_caches_are_half_as_large_and_log_probs_agree_within_its_precision():
    model = build_model(replace(SMALL, dtype="bfloat16"), VOCABULARY)
    cache = jax.eval_shape(lambda: model.empty_cache(1, 1, 4))
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    sample = make_sampler(model, group_size=ROWS, **SIZES)

    rollouts = sample(PARAMS, PROMPTS, LENGTHS, jax.random.key(3))

    exact = recomputed(rollouts)  # in float32, of the same tokens
    gap = np.abs(np.asarray(rollouts.behaviour_logprobs - exact))[np.asarray(rollouts.loss_mask)]
    assert 0.0 < gap.mean() < 0.02 and gap.max() < 0.15


def test_rows_are_prompt_then_completion_then_padding():
    rollouts = sampled()
    for group in range(GROUPS):
        start = int(LENGTHS[group])
        for row in range(ROWS):
            tokens, end = rollouts.tokens[group, row], int(rollouts.lengths[group, row])
            np.testing.assert_array_equal(tokens[:start], PROMPTS[group, :start])
            np.testing.assert_array_equal(tokens[end:], PAD)
            np.testing.assert_array_equal(
                rollouts.loss_mask[group, row],
                (np.arange(PROMPT + NEW) >= start) & (np.arange(PROMPT + NEW) < end),
            )
            written = np.asarray(tokens[start:end])
            assert EOS not in written[:-1]
            assert rollouts.finished[group, row] == (written[-1] == EOS)
            assert rollouts.finished[group, row] or len(written) == NEW


def test_the_first_token_follows_the_exact_softmax():
    rows = 4096
    sample = make_sampler(MODEL, group_size=rows, **{**SIZES, "new_tokens": 1})
    states = jax.jit(MODEL.hidden)(PARAMS, PROMPTS[:1, : int(LENGTHS[0])])
    exact = np.asarray(jax.nn.softmax(states[0, -1] @ MODEL.unembedding(PARAMS)), np.float64)

    rollouts = sample(PARAMS, PROMPTS[:1], LENGTHS[:1], jax.random.key(9))

    counts = np.bincount(rollouts.tokens[0, :, int(LENGTHS[0])], minlength=VOCABULARY)
    assert stats.chisquare(counts, exact / exact.sum() * rows).pvalue > 1e-4


def test_rows_of_a_group_and_repeated_calls_and_equal_prompts_draw_different_noise():
    same = np.broadcast_to(PROMPTS[:1], PROMPTS.shape)
    lengths = np.broadcast_to(LENGTHS[:1], LENGTHS.shape)
    calls = [
        SAMPLE(PARAMS, same, lengths, jax.random.fold_in(jax.random.key(0), call)).tokens
        for call in range(2)
    ]

    texts = {tuple(row) for row in np.stack(calls).reshape(-1, PROMPT + NEW)}
    assert len(texts) > 0.8 * 2 * GROUPS * ROWS


def test_single_row_calls_with_folded_keys_differ_from_each_other():
    sample = make_sampler(MODEL, group_size=1, **SIZES)
    texts = {
        tuple(
            np.asarray(
                sample(
                    PARAMS, PROMPTS[:1], LENGTHS[:1], jax.random.fold_in(jax.random.key(0), call)
                ).tokens[0, 0]
            )
        )
        for call in range(8)
    }

    assert len(texts) >= 7


def test_new_weights_change_the_very_next_sample():
    other = {**PARAMS, "final_norm": -PARAMS["final_norm"]}

    before, after = sampled(), sampled(params=other)

    assert (before.tokens != after.tokens).any()
    np.testing.assert_allclose(after.behaviour_logprobs, recomputed(after, other), atol=1e-4)


def test_temperature_zero_writes_the_most_probable_continuation_of_the_full_forward_pass():
    rollouts = sampled(temperature=0.0)

    rows = rollouts.tokens.reshape(-1, PROMPT + NEW)
    states = jax.jit(MODEL.hidden)(PARAMS, rows)
    best = np.argmax(states @ MODEL.unembedding(PARAMS), axis=-1).reshape(rollouts.tokens.shape)
    written = np.asarray(rollouts.loss_mask)[..., 1:]
    np.testing.assert_array_equal(
        np.asarray(rollouts.tokens)[..., 1:][written], best[..., :-1][written]
    )


def test_groups_divided_over_eight_devices_give_the_tokens_of_one_device():
    # Each device sees one group, so this also says that a row depends on no other group.
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "more"))
    sample = make_sampler(MODEL, group_size=ROWS, mesh=mesh, **SIZES)

    rollouts = sample(PARAMS, PROMPTS, LENGTHS, jax.random.key(3))

    assert len(rollouts.tokens.sharding.device_set) == 8
    alone = sampled()
    np.testing.assert_array_equal(rollouts.tokens, alone.tokens)
    np.testing.assert_array_equal(rollouts.lengths, alone.lengths)
    np.testing.assert_allclose(rollouts.behaviour_logprobs, alone.behaviour_logprobs, atol=1e-5)


def repeating_model(calls: list[int]) -> Model:
    """Draws a first token t evenly, then writes t again until 2*t are written, then ends."""

    def decode(weights, prompt, rows, tokens, step):
        jax.debug.callback(lambda rows: calls.append(int(rows)), tokens.size)
        first = jnp.where(step == 0, tokens, rows)
        following = jnp.where(step + 1 < 2 * first, first, EOS)
        return first, 100.0 * jax.nn.one_hot(following, VOCABULARY)

    def prefill(params, tokens, lengths):
        return lengths, jnp.zeros((len(tokens), VOCABULARY)).at[:, :2].set(-100.0)

    def take_rows(prompt, rows, indices):
        return prompt[indices // rows.shape[1]], rows.reshape(-1, 1)[indices]

    return Model(
        arch=MODEL.arch,
        init=MODEL.init,
        hidden=MODEL.hidden,
        completion_states=MODEL.completion_states,
        packed_states=MODEL.packed_states,
        unembedding=lambda params: jnp.eye(VOCABULARY),
        prefill=prefill,
        decode_weights=lambda params, positions: params,
        empty_cache=lambda groups, group_size, slots: jnp.zeros((groups, group_size), jnp.int32),
        grow_cache=lambda cache, slots: cache,
        take_rows=take_rows,
        decode=decode,
    )


def test_rows_that_go_on_alone_keep_their_own_text_and_the_loop_stops_with_the_last_of_them():
    calls: list[int] = []
    sample = make_sampler(repeating_model(calls), group_size=ROWS, **{**SIZES, "new_tokens": 40})

    rollouts = sample({}, PROMPTS, LENGTHS, jax.random.key(0))

    jax.effects_barrier()
    written = np.asarray(rollouts.lengths - LENGTHS[:, None])
    for group in range(GROUPS):
        start = int(LENGTHS[group])
        for row in range(ROWS):
            first = int(rollouts.tokens[group, row, start])
            np.testing.assert_array_equal(
                rollouts.tokens[group, row, start : start + 2 * first + 1],
                [first] * 2 * first + [EOS],
            )
            assert written[group, row] == 2 * first + 1
    assert rollouts.finished.all()
    # A step has as many rows as the smallest batch that holds those that had not ended.
    left = [int((written > step).sum()) for step in range(written.max())]
    assert calls == [next(size for size in (16, 32, 64) if size >= rows) for rows in left]


def test_compiled_programs_do_not_grow_with_settings_or_calls():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: (
            compiled.append(name) if name.endswith("backend_compile_duration") else None
        )
    )
    sampled()
    compiled.clear()

    for seed, temperature in ((5, 0.0), (6, 0.5), (7, 1.0)):
        sampled(seed, temperature=temperature, top_k=seed, top_p=0.9)

    assert compiled == []


def test_a_prompt_of_another_width_is_refused():
    with pytest.raises(UserError, match="prompts of 5 tokens"):
        SAMPLE(PARAMS, PROMPTS[:, :4], LENGTHS, jax.random.key(0))


def test_groups_that_do_not_divide_over_the_devices_are_refused():
    sample = make_sampler(
        MODEL, group_size=ROWS, mesh=Mesh(np.array(jax.devices()), ("data",)), **SIZES
    )
    with pytest.raises(UserError, match="divided over 8 devices"):
        sample(PARAMS, PROMPTS[:3], LENGTHS[:3], jax.random.key(0))
