"""Slots at steps of their own decode what the full forward pass gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.models.model import build_model
from wmrl_jax.models.qwen3_5 import make_model
from wmrl_jax.models.qwen3_5_layers import HybridArchitecture
from wmrl_jax.models.ragged import decode_dense, decode_mapped, ragged_decoder
from wmrl_jax.train.config import ModelConfig

VOCABULARY, SLOTS, STEPS = 29, 4, 9
LENGTHS = np.array([5, 3, 1], np.int32)
DENSE = build_model(
    ModelConfig(layers=2, width=24, heads=4, kv_heads=2, head_dim=8, mlp_width=40), VOCABULARY
)
HYBRID = make_model(
    HybridArchitecture(
        vocab_size=VOCABULARY, layers=2, width=24, heads=4, kv_heads=2, head_dim=8, mlp_width=40,
        rope_theta=1e4, rotary_dim=4, norm_eps=1e-6, tied_embeddings=True, linear_key_heads=2,
        linear_value_heads=4, linear_key_dim=8, linear_value_dim=8, conv_width=4,
        layer_types=("linear_attention", "full_attention"), dtype="float32", remat="none",
    )
)  # fmt: skip
DECODERS = {
    "dense": (DENSE, partial(decode_dense, DENSE.arch)),
    "mapped": (DENSE, partial(decode_mapped, DENSE)),
    "hybrid": (HYBRID, partial(decode_mapped, HYBRID)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_slots_that_are_refilled_at_different_times_read_what_the_full_forward_pass_reads(name):
    # Each slot writes rows one behind the other, of other groups and of other lengths.
    model, decode = DECODERS[name]
    params = model.init(jax.random.key(0))
    random = np.random.default_rng(0)
    prompts = random.integers(0, VOCABULARY, (3, 5)).astype(np.int32)
    plan = [[(0, 9)], [(1, 2), (2, 4), (0, 3)], [(2, 5), (2, 4)], [(1, 1), (0, 7), (1, 1)]]
    groups, steps = np.zeros((2, STEPS, SLOTS), np.int32)
    for slot, rows in enumerate(plan):
        groups[:, slot] = [group for group, length in rows for _ in range(length)]
        steps[:, slot] = [step for _, length in rows for step in range(length)]
    tokens = random.integers(0, VOCABULARY, (STEPS, SLOTS)).astype(np.int32)

    @jax.jit
    def run(params):
        prompt, _ = model.prefill(params, prompts, jax.numpy.asarray(LENGTHS))
        weights = model.decode_weights(params, 5 + STEPS)

        def step(cache, now):
            groups, tokens, steps = now
            return decode(weights, prompt, groups, cache, tokens, steps)

        return jax.lax.scan(step, model.empty_cache(SLOTS, 1, STEPS), (groups, tokens, steps))[1]

    states = np.asarray(run(params))

    texts, wanted = [], []
    for slot, rows in enumerate(plan):
        start = 0
        for group, length in rows:
            text = [*prompts[group, : LENGTHS[group]], *tokens[start : start + length, slot]]
            texts.append(np.pad(text, (0, 5 + STEPS - len(text))))
            wanted.append((LENGTHS[group], states[start : start + length, slot]))
            start += length
    full = np.asarray(jax.jit(model.hidden)(params, np.stack(texts)))
    for row, (start, own) in zip(full, wanted, strict=True):
        np.testing.assert_allclose(own, row[start : start + len(own)], atol=2e-5)


def test_a_dense_model_gets_the_written_out_form_and_another_family_the_mapped_one():
    assert ragged_decoder(DENSE).func is decode_dense
    assert ragged_decoder(HYBRID).func is decode_mapped


def test_the_row_cache_keeps_the_dtype_of_the_compute():
    model = build_model(
        ModelConfig(
            layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=8, dtype="bfloat16"
        ),
        VOCABULARY,
    )

    def decoded(key):
        params = model.init(key)
        prompt, _ = model.prefill(params, jnp.zeros((1, 3), jnp.int32), jnp.array([3]))
        slots = jnp.zeros(2, jnp.int32)
        return ragged_decoder(model)(
            model.decode_weights(params, 8), prompt, slots, model.empty_cache(2, 1, 4), slots, slots
        )

    cache, hidden = jax.eval_shape(decoded, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves((cache, hidden))} == {jnp.dtype("bfloat16")}
