"""`wmrl bench method`: what the corrections cost, beside their peers and the step they sit in.

Every figure is the median of several warm calls, peers taken in turns in the same process, so that
whatever else the machine does falls on both. Ratios carry over between machines, seconds do not.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.isotonic import isotonic_regression as sklearn_isotonic

from wmrl_jax.method import debias
from wmrl_jax.method.advantages import group_advantages
from wmrl_jax.method.isotonic import isotonic_regression
from wmrl_jax.models.model import build_model
from wmrl_jax.train.config import Config
from wmrl_jax.train.corrections import correct, init_corrections
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.mesh import make_mesh, put_by_group
from wmrl_jax.train.metrics import versions
from wmrl_jax.train.progress import Progress
from wmrl_jax.train.step import init_state, make_train_step
from wmrl_jax.types import ScoredBatch

SIZES = tuple(sorted({4_096, 100_000, *(2**k for k in range(9, 18))}))
_SECONDS = 1.0  # of calls for one figure, after the warm-up
_CALLS = (5, 200)  # fewest and most calls of each contender

InputFn = Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray | None]]


class Timing(NamedTuple):
    """One figure.

    Attributes:
      what: the piece.
      inputs: which inputs.
      size: points, or groups.
      seconds: median of the calls.
      peer: what it is compared with, empty where there is nothing.
      peer_seconds: the peer's median in the same turns; NaN without one.
    """

    what: str
    inputs: str
    size: int
    seconds: float
    peer: str = ""
    peer_seconds: float = math.nan

    @property
    def ratio(self) -> float:
        """The time as a multiple of the peer's."""
        return self.seconds / self.peer_seconds


ISOTONIC, CORRECTIONS = "isotonic regression", "both corrections"


def _arc(n: int, rng: np.random.Generator) -> tuple[np.ndarray, None]:
    """A sawtooth over a concave arc: pools of neighbours need hundreds of rounds."""
    x = np.arange(n) / n
    return np.sqrt(x) * 10 + np.where(np.arange(n) % 2, 1.0, -1.0), None


INPUTS: dict[str, InputFn] = {
    "random": lambda n, rng: (rng.normal(size=n), None),
    "weighted": lambda n, rng: (rng.normal(size=n), rng.uniform(0.1, 3.0, n)),
    "tied": lambda n, rng: (rng.integers(0, 10, n) / 10.0, None),
    "constant": lambda n, rng: (np.ones(n), None),
    "increasing": lambda n, rng: (np.sort(rng.normal(size=n)), None),
    "decreasing": lambda n, rng: (np.sort(rng.normal(size=n))[::-1].copy(), None),
    "sawtooth on an arc": _arc,
}
"""The shapes of inputs: (points, generator) -> y [n] and weights [n] or None."""


def bench_method(folder: Path, *, quick: bool = False) -> list[Timing]:
    """Runs all of it, prints the table, and writes bench_method.{json,csv,png} to `folder`.

    Args:
      folder: made if missing.
      quick: small sizes and few calls, to see that it works.
    """
    sizes = (512, 1024) if quick else SIZES
    seconds = 0.02 if quick else _SECONDS
    groups = (8,) if quick else (8, 64, 512, 4096)
    console = Console(stderr=True)
    if not _with_torch():
        console.print(
            "Without torch, torchisotonic and a C++ compiler, scikit-learn is the only peer."
        )
    config = bench_config(quick)
    timings: list[Timing] = []
    total = len(sizes) * len(INPUTS) + len(groups) + 1
    with Progress("bench", total, console=console) as progress:
        for name, make in INPUTS.items():
            for n in sizes:
                timings += time_isotonic(name, *make(n, np.random.default_rng(n)), seconds)
                progress.update(1 + len({(t.inputs, t.size) for t in timings}))
        for n in groups:
            timings.append(time_advantages(n, seconds))
        timings.append(time_corrections(config, seconds))
        progress.update(total)
    _write(folder, timings, sizes)
    _print(timings, Console())
    return timings


