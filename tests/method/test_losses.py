"""Policy losses against loops over rollouts and tokens, and finite differences of those loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.method.losses import KL, LOSSES, loss_count, policy_loss

B, T, MAX_TOKENS = 6, 9, 12
LOW, HIGH = 0.2, 0.28
NAMES = sorted(LOSSES)


class Problem:
    """A batch whose ratios lie on both sides of both clips."""

    def __init__(self, seed: int = 0, spread: float = 0.3) -> None:
        rng = np.random.default_rng(seed)
        shape = (B, T)
        self.logprobs = rng.uniform(-3, -0.5, size=shape)
        self.behaviour = self.logprobs + spread * rng.normal(size=shape)
        self.proximal = self.logprobs + spread * rng.normal(size=shape)
        self.reference = self.logprobs + spread * rng.normal(size=shape)
        self.entropy = rng.uniform(0, 2, size=shape)
        self.advantages = rng.normal(size=B)
        self.mask = rng.uniform(size=shape) < 0.7
        self.mask[1] = False
        self.mask[2] = np.arange(T) == 3
        self.keep = np.array([True, True, True, False, True, True])


def loop_loss(
    p, logprobs, name, *, frozen, cap=None, proximal=False, kl=None, kl_coef=0.0, entropy_coef=0.0,
    low=LOW, high=HIGH,
):  # fmt: skip
    """The loss as its paper writes it, in float64. `frozen` holds the values of constants."""
    rows = []
    for b in range(B):
        tokens = [t for t in range(T) if p.mask[b, t] and p.keep[b]]
        if not tokens:
            continue
        base = p.proximal if proximal else p.behaviour
        a = p.advantages[b]
        sequence = math.exp(sum(logprobs[b, t] - base[b, t] for t in tokens) / len(tokens))
        terms = []
        for t in tokens:
            ratio = sequence if name == "gspo" else math.exp(logprobs[b, t] - base[b, t])
            clipped = min(max(ratio, 1 - low), 1 + high)
            if name == "cispo":
                constant = math.exp(frozen[b, t] - base[b, t])
                weight = min(max(constant, 1 - low), 1 + high)
                term = -weight * a * logprobs[b, t]
            else:
                term = -min(ratio * a, clipped * a)
            if proximal:
                weight = math.exp(p.proximal[b, t] - p.behaviour[b, t])
                term *= weight if cap is None else min(weight, cap)
            elif cap is not None:
                term *= min(1, cap / math.exp(frozen[b, t] - p.behaviour[b, t]))
            if kl is not None:
                d = logprobs[b, t] - p.reference[b, t]
                estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kl]
                term += kl_coef * estimate
            term -= entropy_coef * p.entropy[b, t]
            terms.append(term)
        rows.append(terms)
    if name in ("grpo", "gspo"):
        return sum(sum(row) / len(row) for row in rows), len(rows)
    if name in ("dapo", "cispo"):
        return sum(map(sum, rows)), sum(map(len, rows))
    return sum(map(sum, rows)), len(rows) * MAX_TOKENS


def library_loss(
    p, logprobs, name, *, cap=None, proximal=False, kl=None, kl_coef=0.0, entropy_coef=0.0
):
    return policy_loss(
        jnp.asarray(logprobs, jnp.float32),
        jnp.asarray(p.behaviour, jnp.float32),
        jnp.asarray(p.advantages, jnp.float32),
        jnp.asarray(p.mask),
        name=name,
        clip_low=LOW,
        clip_high=HIGH,
        importance_cap=cap,
        proximal_logprobs=jnp.asarray(p.proximal, jnp.float32) if proximal else None,
        keep=jnp.asarray(p.keep),
        max_tokens=MAX_TOKENS,
        reference_logprobs=None if kl is None else jnp.asarray(p.reference, jnp.float32),
        kl=kl or "k3",
        kl_coef=kl_coef,
        entropy=jnp.asarray(p.entropy, jnp.float32),
        entropy_coef=entropy_coef,
    )


OPTIONS = {
    "plain": {},
    "capped": {"cap": 1.1},
    "proximal": {"proximal": True},
    "proximal and capped": {"proximal": True, "cap": 1.1},
    "k1": {"kl": "k1", "kl_coef": 0.3},
    "k2": {"kl": "k2", "kl_coef": 0.3},
    "k3": {"kl": "k3", "kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.2},
    "all": {"cap": 1.1, "kl": "k3", "kl_coef": 0.3, "entropy_coef": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_equals_a_loop(name: str, options: dict) -> None:
    p = Problem()

    got = library_loss(p, p.logprobs, name, **options)

    total, count = loop_loss(p, p.logprobs, name, frozen=p.logprobs, **options)
    assert float(got.total) == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert float(got.count) == count


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_equals_finite_differences_of_the_loop(name: str, options: dict) -> None:
    p = Problem()
    step = 1e-6
    expected = np.zeros((B, T))
    for b, t in np.ndindex(B, T):
        moved = [p.logprobs.copy() for _ in range(2)]
        moved[0][b, t] += step
        moved[1][b, t] -= step
        up, down = (loop_loss(p, x, name, frozen=p.logprobs, **options)[0] for x in moved)
        expected[b, t] = (up - down) / (2 * step)

    got = jax.grad(lambda x: library_loss(p, x, name, **options).total)(
        jnp.asarray(p.logprobs, jnp.float32)
    )

    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_both_clips_and_both_signs_occur_in_the_problem(name: str) -> None:
    p = Problem()
    ratio = np.exp(p.logprobs - p.behaviour)[p.mask & p.keep[:, None]]

    metrics = library_loss(p, p.logprobs, name).metrics

    assert (ratio < 1 - LOW).sum() == metrics.clipped_low > 0
    assert (ratio > 1 + HIGH).sum() == metrics.clipped_high > 0
    assert (p.advantages > 0).any() and (p.advantages < 0).any()


def test_metrics_are_sums_over_tokens_that_count() -> None:
    p = Problem()
    counted = p.mask & p.keep[:, None]
    log_ratio = (p.logprobs - p.behaviour)[counted]
    d = (p.logprobs - p.reference)[counted]

    m = library_loss(p, p.logprobs, "dapo", cap=1.1, kl="k3", kl_coef=0.1).metrics

    expected = {
        "tokens": counted.sum(),
        "ratio": np.exp(log_ratio).sum(),
        "truncated": (np.exp(log_ratio) > 1.1).sum(),
        "logprob_difference": np.abs(log_ratio).sum(),
        "behaviour_kl": (np.exp(-log_ratio) - 1 + log_ratio).sum(),
        "reference_kl": (np.exp(-d) - 1 + d).sum(),
        "entropy": p.entropy[counted].sum(),
    }
    for name, value in expected.items():
        assert float(getattr(m, name)) == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_add_up_to_the_batch(name: str) -> None:
    p = Problem()
    whole = library_loss(p, p.logprobs, name)
    count = loss_count(
        jnp.asarray(p.mask), name=name, keep=jnp.asarray(p.keep), max_tokens=MAX_TOKENS
    )

    totals, counts, tokens = 0.0, 0.0, 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = policy_loss(
            jnp.asarray(p.logprobs[rows], jnp.float32),
            jnp.asarray(p.behaviour[rows], jnp.float32),
            jnp.asarray(p.advantages[rows], jnp.float32),
            jnp.asarray(p.mask[rows]),
            name=name,
            keep=jnp.asarray(p.keep[rows]),
            max_tokens=MAX_TOKENS,
        )
        totals, counts = totals + part.total, counts + part.count
        tokens += part.metrics.tokens

    assert float(totals) == pytest.approx(float(whole.total), rel=1e-5)
    assert counts == whole.count == count
    assert tokens == whole.metrics.tokens


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing_and_may_hold_anything(name: str) -> None:
    p = Problem()

    def padded(x, fill):
        wide = np.full((B + 2, T + 5), fill, np.float32)
        wide[:B, :T] = np.where(p.mask, x, fill)
        return jnp.asarray(wide)

    def loss(logprobs, fill):
        mask = np.zeros((B + 2, T + 5), bool)
        mask[:B, :T] = p.mask
        advantages = np.concatenate([p.advantages, [fill, fill]]).astype(np.float32)
        return policy_loss(
            logprobs, padded(p.behaviour, fill), jnp.asarray(advantages), jnp.asarray(mask),
            name=name, keep=jnp.asarray(np.concatenate([p.keep, [True, True]])),
            max_tokens=MAX_TOKENS, reference_logprobs=padded(p.reference, fill), kl_coef=0.1,
            entropy=padded(p.entropy, fill), entropy_coef=0.1,
        )  # fmt: skip

    clean, dirty = (
        jax.value_and_grad(lambda x, f=fill: loss(x, f).total)(padded(p.logprobs, fill))
        for fill in (0.0, np.nan)
    )

    assert float(dirty[0]) == float(clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    assert (np.asarray(dirty[1])[:B, :T][~p.mask] == 0).all()
    assert loss(padded(p.logprobs, 0.0), 0.0).count == library_loss(p, p.logprobs, name).count


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_that_is_not_kept_leaves_the_kl_and_the_denominator_too(name: str) -> None:
    p = Problem()
    gone = ~p.keep

    gradient = jax.grad(lambda x: library_loss(p, x, name, kl="k3", kl_coef=1.0).total)(
        jnp.asarray(p.logprobs, jnp.float32)
    )
    everything = library_loss(p, p.logprobs, name).count
    p.keep = np.ones(B, bool)

    assert (np.asarray(gradient)[gone] == 0).all()
    assert library_loss(p, p.logprobs, name).count > everything


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_has_total_and_count_zero(name: str) -> None:
    p = Problem()
    p.mask[:] = False

    got = library_loss(p, p.logprobs, name)

    assert float(got.total) == 0 and float(got.count) == 0


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str) -> None:
    p = Problem()
    p.behaviour = p.logprobs
    counted = p.mask & p.keep[:, None]
    if name in ("grpo", "gspo"):
        weights = counted / np.maximum(counted.sum(1, keepdims=True), 1)
    else:
        weights = counted.astype(float)

    gradient = jax.grad(lambda x: library_loss(p, x, name).total)(
        jnp.asarray(p.logprobs, jnp.float32)
    )

    np.testing.assert_allclose(gradient, -weights * p.advantages[:, None], atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_the_cap_bounds_the_weight_of_a_rollout_that_the_policy_has_left(name: str) -> None:
    logprobs = jnp.zeros((1, 1))
    behaviour, advantages, mask = jnp.full((1, 1), -8.0), -jnp.ones(1), jnp.ones((1, 1), bool)

    def slope(cap):
        loss = lambda x: policy_loss(  # noqa: E731
            x, behaviour, advantages, mask, name=name, importance_cap=cap, max_tokens=1
        )
        return float(jax.grad(lambda x: loss(x).total)(logprobs)[0, 0])

    assert 0 < slope(2.0) <= 2.0 + 1e-5
    if name != "cispo":
        assert slope(None) == pytest.approx(math.exp(8), rel=1e-4)


def test_extreme_differences_stay_finite() -> None:
    logprobs, behaviour = jnp.array([[0.0, -500.0]]), jnp.array([[-500.0, 0.0]])

    for name in NAMES:
        value, gradient = jax.value_and_grad(
            lambda x, n=name: policy_loss(
                x, behaviour, -jnp.ones(1), jnp.ones((1, 2), bool), name=n,
                reference_logprobs=behaviour, kl_coef=1.0,
            ).total
        )(logprobs)  # fmt: skip
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_k3_is_never_negative_and_all_estimators_agree_in_the_mean() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 6)) * 0.3
    log_p, log_q = (x - np.log(np.exp(x).sum()) for x in logits)
    draws = rng.choice(6, size=400_000, p=np.exp(log_p))
    exact = np.sum(np.exp(log_p) * (log_p - log_q))

    estimates = {
        name: np.asarray(kl(jnp.asarray(log_p[draws]), jnp.asarray(log_q[draws])), float)
        for name, kl in KL.items()
    }

    assert (estimates["k3"] >= 0).all()
    assert estimates["k1"].mean() == pytest.approx(exact, abs=2e-3)
    assert estimates["k3"].mean() == pytest.approx(exact, abs=2e-3)
    assert estimates["k2"].mean() == pytest.approx(exact, rel=0.1)
    assert estimates["k3"].std() < estimates["k1"].std()


def test_groups_may_keep_their_axis() -> None:
    p = Problem()
    flat = library_loss(p, p.logprobs, "gspo")

    shaped = policy_loss(
        jnp.asarray(p.logprobs.reshape(2, 3, T), jnp.float32),
        jnp.asarray(p.behaviour.reshape(2, 3, T), jnp.float32),
        jnp.asarray(p.advantages.reshape(2, 3), jnp.float32),
        jnp.asarray(p.mask.reshape(2, 3, T)),
        name="gspo",
        keep=jnp.asarray(p.keep.reshape(2, 3)),
    )

    assert float(shaped.total) == pytest.approx(float(flat.total), rel=1e-6)
    assert shaped.count == flat.count
