"""One measurement of a benchmark, as a program: a process of its own has a peak memory of its own.

`python -m wmrl_jax.train.bench_measure` prints one JSON line a figure, with a peer's fields.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wmrl_jax.train.metrics import versions
from wmrl_jax.train.workload import IMPL, Workload


def measure_sampler(work: Workload, dtype: str) -> list[dict[str, Any]]:
    """Sampling of fixed lengths, from token ids to token ids on the host."""
    import jax

    from wmrl_jax.rollout.sampler import make_sampler

    model, params = _model(work, dtype)
    sample = make_sampler(
        model,
        group_size=work.num_generations,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens + work.cache_slack,
        eos_id=-1,  # never drawn
        pad_id=0,
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, work.vocab, (work.num_prompts, work.prompt_tokens), np.int32)
    lengths = np.full(work.num_prompts, work.prompt_tokens, np.int32)

    def call(number: int) -> None:
        rollouts = sample(params, prompts, lengths, jax.random.key(number), limit=work.new_tokens)
        written = np.asarray(rollouts.lengths) - work.prompt_tokens
        np.asarray(rollouts.tokens)
        assert (written == work.new_tokens).all()

    runs, common = _measure(call, work.repeats)
    count = work.num_prompts * work.num_generations * work.new_tokens
    flops = 2 * _weights(params) * count
    common["matmul_share"] = round(flops / statistics.median(runs) / _matmul_rate(dtype), 3)
    return [
        _record(work, dtype, "generate", "generate.seconds", "s", runs, common),
        _record(
            work, dtype, "generate", "generate.tokens_per_s", "tok/s",
            [count / run for run in runs], common,
        ),
    ]  # fmt: skip


def measure_train(work: Workload, dtype: str) -> list[dict[str, Any]]:
    """One GRPO step with a KL term on a fixed batch: reference log-probs, gradient, update.

    Both corrections are in the step, as in training.
    """
    written = np.full((work.num_prompts, work.num_generations), work.new_tokens)
    call, reference_runs, params = _train_call(work, dtype, written, packing=False)
    runs, common = _measure(call, work.repeats)
    kept = reference_runs[-len(runs) :]
    count = written.size * (work.prompt_tokens + work.new_tokens)
    # Reference: one pass; policy: forward and twice as much backward. Prompts count once a group.
    read = work.num_prompts * work.prompt_tokens + written.sum()
    flops = 8 * _weights(params) * int(read)
    common["matmul_share"] = round(flops / statistics.median(runs) / _matmul_rate(dtype), 3)
    figures: list[tuple[str, str, list[float]]] = [
        ("train.seconds", "s", runs),
        ("train.ref_seconds", "s", kept),
        ("train.policy_seconds", "s", [a - b for a, b in zip(runs, kept, strict=True)]),
        ("train.tokens_per_s", "tok/s", [count / run for run in runs]),
    ]
    return [
        _record(work, dtype, "train", metric, unit, values, common)
        for metric, unit, values in figures
    ]


def measure_ragged(work: Workload, dtype: str) -> list[dict[str, Any]]:
    """Rows of uneven lengths: the step of `measure_train` padded and packed; slots refilled or not.

    Lengths are drawn geometrically with a mean of a third of the longest. The sampler's rows come
    from four times the prompts, and a third of them have a slot at one time.
    """
    import jax

    from wmrl_jax.rollout.continuous import make_continuous_sampler
    from wmrl_jax.rollout.sampler import make_sampler

    rng = np.random.default_rng(1)
    records = []

    def lengths(groups: int) -> Any:
        drawn = rng.geometric(3 / work.new_tokens, (groups, work.num_generations))
        return np.minimum(drawn, work.new_tokens)

    written = lengths(work.num_prompts)
    for metric, packing in (("ragged.train_padded", False), ("ragged.train_packed", True)):
        call, _, _ = _train_call(work, dtype, written, packing=packing)
        runs, common = _measure(call, work.repeats)
        records.append(_record(work, dtype, "ragged", f"{metric}_seconds", "s", runs, common))

    model, params = _model(work, dtype)
    groups = 4 * work.num_prompts
    prompts = rng.integers(2, work.vocab, (groups, work.prompt_tokens), np.int32)
    whole = np.full(groups, work.prompt_tokens, np.int32)
    sizes: dict[str, Any] = dict(
        group_size=work.num_generations, prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens, eos_id=-1, pad_id=0,
    )  # fmt: skip
    samplers = {
        "refilled": make_continuous_sampler(
            model, slots=-(-groups * work.num_generations // 3), **sizes
        ),
        "in_step": make_sampler(model, **sizes),
    }
    spread = {"equal": np.full((groups, work.num_generations), work.new_tokens // 3)}
    spread["geometric"] = lengths(groups)
    for name, sample in samplers.items():
        for kind, limit in spread.items():

            def draw(number: int, sample: Any = sample, limit: Any = limit) -> None:
                key = jax.random.key(number)
                jax.block_until_ready(sample(params, prompts, whole, key, limit=limit))

            runs, common = _measure(draw, work.repeats)
            metric = f"ragged.sampler_{name}_{kind}_tokens_per_s"
            rates = [int(limit.sum()) / run for run in runs]
            records.append(_record(work, dtype, "ragged", metric, "tok/s", rates, common))
    return records


def _train_call(
    work: Workload, dtype: str, written: Any, *, packing: bool
) -> tuple[Callable[[int], None], list[float], Any]:
    """A step on completions of `written` [G, N] tokens, the reference's seconds, the parameters."""
    import jax
    import optax

    from wmrl_jax.train.completion_logprobs import make_reference
    from wmrl_jax.train.config import Config
    from wmrl_jax.train.mesh import make_mesh, put_by_group
    from wmrl_jax.train.step import init_state, make_train_step
    from wmrl_jax.types import Rollouts, ScoredBatch

    model, params = _model(work, dtype)
    config = Config()
    config = replace(
        config,
        model=_model_config(work, dtype),
        train=replace(
            config.train, groups=work.num_prompts, group_size=work.num_generations,
            microbatches=1, packing=packing,
        ),
        loss=replace(config.loss, name="grpo", kl_coef=0.04),
    )  # fmt: skip
    mesh = make_mesh(jax.devices()[:1])
    optimizer = optax.adamw(1e-6)
    state = init_state(params, optimizer, config, jax.random.key(3), mesh)
    step = make_train_step(model, optimizer, config, mesh)
    reference = make_reference(model, config, mesh)
    assert reference is not None
    rng = np.random.default_rng(0)
    rows = (work.num_prompts, work.num_generations)
    length = work.prompt_tokens + work.new_tokens
    tokens: Any = rng.integers(2, work.vocab, (*rows, length), np.int32)
    tokens[..., : work.prompt_tokens] = tokens[:, :1, : work.prompt_tokens]
    slots, ends = np.arange(length), work.prompt_tokens + written
    mask: Any = (slots >= work.prompt_tokens) & (slots < ends[..., None])
    behaviour: Any = np.where(mask, -np.log(work.vocab), 0.0).astype(np.float32)
    rewards: Any = rng.uniform(size=rows).astype(np.float32)
    is_anchor: Any = np.arange(work.num_prompts) == 0
    executed: Any = np.where(is_anchor[:, None], rewards, np.nan)
    starts: Any = np.full(rows[0], work.prompt_tokens, np.int32)
    ended: Any = np.asarray(ends, np.int32)
    finished: Any = np.ones(rows, bool)
    rollouts = put_by_group(mesh, Rollouts(tokens, mask, behaviour, starts, ended, finished))
    batch = put_by_group(mesh, ScoredBatch(tokens, mask, behaviour, rewards, executed, is_anchor))
    frozen = jax.device_put(params, jax.tree.leaves(state.params)[0].sharding)
    holder, reference_runs = [state], []

    def call(_: int) -> None:
        started = time.perf_counter()
        logprobs = jax.block_until_ready(reference(frozen, rollouts))
        reference_runs.append(time.perf_counter() - started)
        holder[0], metrics = step(holder[0], batch._replace(reference_logprobs=logprobs))
        jax.block_until_ready(metrics)

    return call, reference_runs, params


