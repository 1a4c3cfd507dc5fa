"""The sampler: groups of completions from prompts, in one compiled function.

The prompt is computed once per group and its keys and values are shared by the group's rows. The
cache of the rows' own tokens grows in segments, so that attention reads little more of it than is
filled. When half of the rows have ended, the others move together into a batch of half the size,
and once more when a quarter is left; the loop ends when all rows have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import Model
from wmrl_jax.rollout.compact import compact_rollouts
from wmrl_jax.rollout.drawing import Convention, Drawing, by_row, draw, drawing_by_row, row_noise
from wmrl_jax.rollout.stopping import StopTable
from wmrl_jax.types import Rollouts

SampleFn = Callable[..., Rollouts]
"""(params, prompts int32 [G, P] padded on the right, prompt_lengths int32 [G], key, *,
temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, limit=new_tokens) -> Rollouts with T = P +
new_tokens. Each setting is a scalar, or [G] or [G, N] for groups or rows that differ; `limit` is
the most tokens that a row may write in this call."""


class _Rows(NamedTuple):
    """The rows that are being written, as G groups of N; after the first halving N is 1."""

    step: jax.Array  # int32, steps so far
    written: jax.Array  # int32 [G, N], tokens of each row
    finished: jax.Array  # bool [G, N], ended by end-of-text or a stop string
    matched: jax.Array  # int16 [G, N], states of the stop strings' automaton
    hidden: jax.Array  # [G, N, D], predicts the next token
    ended: jax.Array  # bool [G, N]
    tokens: jax.Array  # int32 [G, N, S]
    logprobs: jax.Array  # float32 [G, N, S]
    cache: Any


class _Inputs(NamedTuple):
    """What the rows read and do not change."""

    prompt: Any
    uniforms: jax.Array  # float32 [G, N, S, 2]
    weights: Any
    unembedding: jax.Array  # [D, V]
    drawing: Drawing
    limit: jax.Array  # int32 [G, N], most tokens of each row


AdvanceFn = Callable[[_Inputs, _Rows], _Rows]
"""Writes one token into every row that has not ended."""

_FEWEST_ROWS = 16  # no smaller batch is made: its step would take as long
_HALVINGS = 2  # each is one more loop to compile


def make_sampler(
    model: Model,
    *,
    group_size: int,
    prompt_tokens: int,
    new_tokens: int,
    eos_id: int,
    pad_id: int,
    mesh: Mesh | None = None,
    segment: int = 64,
    stop: StopTable | None = None,
    convention: Convention = "before",
) -> SampleFn:
    """One compiled sampling function for fixed sizes.

    Every row draws from its own key, folded from the call's key, the group's index and the row's:
    what a row draws depends neither on the other rows nor on the number of devices.

    Args:
      model: the policy.
      group_size: rows per prompt, N.
      prompt_tokens: width of the prompts, P.
      new_tokens: most tokens that a row may write, its end-of-text included.
      eos_id: the token that ends a row.
      pad_id: fills rows behind their end.
      mesh: devices over which the groups are divided, along all of its axes; None: one device.
      segment: the cache of own tokens grows by this many slots at a time.
      stop: strings that end a row; the token in which one ends is its last.
      convention: of the behaviour log-probs, see `drawing`.

    Returns:
      `sample`, see `SampleFn`.
    """
    sampling = partial(
        _sample,
        model,
        group_size=group_size,
        new_tokens=new_tokens,
        eos_id=eos_id,
        pad_id=pad_id,
        segment=segment,
        stop=stop,
        convention=convention,
    )
    if mesh is None:
        compiled = jax.jit(sampling)
    else:
        groups, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
        compiled = jax.jit(
            jax.shard_map(
                sampling,
                mesh=mesh,
                in_specs=(whole, groups, groups, groups, whole, groups, groups),
                out_specs=groups,
                check_vma=False,
            )
        )

    def sample(
        params: Any,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        key: jax.Array,
        *,
        temperature: float | jax.Array = 1.0,
        top_k: int | jax.Array = 0,
        top_p: float | jax.Array = 1.0,
        min_p: float | jax.Array = 0.0,
        limit: int | jax.Array = new_tokens,
    ) -> Rollouts:
        groups = prompts.shape[0]
        if prompts.shape[1] != prompt_tokens:
            raise UserError(
                f"the sampler was made for prompts of {prompt_tokens} tokens, these have "
                f"{prompts.shape[1]}"
            )
        if mesh is not None and groups % mesh.size:
            raise UserError(f"{groups} groups cannot be divided over {mesh.size} devices")

        drawing = drawing_by_row(
            groups, group_size, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        order = jnp.arange(groups, dtype=jnp.int32)
        limits = jnp.minimum(by_row("limit", limit, jnp.int32, groups, group_size), new_tokens)
        return compiled(params, prompts, prompt_lengths, order, key, drawing, limits)

    return sample


def _sample(
    model: Model,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    order: jax.Array,
    key: jax.Array,
    drawing: Drawing,
    limit: jax.Array,
    *,
    group_size: int,
    new_tokens: int,
    eos_id: int,
    pad_id: int,
    segment: int,
    stop: StopTable | None,
    convention: Convention,
) -> Rollouts:
    groups = prompts.shape[0]
    prompt, last = model.prefill(params, prompts, prompt_lengths)
    inputs = _Inputs(
        prompt=prompt,
        uniforms=row_noise(key, order, group_size, new_tokens),
        weights=model.decode_weights(params, prompts.shape[1] + new_tokens),
        unembedding=model.unembedding(params),
        drawing=drawing,
        limit=limit,
    )
    shape = (groups, group_size, new_tokens)
    rows = _Rows(
        step=jnp.int32(0),
        written=jnp.zeros(shape[:2], jnp.int32),
        finished=jnp.zeros(shape[:2], bool),
        matched=jnp.zeros(shape[:2], jnp.int16),
        hidden=jnp.broadcast_to(last[:, None], (groups, group_size, last.shape[-1])),
        ended=limit <= 0,
        tokens=jnp.full(shape, pad_id, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        cache=model.empty_cache(groups, group_size, min(segment, new_tokens)),
    )
    advance = partial(_advance, model, eos_id, pad_id, stop, convention)
    sizes = smaller_batches(groups * group_size) if new_tokens > segment else ()
    for start in range(0, new_tokens, segment):
        end = min(start + segment, new_tokens)
        rows = rows._replace(cache=model.grow_cache(rows.cache, end))
        rows = _write_until(advance, inputs, rows, last_step=end, sizes=sizes)
    rows = _finish(model, advance, inputs, rows, sizes)
    return compact_rollouts(
        prompts,
        prompt_lengths,
        tokens=rows.tokens,
        logprobs=rows.logprobs,
        written=rows.written,
        finished=rows.finished,
        pad_id=pad_id,
    )


def smaller_batches(count: int) -> tuple[int, ...]:
    """Sizes of the batches in which the last of `count` rows are finished."""
    halves = (count >> (halving + 1) for halving in range(_HALVINGS))
    return tuple(half for half in halves if half >= _FEWEST_ROWS)


def _advance(
    model: Model,
    eos_id: int,
    pad_id: int,
    stop: StopTable | None,
    convention: Convention,
    inputs: _Inputs,
    rows: _Rows,
) -> _Rows:
    groups, group_size, width = rows.hidden.shape
    logits = jnp.einsum(
        "bd,dv->bv",
        rows.hidden.reshape(-1, width),
        inputs.unembedding,
        preferred_element_type=jnp.float32,
    )
    noise = jax.lax.dynamic_index_in_dim(inputs.uniforms, rows.step, axis=2, keepdims=False)
    settings = jax.tree.map(lambda x: x.reshape(-1), inputs.drawing)
    tokens, logprobs = draw(
        logits, noise.reshape(-1, 2), **settings._asdict(), convention=convention
    )
    tokens = jnp.where(rows.ended, pad_id, tokens.reshape(groups, group_size))
    logprobs = jnp.where(rows.ended, 0.0, logprobs.reshape(groups, group_size))
    cache, hidden = model.decode(inputs.weights, inputs.prompt, rows.cache, tokens, rows.step)
    written = rows.written + ~rows.ended
    stopped, matched = tokens == eos_id, rows.matched
    if stop is not None:
        matched = jnp.asarray(stop.next)[rows.matched, tokens]
        matched = jnp.where(rows.ended, rows.matched, matched)
        stopped |= matched == stop.stop
    finished = rows.finished | (stopped & ~rows.ended)
    return _Rows(
        step=rows.step + 1,
        written=written,
        finished=finished,
        matched=matched,
        hidden=hidden,
        ended=rows.ended | finished | (written >= inputs.limit),
        tokens=_put(rows.tokens, tokens, rows.step),
        logprobs=_put(rows.logprobs, logprobs, rows.step),
        cache=cache,
    )


def _put(into: jax.Array, column: jax.Array, step: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(into, column[..., None], step, axis=2)


def _write_until(
    advance: AdvanceFn, inputs: _Inputs, rows: _Rows, *, last_step: int, sizes: tuple[int, ...]
) -> _Rows:
    """Advance up to `last_step`, or until the next smaller batch holds the rows that are left."""
    fewest = sizes[0] if sizes else 0

    def goes_on(rows: _Rows) -> jax.Array:
        return (rows.step < last_step) & (jnp.sum(~rows.ended) > fewest)

    return jax.lax.while_loop(goes_on, partial(advance, inputs), rows)


def _finish(
    model: Model, advance: AdvanceFn, inputs: _Inputs, rows: _Rows, sizes: tuple[int, ...]
) -> _Rows:
    """Write what is left, in ever smaller batches."""
    if not sizes:
        return rows
    count, new_tokens = rows.ended.size, rows.tokens.shape[2]
    left = jnp.argsort(rows.ended.reshape(-1), stable=True)[: sizes[0]]

    def one_by_one(x: jax.Array) -> jax.Array:
        return x.reshape(count, 1, *x.shape[2:])

    def write_rest(rows: _Rows) -> _Rows:
        prompt, cache = model.take_rows(inputs.prompt, rows.cache, left)
        fewer_inputs = inputs._replace(
            prompt=prompt,
            uniforms=one_by_one(inputs.uniforms)[left],
            drawing=jax.tree.map(lambda x: one_by_one(x)[left], inputs.drawing),
            limit=one_by_one(inputs.limit)[left],
        )
        fewer = _Rows(
            step=rows.step,
            written=one_by_one(rows.written)[left],
            finished=one_by_one(rows.finished)[left],
            matched=one_by_one(rows.matched)[left],
            hidden=one_by_one(rows.hidden)[left],
            ended=one_by_one(rows.ended)[left],
            tokens=one_by_one(rows.tokens)[left],
            logprobs=one_by_one(rows.logprobs)[left],
            cache=cache,
        )
        fewer = _write_until(advance, fewer_inputs, fewer, last_step=new_tokens, sizes=sizes[1:])
        fewer = _finish(model, advance, fewer_inputs, fewer, sizes[1:])

        def back(whole: jax.Array, part: jax.Array) -> jax.Array:
            return one_by_one(whole).at[left].set(part).reshape(whole.shape)

        return rows._replace(
            step=fewer.step,
            written=back(rows.written, fewer.written),
            finished=back(rows.finished, fewer.finished),
            ended=back(rows.ended, fewer.ended),
            tokens=back(rows.tokens, fewer.tokens),
            logprobs=back(rows.logprobs, fewer.logprobs),
        )

    unfinished = (rows.step < new_tokens) & ~jnp.all(rows.ended)
    return jax.lax.cond(unfinished, write_rest, lambda rows: rows, rows)
