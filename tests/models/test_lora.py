"""Adapters beside frozen weights: exact at the start, trained alone, and merged without a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models import qwen3_5
from wmrl_jax.models.lora import attach, init_adapters, merge
from wmrl_jax.models.model import build_model
from wmrl_jax.models.qwen3_5_layers import HybridArchitecture
from wmrl_jax.train.config import LoraConfig, ModelConfig

VOCABULARY = 31


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def model(request):
    if request.param == "dense":
        config = ModelConfig(layers=2, width=24, heads=4, kv_heads=2, head_dim=8, mlp_width=32)
        return build_model(config, VOCABULARY)
    return qwen3_5.make_model(
        HybridArchitecture(
            vocab_size=VOCABULARY, layers=4, width=24, heads=2, kv_heads=1, head_dim=8,
            mlp_width=32, rope_theta=1e4, rotary_dim=4, norm_eps=1e-6, tied_embeddings=False,
            linear_key_heads=1, linear_value_heads=2, linear_key_dim=4, linear_value_dim=8,
            conv_width=4, layer_types=("linear_attention", "full_attention") * 2, dtype="float32",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(model):
    return model.init(jax.random.key(0))


@pytest.fixture(scope="module")
def adapters(base):
    fresh = init_adapters(jax.random.key(1), base, rank=3, targets=LoraConfig().targets)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), fresh)


@pytest.fixture(scope="module")
def logits(model):
    @jax.jit
    def of(params, tokens):
        return model.hidden(params, tokens) @ model.unembedding(params)

    return of


TOKENS = np.random.default_rng(2).integers(0, VOCABULARY, (2, 10)).astype(np.int32)


def test_fresh_adapters_change_nothing(base, logits):
    fresh = init_adapters(jax.random.key(1), base, rank=3, targets=LoraConfig().targets)
    got = logits(attach(base, fresh, scale=2.0), TOKENS)
    np.testing.assert_allclose(got, logits(base, TOKENS), atol=1e-6)


def test_adapters_beside_the_base_give_the_logits_of_the_merged_weights(base, adapters, logits):
    attached = attach(base, adapters, scale=2.0)
    got, merged = logits(attached, TOKENS), logits(merge(attached), TOKENS)
    np.testing.assert_allclose(got, merged, atol=1e-5)
    assert float(jnp.abs(got - logits(base, TOKENS)).max()) > 0.01


def test_a_merged_weight_is_the_base_and_the_scaled_product(base, adapters):
    merged = merge(attach(base, adapters, scale=0.5))
    for name, adapter in adapters.items():
        before, after = base, merged
        for key in name.split("/"):
            before, after = before[key], after[key]
        expected = np.asarray(before) + 0.5 * np.asarray(adapter.a) @ np.asarray(adapter.b)
        np.testing.assert_allclose(after, expected, atol=1e-6)


def test_decoding_and_shared_prompts_read_the_adapters(model, base, adapters):
    attached = attach(base, adapters, scale=2.0)
    prompts, lengths = TOKENS[:, :6], np.array([6, 6], np.int32)

    @jax.jit
    def decoded(params):
        cache, hidden = model.prefill(params, prompts, lengths)
        weights = model.decode_weights(params, 10)
        rows = model.empty_cache(2, 1, 4)
        states = [hidden[:, None]]
        for step in range(4):
            token = TOKENS[:, 6 + step, None]
            rows, state = model.decode(weights, cache, rows, token, jnp.int32(step))
            states.append(state)
        return jnp.stack(states, axis=2)[:, 0]

    full = jax.jit(model.hidden)(attached, TOKENS)[:, 5:]
    np.testing.assert_allclose(decoded(attached), full, atol=1e-4)
    shared = jax.jit(model.completion_states)(attached, prompts, lengths, TOKENS[:, None, 6:])
    np.testing.assert_allclose(shared[:, 0], full, atol=1e-4)


def test_training_the_adapters_brings_the_loss_down_and_the_base_has_no_gradient(
    model, base, logits
):
    def loss(base, adapters):
        logp = jax.nn.log_softmax(logits(attach(base, adapters, scale=2.0), TOKENS)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1))

    adapters = init_adapters(jax.random.key(1), base, rank=3, targets=LoraConfig().targets)
    of_base = jax.jit(jax.grad(loss))(base, adapters)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(of_base))
    optimizer = optax.adam(0.02)

    @jax.jit
    def step(adapters, state):
        grads = jax.grad(loss, argnums=1)(base, adapters)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state

    before, state = float(loss(base, adapters)), optimizer.init(adapters)
    for _ in range(40):
        adapters, state = step(adapters, state)
    assert float(loss(base, adapters)) < before - 0.15


def test_only_matching_weights_have_adapters_of_the_rank(base):
    chosen = init_adapters(jax.random.key(0), base, rank=2, targets=r"layers/(.*/)?(q|up)")
    assert {name.split("/")[-1] for name in chosen} == {"q", "up"}
    for adapter in chosen.values():
        assert adapter.a.shape[-1] == adapter.b.shape[-2] == 2
        assert not adapter.b.any()


def test_targets_that_match_nothing_and_a_rank_that_does_not_fit_are_refused(base):
    with pytest.raises(UserError, match="no weight's path matches"):
        init_adapters(jax.random.key(0), base, rank=2, targets="layers/nothing")
    with pytest.raises(UserError, match="rank of 99 does not fit layers/"):
        init_adapters(jax.random.key(0), base, rank=99, targets=LoraConfig().targets)
