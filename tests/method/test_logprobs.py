"""The chunked log-probability."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from wmrl_jax.method.logprobs import token_logprobs

B, T, D, V = 3, 11, 8, 50


def problem(dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    unembedding = jnp.asarray(rng.normal(size=(D, V)), dtype)
    return hidden, unembedding, jnp.asarray(rng.integers(0, V, size=(B, T)))


def reference(hidden, unembedding, targets, temperature=1.0):
    logits = np.asarray(hidden, float) @ np.asarray(unembedding, float) / temperature
    logprobs = log_softmax(logits, axis=-1)
    chosen = np.take_along_axis(logprobs, np.asarray(targets)[..., None], -1)[..., 0]
    return chosen, -(np.exp(logprobs) * logprobs).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_a_full_log_softmax(chunk: int, temperature: float) -> None:
    hidden, unembedding, targets = problem()

    got = jax.jit(token_logprobs, static_argnames="chunk")(
        hidden, unembedding, targets, chunk=chunk, temperature=temperature
    )

    for mine, expected in zip(
        got, reference(hidden, unembedding, targets, temperature), strict=True
    ):
        assert mine.dtype == jnp.float32 and mine.shape == (B, T)
        np.testing.assert_allclose(mine, expected, atol=2e-5)


def test_any_number_of_leading_axes_will_do() -> None:
    hidden, unembedding, targets = problem()
    expected = token_logprobs(hidden, unembedding, targets, chunk=4)

    nested = token_logprobs(hidden[None, None], unembedding, targets[None, None], chunk=4)
    single = token_logprobs(hidden[1], unembedding, targets[1], chunk=4)

    np.testing.assert_allclose(nested[0][0, 0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(single[0], expected[0][1], rtol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    hidden, unembedding, targets = problem()

    logprobs, entropy = token_logprobs(300 * hidden, unembedding, targets, chunk=4)

    expected = reference(300 * hidden, unembedding, targets)
    np.testing.assert_allclose(logprobs, expected[0], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-3)


@pytest.mark.parametrize("part", [0, 1], ids=["logprobs", "entropy"])
def test_gradients_do_not_depend_on_the_chunk(part: int) -> None:
    hidden, unembedding, targets = problem()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, T)), jnp.float32)

    def total(hidden, unembedding, chunk):
        return jnp.sum(weights * token_logprobs(hidden, unembedding, targets, chunk=chunk)[part])

    def direct(hidden, unembedding):
        logprobs = jax.nn.log_softmax(hidden @ unembedding)
        chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        return jnp.sum(weights * (chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, -1))[part])

    expected = jax.grad(direct, argnums=(0, 1))(hidden, unembedding)
    for chunk in (1, 4, 11):
        got = jax.grad(total, argnums=(0, 1))(hidden, unembedding, chunk)
        for mine, right in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine, right, atol=2e-5)


def test_no_array_of_all_tokens_by_vocabulary_exists_forward_or_backward() -> None:
    hidden, unembedding, targets = problem()
    chunk = 2

    def total(hidden, unembedding):
        logprobs, entropy = token_logprobs(hidden, unembedding, targets, chunk=chunk)
        return jnp.sum(logprobs) + jnp.sum(entropy)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, unembedding).compile()

    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    sizes = [int(np.prod([int(d) for d in shape.split(",")])) for shape in shapes]
    largest = max(B * chunk * V, B * (T + 1) * D, D * V)
    assert max(sizes) <= largest < B * T * V


def test_bfloat16_inputs_accumulate_in_float32() -> None:
    hidden, unembedding, targets = problem(jnp.bfloat16)

    got = token_logprobs(hidden, unembedding, targets, chunk=4)

    for mine, expected in zip(got, reference(hidden, unembedding, targets), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, expected, atol=2e-5)


def test_the_gradient_of_bfloat16_weights_is_summed_over_chunks_in_float32() -> None:
    length = 2048
    hidden = jnp.ones((1, length, 1), jnp.bfloat16)
    unembedding = jnp.zeros((1, 2), jnp.float32)
    targets = jnp.zeros((1, length), jnp.int32)

    gradient = jax.grad(lambda w: jnp.sum(token_logprobs(hidden, w, targets, chunk=1)[0]))(
        unembedding
    )

    # 2048 times 1/2: a bfloat16 sum would stick at 128.
    np.testing.assert_allclose(gradient, [[1024.0, -1024.0]])


def test_a_chunk_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk is 0"):
        token_logprobs(*problem(), chunk=0)
