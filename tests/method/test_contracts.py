"""One table of every estimator, advantage and loss, driven through the same contracts."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wmrl_jax.method import anchors, debias, denoise
from wmrl_jax.method.advantages import ADVANTAGES, group_advantages, group_kinds
from wmrl_jax.method.isotonic import isotonic_regression
from wmrl_jax.method.logprobs import token_logprobs
from wmrl_jax.method.losses import LOSSES, policy_loss

DEVICES = 8
G, N, T, D, V, CAPACITY = 4, 4, 5, 3, 7, 12


def debias_pass(map, scores, rewards):
    """A state's whole life: init, observe twice, apply and curve."""
    state = debias.init(CAPACITY, min_pairs=2)
    state = debias.observe(state, scores, rewards, map=map)
    state = debias.observe(state, scores / 2, rewards, map=map)
    return state, debias.apply(state, scores), debias.curve(state)


def denoise_pass(rule, standardized, scores, rewards):
    state = denoise.observe(denoise.init(8.0), scores, rewards)
    w = denoise.weights(state, 1, 3, standardized, rule=rule)
    usable = group_kinds(rewards).used
    return state, w, denoise.group_weights(w, jnp.arange(G) == 0, usable)


def control_variate_pass(scores, rewards):
    used = group_kinds(rewards).used
    coefficient = denoise.slope(denoise.observe(denoise.init(8.0), scores, rewards))
    predicted = group_advantages(scores)
    is_anchor = jnp.arange(G) % 2 == 0
    return denoise.control_variate(
        group_advantages(rewards), predicted, is_anchor, used, used, coefficient
    )


def combine_pass(a, b):
    return denoise.combine({"x": a}, {"x": b}, (jnp.float32(0.3), jnp.float32(0.7)))


def loss_pass(name, logprobs, behaviour, advantages):
    mask = jnp.arange(T) < jnp.array([1, 2, 5, 4])[:, None]
    return policy_loss(logprobs, behaviour, advantages, mask, name=name, importance_cap=2.0)


def logprob_pass(hidden, unembedding):
    return token_logprobs(hidden, unembedding, jnp.arange(T) % V, chunk=2)


def anchor_pass(seed):
    step = (1000 * seed).astype(jnp.int32)
    return anchors.select(jax.random.key(3), step, G, 0.4)


PAIR = ((G, N), (G, N))
TABLE = {
    "isotonic": (isotonic_regression, ((40,),)),
    "isotonic, weighted": (isotonic_regression, ((40,), (40,))),
    "isotonic, masked": (lambda y, m: isotonic_regression(y, mask=m > 0.5), ((40,), (40,))),
    **{f"debias, {map}": (partial(debias_pass, map), PAIR) for map in debias.MAPS},
    **{f"denoise, {rule}": (partial(denoise_pass, rule, True), PAIR) for rule in denoise.RULES},
    "denoise, centred": (partial(denoise_pass, "inverse_variance", False), PAIR),
    "control variate": (control_variate_pass, PAIR),
    "combine": (combine_pass, ((5,), (5,))),
    **{f"{name} advantages": (advantages, ((G, N),)) for name, advantages in ADVANTAGES.items()},
    "kinds of groups": (group_kinds, ((G, N),)),
    **{f"{name} loss": (partial(loss_pass, name), ((4, T), (4, T), (4,))) for name in LOSSES},
    "log-probs": (logprob_pass, ((T, D), (D, V))),
    "anchors": (anchor_pass, ((),)),
}
"""Name: (function of float arrays, their shapes)."""


def problems(shapes) -> list[jax.Array]:
    """Inputs of `DEVICES` problems, each with a leading axis."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.uniform(size=(DEVICES, *s)), jnp.float32) for s in shapes]


def assert_same(got, expected) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


entries = pytest.mark.parametrize(("function", "shapes"), TABLE.values(), ids=TABLE)


@entries
def test_compiled_batched_and_sharded_runs_give_what_a_plain_call_gives(function, shapes) -> None:
    batch = problems(shapes)
    rows = [function(*(x[i] for x in batch)) for i in range(2)]
    plain = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    compiled = jax.jit(function)(*(x[0] for x in batch))
    batched = jax.jit(jax.vmap(function))(*batch)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharded = jax.jit(
        jax.shard_map(
            lambda *xs: jax.tree.map(lambda leaf: leaf[None], function(*(x[0] for x in xs))),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
        )
    )(*batch)

    assert_same(compiled, rows[0])
    assert_same(jax.tree.map(lambda leaf: leaf[:2], batched), plain)
    assert_same(sharded, batched)


@entries
def test_abstract_shapes_suffice_and_tell_the_truth(function, shapes) -> None:
    abstract = jax.eval_shape(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))

    concrete = function(*(x[0] for x in problems(shapes)))

    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), concrete)


# `combine` keeps the dtype of its leaves, and the choice of anchors measures nothing.
MEASURES = {name: entry for name, entry in TABLE.items() if name not in ("combine", "anchors")}


@pytest.mark.parametrize(("function", "shapes"), MEASURES.values(), ids=MEASURES)
def test_bfloat16_inputs_give_what_their_float32_values_give(function, shapes) -> None:
    inputs = [x[0].astype(jnp.bfloat16) for x in problems(shapes)]

    got = jax.jit(function)(*inputs)

    widened = jax.jit(function)(*(x.astype(jnp.float32) for x in inputs))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(widened), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0.02, atol=0.02)


STATES = {
    "debias": (
        debias.init(CAPACITY, min_pairs=2),
        {map: partial(debias.observe, map=map) for map in debias.MAPS},
    ),
    "denoise": (denoise.init(8.0), {"": denoise.observe}),
}


@pytest.mark.parametrize(("start", "observers"), STATES.values(), ids=STATES)
class TestStates:
    def test_shapes_and_shardings_are_the_same_from_init_and_observe(
        self, start, observers
    ) -> None:
        scores, rewards = (x[0] for x in problems(PAIR))
        whole = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P())
        placed = jax.device_put(start, whole)

        for observe in observers.values():
            after = jax.jit(observe, out_shardings=whole)(placed, scores, rewards)
            for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(after), strict=True):
                assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            assert jax.tree.structure(placed) == jax.tree.structure(after)

    def test_a_saved_and_restored_state_goes_on_as_if_nothing_had_happened(
        self, start, observers
    ) -> None:
        batch = problems(PAIR)

        for observe in map(jax.jit, observers.values()):
            middle = observe(start, batch[0][0], batch[1][0])
            saved = pickle.dumps(jax.tree.map(np.asarray, middle))
            restored = jax.tree.map(jnp.asarray, pickle.loads(saved))
            once = observe(middle, batch[0][1], batch[1][1])
            again = observe(restored, batch[0][1], batch[1][1])
            for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
                np.testing.assert_array_equal(a, b)

    def test_observing_nothing_changes_no_measurement(self, start, observers) -> None:
        scores, rewards = (x[0] for x in problems(PAIR))

        for observe in map(jax.jit, observers.values()):
            before = observe(start, scores, rewards)
            after = observe(before, scores, jnp.full_like(rewards, jnp.nan))
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
                np.testing.assert_array_equal(a, b)
