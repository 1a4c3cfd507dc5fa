"""The compiled step: corrections, gradient and update on small models."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.method import debias, denoise
from wmrl_jax.method.advantages import group_advantages
from wmrl_jax.models.lora import merge
from wmrl_jax.models.model import build_model
from wmrl_jax.train.completion_logprobs import make_capacity, make_reference
from wmrl_jax.train.config import Config, CorrectionsConfig, ModelConfig, TrainConfig
from wmrl_jax.train.mesh import make_mesh, put_by_group
from wmrl_jax.train.policy import make_policy
from wmrl_jax.train.step import init_state, make_train_step
from wmrl_jax.types import Rollouts, ScoredBatch

GROUPS, SIZE, PROMPT, NEW, VOCAB = 8, 4, 6, 10, 40


def make_config(**sections):
    config = Config(
        model=ModelConfig(
            layers=2, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=24,
            prompt_tokens=PROMPT, new_tokens=NEW,
        ),
        train=TrainConfig(groups=GROUPS, group_size=SIZE, logprob_chunk=4),
        corrections=CorrectionsConfig(capacity=32, min_pairs=32),
    )  # fmt: skip
    for section, values in sections.items():
        part = dataclasses.replace(getattr(config, section), **values)
        config = dataclasses.replace(config, **{section: part})
    return config


@pytest.fixture(scope="module")
def model():
    return build_model(make_config().model, VOCAB)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@partial(jax.jit, static_argnums=0)
def full_logprobs(model, params, tokens):
    """Log-probs [G, N, T] by one forward pass over whole rows, without chunks or shared prompts."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    logits = model.hidden(params, flat) @ model.unembedding(params)
    logprobs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    got = jnp.take_along_axis(logprobs, flat[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(got, ((0, 0), (1, 0))).reshape(tokens.shape)


def make_batch(model, params, seed=0, anchors=(1,)):
    rng = np.random.default_rng(seed)
    length = PROMPT + NEW
    tokens = rng.integers(3, VOCAB, (GROUPS, SIZE, length)).astype(np.int32)
    starts = rng.integers(2, PROMPT + 1, GROUPS)
    ends = starts[:, None] + rng.integers(1, NEW + 1, (GROUPS, SIZE))
    for group, start in enumerate(starts):
        tokens[group, :, :start] = tokens[group, 0, :start]
    slots = np.arange(length)
    mask = (slots >= starts[:, None, None]) & (slots < ends[..., None])
    behaviour = np.where(mask, full_logprobs(model, params, tokens), 0.0).astype(np.float32)
    is_anchor = np.isin(np.arange(GROUPS), anchors)
    predicted = rng.uniform(0, 1, (GROUPS, SIZE)).astype(np.float32)
    executed = np.where(is_anchor[:, None], rng.uniform(0, 1, (GROUPS, SIZE)), np.nan)
    return ScoredBatch(tokens, mask, behaviour, predicted, executed.astype(np.float32), is_anchor)


def run(model, params, config, batch, devices=1, optimizer=None):
    mesh = make_mesh(jax.devices()[:devices])
    optimizer = optimizer or optax.sgd(1.0)
    state = init_state(params, optimizer, config, jax.random.key(1), mesh)
    new, metrics = make_train_step(model, optimizer, config, mesh)(state, put_by_group(mesh, batch))
    return jax.device_get(new), jax.device_get(metrics)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_the_update_is_the_gradient_of_a_plainly_written_loss(model, params):
    config = make_config(loss={"entropy_coef": 0.0}, corrections={"denoise": False})
    batch = make_batch(model, params)
    rewards = np.where(batch.is_anchor[:, None], batch.executed, batch.predicted)
    advantages = group_advantages(rewards)

    def plain(params):
        ratio = jnp.exp(full_logprobs(model, params, batch.tokens) - batch.behaviour_logprobs)
        surrogate = jnp.where(batch.loss_mask, ratio * advantages[..., None], 0.0)
        # With one weight a group, each stream's token mean counts by its number of groups.
        per_stream = [
            surrogate[chosen].sum() / batch.loss_mask[chosen].sum() * chosen.sum()
            for chosen in (batch.is_anchor, ~batch.is_anchor)
        ]
        return -sum(per_stream) / GROUPS

    expected = jax.tree.map(lambda p, g: p - g, params, jax.grad(plain)(params))
    new, _ = run(model, params, config, batch)
    assert_trees_close(new.params, expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("fusion", ["inverse_variance", "control_variate"])
def test_eight_devices_and_microbatches_give_the_step_of_one(model, params, fusion):
    sections = {"corrections": {"min_pairs": 2, "fusion": fusion}}
    batch = make_batch(model, params, anchors=(1, 4))
    one, metrics = run(model, params, make_config(**sections), batch)
    eight, metrics_eight = run(model, params, make_config(**sections), batch, devices=8)
    split = make_config(**sections, train={"microbatches": 4})
    parts, metrics_parts = run(model, params, split, batch, devices=2)
    for other, other_metrics in ((eight, metrics_eight), (parts, metrics_parts)):
        assert_trees_close(other.params, one.params, rtol=1e-4, atol=1e-6)
        assert_trees_close(other_metrics, metrics, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sections", [{}, {"train": {"microbatches": 2}}])
def test_a_packed_batch_gives_the_step_of_a_padded_one_on_any_number_of_devices(
    model, params, sections
):
    batch = make_batch(model, params, anchors=(1, 4))
    empty = batch._replace(loss_mask=batch.loss_mask & (np.arange(GROUPS) != 2)[:, None, None])
    expected, metrics = run(model, params, make_config(**sections), empty)
    train = {**sections.get("train", {}), "packing": True}
    packed = make_config(train=train)
    for devices in (1, 4):
        got, got_metrics = run(model, params, packed, empty, devices=devices)
        assert_trees_close(got.params, expected.params, rtol=1e-4, atol=1e-6)
        assert_trees_close(got_metrics, metrics, rtol=1e-4, atol=1e-5)


def test_a_packed_step_computes_fewer_tokens_where_completions_are_short(model, params):
    batch = make_batch(model, params)
    short = np.arange(PROMPT + NEW) < batch.loss_mask.any(1).argmax(-1)[:, None, None] + 2
    config = make_config(train={"packing": True})
    capacity = make_capacity(config, make_mesh(jax.devices()[:1]))
    assert capacity(batch.loss_mask & short) == SIZE * NEW // 4
    assert capacity(np.ones_like(batch.loss_mask)) == SIZE * NEW
    assert make_capacity(make_config(), make_mesh())(batch.loss_mask) is None


def test_a_slot_without_a_group_and_ungraded_rollouts_contribute_nothing(model, params):
    config = make_config()
    batch = make_batch(model, params, anchors=(1,))
    empty = batch._replace(
        loss_mask=batch.loss_mask & ~batch.is_anchor[:, None, None],
        predicted=np.where(batch.is_anchor[:, None], np.nan, batch.predicted),
        executed=np.full_like(batch.executed, np.nan),
    )
    garbage = empty._replace(tokens=np.where(batch.is_anchor[:, None, None], 5, batch.tokens))
    new, metrics = run(model, params, config, empty)
    other, _ = run(model, params, config, garbage)
    assert metrics.groups_ungraded == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.params))
    assert_trees_close(other.params, new.params, rtol=0, atol=1e-7)


def test_a_batch_of_equal_rewards_leaves_the_parameters_alone(model, params):
    batch = make_batch(model, params)
    same = batch._replace(
        predicted=np.full_like(batch.predicted, 0.1),
        executed=np.where(np.isnan(batch.executed), np.nan, np.float32(0.1)),
    )
    new, metrics = run(model, params, make_config(), same)
    assert metrics.groups_degenerate == GROUPS
    assert_trees_close(new.params, jax.device_get(params), rtol=0, atol=0)


def test_moments_are_measured_with_the_map_of_the_step_before(model, params):
    config = make_config(corrections={"min_pairs": 4})
    batch = make_batch(model, params, anchors=(0, 3))
    new, metrics = run(model, params, config, batch)
    untouched = denoise.observe(
        denoise.init(config.corrections.half_life), batch.predicted[[0, 3]], batch.executed[[0, 3]]
    )
    fitted = debias.observe(
        debias.init(config.corrections.capacity, 4), batch.predicted, batch.executed
    )
    np.testing.assert_allclose(metrics.moment_fr, denoise.moments(untouched)[1], rtol=1e-5)
    np.testing.assert_allclose(
        metrics.reward_calibrated,
        np.mean(np.asarray(debias.apply(fitted, batch.predicted))[~batch.is_anchor]),
        rtol=1e-5,
    )
    assert new.debias.count == 2 * SIZE


@pytest.mark.parametrize(
    ("source", "used"), [("execution", "executed"), ("world_model", "predicted")]
)
def test_a_single_source_of_reward_reads_that_source_alone(model, params, source, used):
    config = make_config(reward={"source": source})
    batch = make_batch(model, params)
    graded = np.random.default_rng(3).uniform(0, 1, (GROUPS, SIZE)).astype(np.float32)
    unread = np.full_like(graded, np.nan)
    batch = batch._replace(predicted=unread, executed=unread, is_anchor=np.zeros(GROUPS, bool))
    _, metrics = run(model, params, config, batch._replace(**{used: graded}))
    np.testing.assert_allclose(metrics.reward, graded.mean(), rtol=1e-6)
    assert metrics.groups_used == GROUPS
    assert metrics.debias_pairs == 0


def test_the_logged_difference_is_that_of_behaviour_and_recomputed_logprobs(model, params):
    config = make_config()
    batch = make_batch(model, params)
    _, metrics = run(model, params, config, batch)
    assert metrics.sampler_trainer_difference < 1e-4
    moved = batch.behaviour_logprobs + np.where(batch.loss_mask, 0.25, 0).astype(np.float32)
    _, metrics = run(model, params, config, batch._replace(behaviour_logprobs=moved))
    np.testing.assert_allclose(metrics.sampler_trainer_difference, 0.25, atol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_the_reference_gives_the_logprobs_of_its_parameters(model, params, packing):
    config = make_config(loss={"kl_coef": 0.1}, train={"packing": packing})
    batch = make_batch(model, params)
    mesh = make_mesh(jax.devices()[:1])
    lengths = batch.loss_mask.any(1).argmax(-1).astype(np.int32)
    rollouts = Rollouts(
        *batch[:3], prompt_lengths=lengths, lengths=np.zeros((GROUPS, SIZE), np.int32),
        finished=np.zeros((GROUPS, SIZE), bool),
    )  # fmt: skip
    got = make_reference(model, config, mesh)(params, rollouts)
    np.testing.assert_allclose(got, batch.behaviour_logprobs, atol=1e-4)
    batch = batch._replace(reference_logprobs=np.asarray(got))
    _, metrics = run(model, params, config, batch)
    assert abs(metrics.kl) < 1e-5
    assert make_reference(model, make_config(), mesh) is None


def test_groups_that_cannot_be_divided_are_refused_in_one_sentence(model, params):
    config = make_config(train={"groups": 6})
    with pytest.raises(UserError, match=r"train\.groups is 6.*multiple of 8"):
        make_train_step(model, optax.sgd(1.0), config, make_mesh(jax.devices()[:8]))


def test_with_adapters_the_step_is_the_chain_rule_on_the_whole_weights_gradient(model, params):
    config = make_config(lora={"rank": 3, "alpha": 6.0, "targets": "layers/(q|up)"})
    start = make_policy(config.lora, params, jax.random.key(3))
    rng = np.random.default_rng(0)
    trained = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), start.initial
    )
    whole = merge(start.full(trained))
    batch = make_batch(model, whole)
    plain, metrics = run(model, whole, config, batch)

    mesh = make_mesh(jax.devices()[:1])
    optimizer = optax.sgd(1.0)
    state = init_state(trained, optimizer, config, jax.random.key(1), mesh)
    step = make_train_step(model, optimizer, config, mesh, start)
    new, ours = step(state, put_by_group(mesh, batch))

    assert set(new.params) == {"layers/q", "layers/up"}
    for name, adapter in trained.items():
        leaf = name.split("/")[1]
        gradient = whole["layers"][leaf] - plain.params["layers"][leaf]
        expected_a = adapter.a - 2.0 * gradient @ jnp.swapaxes(adapter.b, 1, 2)
        expected_b = adapter.b - 2.0 * jnp.swapaxes(adapter.a, 1, 2) @ gradient
        np.testing.assert_allclose(new.params[name].a, expected_a, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(new.params[name].b, expected_b, rtol=1e-3, atol=1e-6)
    assert float(ours.loss) == pytest.approx(float(metrics.loss), abs=1e-6)
    assert_trees_close(start.base, params)  # neither changed nor given up
