"""`wmrl bench sampler` and `wmrl bench train`: tokens and steps per second, peak memory, peers.

Every measurement runs in a process of its own, so that its peak memory is its own, and leaves one
JSON line per figure. A peer is any command that takes the same options and prints lines of the
same fields; it is started in turns with ours, on the same sizes.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wmrl_jax.errors import UserError
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.metrics import versions
from wmrl_jax.train.workload import BENCHES, Workload


def bench_model(
    bench: str,
    folder: Path,
    *,
    workload: Workload,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    peers: Sequence[str] = (),
    rounds: int = 1,
) -> list[dict[str, Any]]:
    """Measures ours and the peers in turns, prints the table, writes `bench_<name>.{jsonl,json}`.

    Args:
      bench: one of `BENCHES`.
      folder: made if missing.
      workload: sizes and repeats.
      dtypes: of the compute.
      peers: commands, `python bench_tunix.py` say.
      rounds: how often everything is measured; figures of several rounds are pooled.

    Returns:
      the records, one a figure.

    Raises:
      UserError: a measurement failed; the sentence ends with its last line.
    """
    console = Console(stderr=True)
    own = [sys.executable, "-m", "wmrl_jax.train.bench_model", bench]
    records: list[dict[str, Any]] = []
    for _ in range(rounds):
        for dtype in dtypes:
            for command in ([*own, dtype], *(_peer(peer, bench, dtype) for peer in peers)):
                console.print(f"measuring: {shlex.join(command[:4])} ... {dtype}", highlight=False)
                records += _run([*command, *workload.flags])
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_whole(folder / f"bench_{bench}.jsonl", lines)
    summary = {"versions": versions(), "figures": pooled(records)}
    write_whole(folder / f"bench_{bench}.json", json.dumps(summary, indent=2))
    _print(bench, summary["figures"], Console())
    return records


def _peer(command: str, bench: str, dtype: str) -> list[str]:
    return [*shlex.split(command), "--bench", BENCHES[bench], "--dtypes", dtype]


def _run(command: list[str]) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"`{shlex.join(command[:4])} ...` ended with {done.returncode}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def pooled(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each (impl, metric, dtype): median over all runs, greatest peak of memory."""
    by: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        by.setdefault((record["impl"], record["metric"], record["dtype"]), []).append(record)
    return [
        {
            "impl": impl,
            "metric": metric,
            "dtype": dtype,
            "median": statistics.median(run for record in those for run in record["runs"]),
            "peak_rss_mb": max(record["peak_rss_mb"] for record in those),
        }
        for (impl, metric, dtype), those in by.items()
    ]


def _print(bench: str, figures: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("figure", "dtype", "who", "median", "ours / theirs", "peak memory, MB")
    ours = {(f["metric"], f["dtype"]): f["median"] for f in figures if f["impl"] == IMPL}
    for f in sorted(figures, key=lambda f: (f["dtype"], f["metric"], f["impl"] != IMPL)):
        mine = ours.get((f["metric"], f["dtype"]))
        ratio = "" if f["impl"] == IMPL or mine is None else f"{mine / f['median']:.2f}"
        table.add_row(
            f["metric"], f["dtype"], f["impl"], f"{f['median']:.4g}", ratio,
            f"{f['peak_rss_mb']:.0f}",
        )  # fmt: skip
    console.print(table)


IMPL = "wmrl_jax"


def measure_sampler(work: Workload, dtype: str) -> list[dict[str, Any]]:
    """Sampling of fixed lengths, from token ids to token ids on the host."""
    import jax
    import numpy as np

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
    import jax
    import numpy as np
    import optax

    from wmrl_jax.train.config import Config
    from wmrl_jax.train.mesh import make_mesh, put_by_group
    from wmrl_jax.train.step import init_state, make_reference, make_train_step
    from wmrl_jax.types import Rollouts, ScoredBatch

    model, params = _model(work, dtype)
    config = Config()
    config = replace(
        config,
        model=_model_config(work, dtype),
        train=replace(
            config.train, groups=work.num_prompts, group_size=work.num_generations, microbatches=1
        ),
        loss=replace(config.loss, name="grpo", kl_coef=0.04),
    )
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
    mask: Any = np.broadcast_to(np.arange(length) >= work.prompt_tokens, tokens.shape)
    behaviour: Any = np.where(mask, -np.log(work.vocab), 0.0).astype(np.float32)
    rewards: Any = rng.uniform(size=rows).astype(np.float32)
    is_anchor: Any = np.arange(work.num_prompts) == 0
    executed: Any = np.where(is_anchor[:, None], rewards, np.nan)
    starts: Any = np.full(rows[0], work.prompt_tokens, np.int32)
    ends: Any = np.full(rows, length, np.int32)
    finished: Any = np.ones(rows, bool)
    rollouts = put_by_group(mesh, Rollouts(tokens, mask, behaviour, starts, ends, finished))
    batch = put_by_group(mesh, ScoredBatch(tokens, mask, behaviour, rewards, executed, is_anchor))
    frozen = jax.device_put(params, jax.tree.leaves(state.params)[0].sharding)
    holder, reference_runs = [state], []

    def call(_: int) -> None:
        started = time.perf_counter()
        logprobs = jax.block_until_ready(reference(frozen, rollouts))
        reference_runs.append(time.perf_counter() - started)
        holder[0], metrics = step(holder[0], batch._replace(reference_logprobs=logprobs))
        jax.block_until_ready(metrics)

    runs, common = _measure(call, work.repeats)
    kept = reference_runs[-len(runs) :]
    count = rows[0] * rows[1] * length
    # Reference: one pass; policy: forward and twice as much backward. Prompts count once a group.
    read = rows[0] * (work.prompt_tokens + rows[1] * work.new_tokens)
    flops = 8 * _weights(params) * read
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
    """`python -m wmrl_jax.train.bench_model sampler float32 --layers 8 ...`: one measurement."""
    bench, dtype, *flags = arguments
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    work = Workload(**dict(zip(names, map(int, flags[1::2]), strict=True)))
    measure = {"sampler": measure_sampler, "train": measure_train}[bench]
    for record in measure(work, dtype):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1:])
