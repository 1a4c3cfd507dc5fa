"""Decoding against caches gives what the full forward pass gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.models.model import build_model
from wmrl_jax.train.config import ModelConfig

SMALL = ModelConfig(layers=2, width=24, heads=4, kv_heads=2, head_dim=8, mlp_width=40)
GROUPS, ROWS, STEPS = 3, 2, 6


@pytest.fixture(scope="module")
def decoded():
    """Prompts of three lengths, two rows each, decoded token by token; the cache grows once."""
    model = build_model(SMALL, 29)
    params = model.init(jax.random.key(0))
    lengths = np.array([5, 3, 1], np.int32)
    random = np.random.default_rng(0)
    prompts = random.integers(0, 29, (GROUPS, 5)).astype(np.int32)
    tokens = random.integers(0, 29, (GROUPS, ROWS, STEPS)).astype(np.int32)
    prompt, last = jax.jit(model.prefill)(params, prompts, lengths)
    weights = jax.jit(partial(model.decode_weights, positions=11))(params)
    decode = jax.jit(model.decode)
    cache = model.empty_cache(GROUPS, ROWS, 4)
    states = []
    for step in range(STEPS):
        if step == 4:
            cache = model.grow_cache(cache, 8)
        cache, hidden = decode(weights, prompt, cache, tokens[:, :, step], np.int32(step))
        states.append(hidden)
    return model, params, prompts, lengths, tokens, (prompt, cache), last, np.stack(states, 2)


def test_cached_decoding_equals_the_full_forward_pass(decoded):
    model, params, prompts, lengths, tokens, _, last, states = decoded
    hidden = jax.jit(model.hidden)
    for group in range(GROUPS):
        length = int(lengths[group])
        for row in range(ROWS):
            whole = np.concatenate([prompts[group, :length], tokens[group, row]])
            padded = np.pad(whole, (0, 5 + STEPS - len(whole)))
            full = np.asarray(hidden(params, padded[None])[0])[: len(whole)]
            np.testing.assert_allclose(last[group], full[length - 1], atol=1e-5)
            np.testing.assert_allclose(states[group, row], full[length:], atol=1e-5)


def test_rows_taken_out_of_their_groups_decode_on_as_before(decoded):
    model, params, _, _, tokens, caches, _, _ = decoded
    taken = np.array([5, 0, 2])

    @jax.jit
    def both(params, caches, tokens):
        weights, step = model.decode_weights(params, 12), jnp.int32(STEPS)
        _, together = model.decode(weights, *caches, tokens, step)
        fewer = model.take_rows(*caches, taken)
        _, apart = model.decode(weights, *fewer, tokens.reshape(-1, 1)[taken], step)
        return together, apart

    together, apart = (np.asarray(x) for x in both(params, caches, tokens[:, :, 0]))

    np.testing.assert_allclose(apart[:, 0], together.reshape(-1, SMALL.width)[taken], atol=1e-5)
