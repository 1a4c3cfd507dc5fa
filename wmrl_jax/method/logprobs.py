"""The one chunked log-probability and entropy of the project.

The loss, the world model's read-out and the check of the sampler all call `token_logprobs`, so
that what one of them computes is what the others mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    *,
    chunk: int,
    temperature: float | jax.Array = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of each next-token distribution, in chunks.

    The logits of ``hidden[..., t, :]`` score ``targets[..., t]``: the caller shifts. Logits exist
    for `chunk` positions of each row at one time, forward and backward (`jax.checkpoint` inside
    `jax.lax.scan`), so no array of size T x V is ever made. The product runs in the dtype of
    `hidden` and accumulates in float32, and so does the gradient of `unembedding` over chunks.

    Args:
      hidden: [..., T, D], float32 or bfloat16, final-normed.
      unembedding: [D, V].
      targets: int [..., T], in [0, V).
      chunk: positions of a row whose logits exist at one time; T need not be a multiple.
      temperature: the logits are divided by it; positive.

    Returns:
      (logprobs, entropy), both float32 [..., T], in nats, of softmax(logits / temperature).

    Raises:
      ValueError: `chunk` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be at least 1 token")
    length = targets.shape[-1]
    chunk = min(chunk, length)
    n_chunks = -(-length // chunk)
    padding = n_chunks * chunk - length
    lead = targets.ndim - 1
    if padding:
        hidden = jnp.pad(hidden, [(0, 0)] * lead + [(0, padding), (0, 0)])
        targets = jnp.pad(targets, [(0, 0)] * lead + [(0, padding)])
    # Float32 outside the scan and cast inside: the cotangent is then summed in float32.
    master = unembedding.astype(jnp.float32)
    inverse_temperature = 1.0 / jnp.asarray(temperature, jnp.float32)

    @jax.checkpoint
    def score(hidden_chunk: jax.Array, target_chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum(
            "...td,dv->...tv",
            hidden_chunk,
            master.astype(hidden_chunk.dtype),
            preferred_element_type=jnp.float32,
        )
        logits = logits * inverse_temperature
        logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits)
        total = jnp.sum(weights, axis=-1)
        log_total = jnp.log(total)
        chosen = jnp.take_along_axis(logits, target_chunk[..., None], axis=-1)[..., 0]
        entropy = log_total - jnp.sum(weights * logits, axis=-1) / total
        return chosen - log_total, entropy

    if n_chunks == 1:
        return score(hidden, targets)

    def split(array: jax.Array) -> jax.Array:
        shape = array.shape[:lead] + (n_chunks, chunk) + array.shape[lead + 1 :]
        return jnp.moveaxis(array.reshape(shape), lead, 0)

    def join(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, lead).reshape(*array.shape[1:-1], n_chunks * chunk)

    _, (logprobs, entropy) = jax.lax.scan(
        lambda _, xs: (None, score(*xs)), None, (split(hidden), split(targets))
    )
    return join(logprobs)[..., :length], join(entropy)[..., :length]