def _model_config(work: Workload, dtype: str) -> Any:
    from wmrl_jax.train.config import ModelConfig

    assert dtype in ("float32", "bfloat16")
    return ModelConfig(
        layers=work.layers,
        width=work.width,
        heads=work.heads,
        kv_heads=work.kv_heads,
        head_dim=work.head_dim,
        mlp_width=work.ff,
        vocab_size=work.vocab,
        rope_theta=1e6,
        dtype=dtype,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
    )


def _model(work: Workload, dtype: str) -> tuple[Any, Any]:
    import jax

    from wmrl_jax.models.model import build_model

    model = build_model(_model_config(work, dtype), work.vocab)
    return model, jax.block_until_ready(model.init(jax.random.key(0)))


def _weights(params: Any) -> int:
    """Weights that take part in matrix products: tied embeddings count as the unembedding."""
    import jax

    return sum(x.size for x in jax.tree.leaves(params) if x.ndim >= 2)


def _measure(call: Callable[[int], None], repeats: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of `repeats` warm calls, and what else is known of them."""
    before = _memory_mb("VmRSS")
    started = time.perf_counter()
    call(0)
    first = time.perf_counter() - started
    call(1)
    whole, restarted = _memory_mb("VmHWM"), _restart_peak()
    runs = []
    for number in range(repeats):
        started = time.perf_counter()
        call(1000 + number)
        runs.append(time.perf_counter() - started)
    peak = _memory_mb("VmHWM")
    return runs, {
        "first_call_s": round(first, 3),
        "rss_before_mb": before,
        "peak_rss_mb": max(whole, peak),
        "steady_peak_rss_mb": peak if restarted else None,
    }


def _memory_mb(key: str) -> float:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{key}:"))
    return round(int(line.split()[1]) / 1024, 1)


def _restart_peak() -> bool:
    """Starts VmHWM anew from the present size; false where the kernel says no."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _matmul_rate(dtype: str, size: int = 1536) -> float:
    """Floating-point operations a second of one large matrix product, best of several."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        jax.block_until_ready(product(x, x))
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _record(
    work: Workload,
    dtype: str,
    bench: str,
    metric: str,
    unit: str,
    runs: Sequence[float],
    common: dict[str, Any],
) -> dict[str, Any]:
    return {
        "impl": IMPL,
        "bench": bench,
        "metric": metric,
        "unit": unit,
        "dtype": dtype,
        "median": round(statistics.median(runs), 7),
        "min": round(min(runs), 7),
        "max": round(max(runs), 7),
        "runs": [round(run, 7) for run in runs],
        **common,
        "batch": work.num_prompts * work.num_generations,
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": work.new_tokens,
        "knobs": {"cache_slack": work.cache_slack},
        "model": {
            name: getattr(work, name)
            for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ff", "vocab")
        },
        "versions": versions(),
        "cpus": len(os.sched_getaffinity(0)),
        "load1": round(os.getloadavg()[0], 2),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _child(arguments: Sequence[str]) -> None:
    """The sizes are those of `Workload`: `... sampler float32 --layers 8`, for instance."""
    bench, dtype, *flags = arguments
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    work = Workload(**dict(zip(names, map(int, flags[1::2]), strict=True)))
    measure = {
        "sampler": measure_sampler, "train": measure_train, "ragged": measure_ragged,
    }[bench]  # fmt: skip
    for record in measure(work, dtype):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1:])