def bench_config(quick: bool) -> Config:
    """The sizes of `configs/quickstart.yaml`, or small ones."""
    config = Config()
    model = replace(config.model, mlp_width=512, prompt_tokens=104, new_tokens=56)
    if quick:
        model = replace(model, layers=1, width=32, mlp_width=32, prompt_tokens=8, new_tokens=8)
    corrections = replace(config.corrections, capacity=64 if quick else 4096)
    return replace(config, model=model, corrections=corrections)


def time_in_turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median seconds of each call; they are warmed up once and then made in turns.

    Args:
      calls: contenders by name; what they return is waited for.
      seconds: for all calls of the slowest contender together, about.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    taken: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    rounds = 0
    while rounds < _CALLS[0] or (
        time.perf_counter() - started < seconds * len(calls) and rounds < _CALLS[1]
    ):
        for name, call in calls.items():
            before = time.perf_counter()
            jax.block_until_ready(call())
            taken[name].append(time.perf_counter() - before)
        rounds += 1
    return {name: float(np.median(times)) for name, times in taken.items()}


def time_isotonic(
    inputs: str, y: np.ndarray, weights: np.ndarray | None, seconds: float
) -> list[Timing]:
    """Compiled isotonic regression and its peers on one input, in float32."""
    y = y.astype(np.float32)
    weights = None if weights is None else weights.astype(np.float32)
    on_device = jax.tree.map(jnp.asarray, (y, weights))
    calls: dict[str, Callable[[], Any]] = {
        ISOTONIC: lambda: _fit(*on_device),
        "scikit-learn": lambda: sklearn_isotonic(y, sample_weight=weights),
    }
    if _with_torch():
        calls["torchisotonic"] = _torch_fit(y, weights)
    taken = time_in_turns(calls, seconds)
    ours = taken.pop(ISOTONIC)
    return [Timing(ISOTONIC, inputs, y.size, ours, peer, theirs) for peer, theirs in taken.items()]


_fit = jax.jit(isotonic_regression)


def _with_torch() -> bool:
    """Whether torchisotonic can run: it compiles itself at its first call."""
    packages = all(importlib.util.find_spec(name) for name in ("torch", "torchisotonic"))
    return packages and shutil.which("c++") is not None


def _torch_fit(y: np.ndarray, weights: np.ndarray | None) -> Callable[[], Any]:
    import torch  # type: ignore[import-not-found]
    from torchisotonic import isotonic  # type: ignore[import-not-found]

    values = torch.from_numpy(y)
    w = None if weights is None else torch.from_numpy(weights)
    return lambda: isotonic(values, w).numpy()


def time_advantages(groups: int, seconds: float) -> Timing:
    """Group-relative advantages of `groups` groups of 8."""
    rewards = jax.random.uniform(jax.random.key(0), (groups, 8))
    compiled = jax.jit(group_advantages)
    taken = time_in_turns({"advantages": lambda: compiled(rewards)}, seconds)["advantages"]
    return Timing("group advantages", "random", groups, taken)


def time_corrections(config: Config, seconds: float) -> Timing:
    """Both corrections alone, with a full buffer, against the whole train step."""
    model = build_model(config.model, config.model.vocab_size)
    mesh = make_mesh(jax.devices()[:1])
    optimizer = optax.adamw(1e-4)
    batch = _batch(config)
    states = init_corrections(config)
    many = jax.random.uniform(jax.random.key(1), (2, config.corrections.capacity))
    filled = jax.jit(debias.observe)(states[0], many[0], many[0] + 0.3 * many[1])
    sizes = jnp.full(batch.is_anchor.shape, 100.0)

    @jax.jit
    def corrections(debias_state: Any, denoise_state: Any) -> Any:
        return correct(
            debias_state, denoise_state, batch.predicted, batch.executed, batch.is_anchor, sizes,
            config,
        )  # fmt: skip

    step = make_train_step(model, optimizer, config, mesh)
    params = model.init(jax.random.key(2))
    state = init_state(params, optimizer, config, jax.random.key(3), mesh)
    holder = [state._replace(debias=jax.tree.map(jnp.copy, filled))]
    on_mesh = put_by_group(mesh, batch)

    def one_step() -> Any:
        holder[0], metrics = step(holder[0], on_mesh)  # the state is donated
        return metrics

    taken = time_in_turns(
        {"train step": one_step, CORRECTIONS: lambda: corrections(filled, states[1])}, seconds
    )
    return Timing(
        CORRECTIONS,
        f"{config.corrections.capacity} pairs",
        config.train.groups,
        taken[CORRECTIONS],
        "train step",
        taken["train step"],
    )


