"""The supervised warm start: next-token prediction on the completions of a corpus.

One compiled step per static length, parameters and optimizer state donated, the batch sharded by
prompt over the mesh's `data` axis. Batches depend only on the key, so that a run which goes on
from a saved `SftState` sees the batches that it would have seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wmrl_jax.errors import UserError
from wmrl_jax.method.logprobs import token_logprobs
from wmrl_jax.models.microbatch import summed_gradients
from wmrl_jax.models.model import Model
from wmrl_jax.models.rows import (
    GroupedRows,
    Row,
    bucket_lengths,
    choose_group_size,
    grouped_batches,
    key_seed,
    pad_groups,
    round_up,
)
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.train.config import WarmStartConfig
from wmrl_jax.train.mesh import by_group, make_mesh, replicated

log = logging.getLogger(__name__)

OnStep = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, mean loss per token in nats)."""


class SftState(NamedTuple):
    """What must come back for a warm start to go on.

    Attributes:
      params: the model's parameters.
      opt_state: the optax state.
      step: steps done.
    """

    params: Any
    opt_state: Any
    step: int


def completion_loss(
    model: Model, params: Any, batch: GroupedRows, *, chunk: int = 64
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of the completions given their prompts, as (sum, count).

    Args:
      model: the backbone.
      params: its parameters.
      batch: G prompts with N completions of at most S tokens.
      chunk: tokens of a row whose logits exist at one time.

    Returns:
      float32 scalars: the sum in nats over the completions' tokens, and their number.
    """
    prompts, prompt_lengths, completions, lengths = batch
    states = model.completion_states(params, prompts, prompt_lengths, completions)
    logprobs, _ = token_logprobs(
        states[:, :, :-1], model.unembedding(params), completions, chunk=chunk
    )
    counted = jnp.arange(completions.shape[-1]) < lengths[..., None]
    return -jnp.sum(jnp.where(counted, logprobs, 0.0)), jnp.sum(counted, dtype=jnp.float32)


def make_optimizer(config: WarmStartConfig, total: int) -> optax.GradientTransformation:
    """AdamW under global-norm clipping, warmed up linearly, then a cosine down to a twentieth."""
    warmup = min(config.warmup_steps, total // 2)
    rate = optax.warmup_cosine_decay_schedule(
        config.learning_rate / (warmup + 1),
        config.learning_rate,
        warmup,
        max(total, warmup + 1),
        config.learning_rate / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay),
    )


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
) -> list[Row]:
    """Encodes (prompt, completion) texts as rows, prompt and completion apart.

    Completions of more than `new_tokens`, end-of-text included, are left out with a warning that
    counts them: the sampler could never write them, and cut off they would teach not to end.

    Raises:
      UserError: a prompt is empty or has more than `prompt_tokens` tokens, or no pair is left.
    """
    prompts = {
        text: tuple(tokenizer.encode_prompt(text)) for text in {prompt for prompt, _ in pairs}
    }
    if not all(prompts.values()):
        raise UserError("a text to learn from has an empty prompt; give it one")
    longest = max(map(len, prompts.values()), default=0)
    if prompt_tokens is not None and longest > prompt_tokens:
        raise UserError(
            f"a prompt has {longest} tokens and model.prompt_tokens is {prompt_tokens}; raise it"
        )
    rows = [
        Row(prompts[prompt], (*tokenizer.encode(completion), tokenizer.eos_id))
        for prompt, completion in pairs
    ]
    kept = [row for row in rows if new_tokens is None or len(row.completion) <= new_tokens]
    if len(kept) < len(rows):
        log.warning(
            "%d of %d completions have more than %s tokens and are left out",
            len(rows) - len(kept), len(rows), new_tokens,
        )  # fmt: skip
    if not kept:
        raise UserError(
            "there is nothing to learn from: the corpus is empty, or every completion is longer "
            f"than model.new_tokens = {new_tokens}"
        )
    return kept


def sft(
    model: Model,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    config: WarmStartConfig,
    key: jax.Array,
    on_step: OnStep | None = None,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    state: SftState | None = None,
    on_state: Callable[[SftState], None] | None = None,
    state_every: int = 50,
    initial: Any = None,
    mesh: Mesh | None = None,
    chunk: int = 64,
    buckets: int = 2,
) -> Any:
    """Trains a model on (prompt, completion) texts, from scratch or from given parameters.

    The loss is the mean over the batch's completion tokens, end-of-text included; prompts are
    read and never learnt.

    Args:
      model: the backbone.
      tokenizer: its tokenizer.
      pairs: the texts.
      config: epochs, batch size, learning rate.
      key: decides the initial parameters and the order of the batches.
      on_step: progress, one step late.
      prompt_tokens: longest prompt allowed.
      new_tokens: longest completion kept, in tokens with its end-of-text.
      state: where to go on; needs the same texts, config and key.
      on_state: given a host copy of the state every `state_every` steps, to be saved.
      state_every: see `on_state`.
      initial: parameters to start from, which are given up; None: drawn from the key.
      mesh: devices to spread the batch over; all there are by default.
      chunk: tokens of a row whose logits exist at one time.
      buckets: static completion lengths at most, each a compiled program.

    Returns:
      The parameters, a pytree, whole on each of the mesh's devices.

    Raises:
      UserError: a prompt is too long, nothing to learn from, or a batch that the devices do not
        divide.
    """
    mesh = mesh or make_mesh()
    if config.batch_size % mesh.size:
        raise UserError(
            f"warm_start.batch_size is {config.batch_size}, which {mesh.size} devices do not "
            "divide; choose a multiple"
        )
    rows = encode_pairs(tokenizer, pairs, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    group_size = choose_group_size(rows, config.batch_size, mesh.size)
    widths = bucket_lengths([len(row.completion) for row in rows], count=buckets)
    prompt_width = round_up(max(len(row.prompt) for row in rows))
    total = max(1, round(config.epochs * len(rows) / config.batch_size))
    optimizer = make_optimizer(config, total)

    whole, split = replicated(mesh), by_group(mesh)
    if state is None:
        params = initial
        if params is None:
            params = jax.jit(model.init, out_shardings=whole)(key)
        state = SftState(params, jax.jit(optimizer.init, out_shardings=whole)(params), 0)
    params, opt_state = jax.device_put((state.params, state.opt_state), whole)

    def step(params: Any, opt_state: Any, batch: GroupedRows) -> tuple[Any, Any, jax.Array]:
        total_loss, count, grads = summed_gradients(
            partial(completion_loss, model, chunk=chunk), params, batch, devices=mesh.size
        )
        grads = jax.tree.map(lambda x: x / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total_loss / count

    update = jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(whole, whole, split),
        out_shardings=(whole, whole, whole),
    )
    order = grouped_batches(
        rows, widths, config.batch_size, group_size, key_seed(jax.random.fold_in(key, 1))
    )
    progress = _Progress(on_step, total)
    for done, (indices, width) in enumerate(islice(order, state.step, total), start=state.step + 1):
        groups = [[rows[i] for i in group] for group in indices]
        batch = pad_groups(
            groups,
            prompt_tokens=prompt_width,
            new_tokens=width,
            pad_id=tokenizer.pad_id,
        )
        params, opt_state, loss = update(params, opt_state, jax.device_put(batch, split))
        progress.add(done, loss, width, sum(len(row.completion) for row in chain(*groups)))
        if on_state is not None and done % state_every == 0 and done < total:
            on_state(SftState(jax.device_get(params), jax.device_get(opt_state), done))
    progress.finish(group_size)
    return params


class _Progress:
    """Reports losses one step late, so that the device never waits for the host, and the speed."""

    def __init__(self, on_step: OnStep | None, total: int) -> None:
        self._on_step, self._total = on_step, total
        self._pending: tuple[int, jax.Array, int] | None = None
        self._widths: set[int] = set()
        self._tokens, self._seconds, self._loss = 0, 0.0, float("nan")
        self._clock = time.perf_counter()

    def add(self, done: int, loss: jax.Array, width: int, tokens: int) -> None:
        """Takes a step that was just dispatched and reports the one before it."""
        # Dispatching the first step of a width compiled it: that is no measure of speed.
        self._report(timed=width in self._widths)
        self._widths.add(width)
        self._pending = (done, loss, tokens)

    def finish(self, group_size: int) -> None:
        """Reports the last step, and logs the speed."""
        self._report(timed=True)
        speed = f"{self._tokens / self._seconds:.0f}" if self._seconds else "unmeasured"
        log.info(
            "warm start: loss %.3f per token; %s completion tokens/s, %d rows to a prompt, "
            "static lengths %s", self._loss, speed, group_size, sorted(self._widths),
        )  # fmt: skip

    def _report(self, *, timed: bool) -> None:
        if self._pending is None:
            self._clock = time.perf_counter()
            return
        done, loss, tokens = self._pending
        self._loss = float(loss)
        now = time.perf_counter()
        if timed:
            self._seconds += now - self._clock
            self._tokens += tokens
        self._clock, self._pending = now, None
        if self._on_step is not None:
            self._on_step(done, self._total, self._loss)
