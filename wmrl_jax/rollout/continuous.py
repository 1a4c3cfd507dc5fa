"""Continuous batching: a fixed array of slots in which waiting rows take the place of ended ones.

`make_sampler` writes all rows at once and its batch shrinks as they end; here R slots stay full as
long as rows wait, which pays where there are many more rows than slots and their lengths differ.
All of it is one compiled function. Every prompt is computed once, before the first token, and is
read by the slots of its group's rows; a slot has a step of its own. When no row waits any more and
half of the slots are empty, the others move into an array of half the size, as in `make_sampler`.

Since slots are at different steps, attention reads the slots' caches at their full length, and a
group's rows read its prompt one by one and not in one product: a step costs more than one of
`make_sampler` with as many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import Model
from wmrl_jax.models.ragged import RaggedDecodeFn, ragged_decoder
from wmrl_jax.rollout.compact import compact_rollouts
from wmrl_jax.rollout.drawing import Convention, Drawing, by_row, draw, drawing_by_row, row_noise
from wmrl_jax.rollout.sampler import SampleFn, smaller_batches
from wmrl_jax.rollout.stopping import StopTable
from wmrl_jax.types import Rollouts


class _Slots(NamedTuple):
    """The rows that are being written, R of them."""

    row: jax.Array  # int32 [R], place among the W = G*N rows; W where the slot is empty
    step: jax.Array  # int32 [R], tokens that the row has written
    matched: jax.Array  # int16 [R], states of the stop strings' automaton
    hidden: jax.Array  # [R, D], predicts the next token
    cache: Any


class _Written(NamedTuple):
    """What all W rows have written so far."""

    tokens: jax.Array  # int32 [W, S]
    logprobs: jax.Array  # float32 [W, S]
    count: jax.Array  # int32 [W]
    finished: jax.Array  # bool [W]


class _State(NamedTuple):
    slots: _Slots
    taken: jax.Array  # int32, rows of the queue that have or had a slot
    written: _Written


class _Inputs(NamedTuple):
    """What the slots read and do not change."""

    prompt: Any
    first: jax.Array  # [G, D], hidden states behind the prompts
    noise: jax.Array  # float32 [W, S, 2]
    weights: Any
    unembedding: jax.Array  # [D, V]
    drawing: Drawing  # each [W]
    limit: jax.Array  # int32 [W]
    queue: jax.Array  # int32 [W], the order in which rows get a slot
    waiting: jax.Array  # int32, rows of the queue that write anything


AdvanceFn = Callable[[_Inputs, _State], _State]
"""Writes one token into every slot that is not empty, then gives free slots to waiting rows."""


def make_continuous_sampler(
    model: Model,
    *,
    slots: int,
    group_size: int,
    prompt_tokens: int,
    new_tokens: int,
    eos_id: int,
    pad_id: int,
    stop: StopTable | None = None,
    convention: Convention = "before",
) -> SampleFn:
    """One compiled sampling function that writes any number of groups in R slots.

    Draws what `make_sampler` draws from the same key, whatever R is: each row's noise comes from
    its own key, folded from the call's key, the group's index and the row's.

    Args:
      model: the policy.
      slots: R, rows that are written at a time.
      group_size: rows per prompt, N.
      prompt_tokens: width of the prompts, P.
      new_tokens: most tokens that a row may write, its end-of-text included.
      eos_id: the token that ends a row.
      pad_id: fills rows behind their end.
      stop: strings that end a row; the token in which one ends is its last.
      convention: of the behaviour log-probs, see `drawing`.

    Returns:
      `sample`, see `SampleFn`; each number of groups is a compiled program.

    Raises:
      UserError: fewer than one slot.
    """
    if slots < 1:
        raise UserError(f"a continuous sampler wants at least 1 slot, not {slots}")
    compiled = jax.jit(
        partial(
            _sample,
            model,
            slots=slots,
            group_size=group_size,
            new_tokens=new_tokens,
            eos_id=eos_id,
            pad_id=pad_id,
            stop=stop,
            convention=convention,
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
        drawing = drawing_by_row(
            groups, group_size, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        limits = jnp.minimum(by_row("limit", limit, jnp.int32, groups, group_size), new_tokens)
        return compiled(params, prompts, prompt_lengths, key, drawing, limits)

    return sample


def _sample(
    model: Model,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    key: jax.Array,
    drawing: Drawing,
    limit: jax.Array,
    *,
    slots: int,
    group_size: int,
    new_tokens: int,
    eos_id: int,
    pad_id: int,
    stop: StopTable | None,
    convention: Convention,
) -> Rollouts:
    groups = prompts.shape[0]
    count = groups * group_size
    slots = min(slots, count)
    prompt, first = model.prefill(params, prompts, prompt_lengths)
    noise = row_noise(key, jnp.arange(groups, dtype=jnp.int32), group_size, new_tokens)
    inputs = _Inputs(
        prompt=prompt,
        first=first,
        noise=noise.reshape(count, new_tokens, 2),
        weights=model.decode_weights(params, prompts.shape[1] + new_tokens),
        unembedding=model.unembedding(params),
        drawing=jax.tree.map(lambda x: x.reshape(count), drawing),
        limit=limit.reshape(count),
        queue=jnp.argsort(limit.reshape(count) <= 0, stable=True).astype(jnp.int32),
        waiting=jnp.sum(limit > 0, dtype=jnp.int32),
    )
    state = _State(
        slots=_Slots(
            row=jnp.full(slots, count, jnp.int32),
            step=jnp.zeros(slots, jnp.int32),
            matched=jnp.zeros(slots, jnp.int16),
            hidden=jnp.zeros((slots, first.shape[-1]), first.dtype),
            cache=model.empty_cache(slots, 1, new_tokens),
        ),
        taken=jnp.int32(0),
        written=_Written(
            tokens=jnp.full((count, new_tokens), pad_id, jnp.int32),
            logprobs=jnp.zeros((count, new_tokens), jnp.float32),
            count=jnp.zeros(count, jnp.int32),
            finished=jnp.zeros(count, bool),
        ),
    )
    advance = partial(_advance, ragged_decoder(model), eos_id, stop, convention)
    sizes = (*smaller_batches(slots), 0)
    state = _write_until(advance, inputs, _refill(inputs, state), fewest=sizes[0])
    for size, fewest in pairwise(sizes):
        left = jnp.argsort(state.slots.row == count, stable=True)[:size]
        state = state._replace(slots=jax.tree.map(lambda x, left=left: x[left], state.slots))
        state = _write_until(advance, inputs, state, fewest=fewest)
    by_group = jax.tree.map(lambda x: x.reshape(groups, group_size, *x.shape[1:]), state.written)
    return compact_rollouts(
        prompts,
        prompt_lengths,
        tokens=by_group.tokens,
        logprobs=by_group.logprobs,
        written=by_group.count,
        finished=by_group.finished,
        pad_id=pad_id,
    )


def _write_until(advance: AdvanceFn, inputs: _Inputs, state: _State, *, fewest: int) -> _State:
    """Advance until at most `fewest` slots hold a row; none waits then, if there are more slots."""
    count = inputs.queue.size

    def goes_on(state: _State) -> jax.Array:
        return jnp.sum(state.slots.row < count) > fewest

    return jax.lax.while_loop(goes_on, partial(advance, inputs), state)


def _advance(
    decode: RaggedDecodeFn,
    eos_id: int,
    stop: StopTable | None,
    convention: Convention,
    inputs: _Inputs,
    state: _State,
) -> _State:
    slots, written = state.slots, state.written
    count = inputs.queue.size
    full = slots.row < count
    row = jnp.minimum(slots.row, count - 1)  # an empty slot computes along; nothing is kept of it
    logits = jnp.dot(slots.hidden, inputs.unembedding, preferred_element_type=jnp.float32)
    settings = jax.tree.map(lambda x: x[row], inputs.drawing)
    tokens, logprobs = draw(
        logits, inputs.noise[row, slots.step], **settings._asdict(), convention=convention
    )
    cache, hidden = decode(
        inputs.weights,
        inputs.prompt,
        row // (count // inputs.first.shape[0]),
        slots.cache,
        tokens,
        slots.step,
    )
    stopped, matched = tokens == eos_id, slots.matched
    if stop is not None:
        matched = jnp.asarray(stop.next)[slots.matched, tokens]
        stopped |= matched == stop.stop
    step = slots.step + 1
    ended = full & (stopped | (step >= inputs.limit[row]))
    # Empty slots point behind the last row, where nothing is written.
    written = _Written(
        tokens=written.tokens.at[slots.row, slots.step].set(tokens, mode="drop"),
        logprobs=written.logprobs.at[slots.row, slots.step].set(logprobs, mode="drop"),
        count=written.count.at[slots.row].set(step, mode="drop"),
        finished=written.finished.at[slots.row].set(stopped, mode="drop"),
    )
    slots = _Slots(
        row=jnp.where(ended, count, slots.row),
        step=jnp.where(full & ~ended, step, 0),
        matched=matched,
        hidden=hidden,
        cache=cache,
    )
    return _refill(inputs, _State(slots, state.taken, written))


def _refill(inputs: _Inputs, state: _State) -> _State:
    """Give empty slots to the next rows of the queue."""
    slots, count = state.slots, inputs.queue.size
    empty = slots.row == count
    place = state.taken + jnp.cumsum(empty) - 1
    fresh = empty & (place < inputs.waiting)
    row = jnp.where(fresh, inputs.queue[jnp.minimum(place, count - 1)], slots.row)
    group = jnp.minimum(row, count - 1) // (count // inputs.first.shape[0])
    slots = slots._replace(
        row=row,
        matched=jnp.where(fresh, 0, slots.matched).astype(jnp.int16),
        hidden=jnp.where(fresh[:, None], inputs.first[group], slots.hidden),
    )
    return state._replace(slots=slots, taken=state.taken + jnp.sum(fresh, dtype=jnp.int32))