def _batch(config: Config) -> ScoredBatch:
    groups, size = config.train.groups, config.train.group_size
    prompt, new = config.model.prompt_tokens, config.model.new_tokens
    rng = np.random.default_rng(0)
    mask = np.zeros((groups, size, prompt + new), bool)
    mask[..., prompt:] = True
    executed = np.full((groups, size), np.nan, np.float32)
    executed[0] = rng.uniform(size=size)
    rows = mask.shape
    return ScoredBatch(
        tokens=jnp.asarray(rng.integers(4, config.model.vocab_size, rows), jnp.int32),
        loss_mask=jnp.asarray(mask),
        behaviour_logprobs=jnp.asarray(np.where(mask, -2.0, 0.0), jnp.float32),
        predicted=jnp.asarray(rng.uniform(size=(groups, size)), jnp.float32),
        executed=jnp.asarray(executed),
        is_anchor=jnp.arange(groups) == 0,
    )


def _print(timings: Sequence[Timing], console: Console) -> None:
    table = Table("what", "inputs", "size", "time", "peer", "multiple of its time")
    for t in timings:
        ratio = (
            "" if math.isnan(t.ratio) else f"{t.ratio:.4f}" if t.ratio < 0.1 else f"{t.ratio:.2f}"
        )
        table.add_row(t.what, t.inputs, f"{t.size:,}", f"{1000 * t.seconds:.3f} ms", t.peer, ratio)
    console.print(table)
    for name, growth in exponents(timings).items():
        console.print(f"{ISOTONIC}, {name}: time grows as n^{growth:.2f}")


def exponents(timings: Sequence[Timing]) -> dict[str, float]:
    """Exponent of the growth of our isotonic regression's time, by inputs."""
    grown = {}
    for name in INPUTS:
        points = {t.size: t.seconds for t in timings if t.what == ISOTONIC and t.inputs == name}
        size, seconds = np.log(np.array(list(points.items()))).T
        grown[name] = float(np.polyfit(size, seconds, 1)[0])
    return grown


def _write(folder: Path, timings: Sequence[Timing], sizes: Sequence[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {name: None if value != value else value for name, value in fields.items()}
        for fields in (t._asdict() | {"ratio": t.ratio} for t in timings)
    ]
    record = {"versions": versions(), "growth": exponents(timings), "timings": rows}
    write_whole(folder / "bench_method.json", json.dumps(record, indent=2, allow_nan=False))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*Timing._fields, "ratio"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "bench_method.csv", text.getvalue())

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in INPUTS:
        of = {
            t.size: t
            for t in timings
            if t.what == ISOTONIC and t.inputs == name and t.peer == "scikit-learn"
        }
        left.loglog(sizes, [of[n].seconds for n in sizes], "o-", ms=3, label=name)
        right.semilogx(sizes, [of[n].ratio for n in sizes], "o-", ms=3, label=name)
    left.set_ylabel("seconds")
    left.set_title("isotonic regression, compiled")
    right.set_title("time as a multiple of scikit-learn's")
    for ax in (left, right):
        ax.set_xlabel("points")
    left.legend(fontsize=8, frameon=False)
    figure.savefig(folder / "bench_method.png", dpi=120)
    plt.close(figure)
