"""The theory of both corrections, checked by thousands of simulated runs: `wmrl simulate`.

Each experiment trains many policies of `method.theory` side by side and reads off the floor: the
gap to the best value that is left when training has settled, which the bounds speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wmrl_jax.method import theory
from wmrl_jax.method.theory import BIAS_SHAPES, Arm, Family, Sizes, Trace

_CHUNK = 64  # runs in one call, so that one program serves any number of them
_SETTLED = 0.25  # share of the steps, at the end, over which the floor is read
_DRAWS = 4096  # of each gradient estimate


class Row(NamedTuple):
    """One point of an experiment.

    Attributes:
      experiment: its name.
      arm: which arm of it.
      x_name: what `x` is.
      x: the quantity that is varied.
      floor: mean gap over the settled end of the runs; for `variance`, the variance instead.
      error: standard error of `floor` over the runs.
      runs: simulated runs behind it.
    """

    experiment: str
    arm: str
    x_name: str
    x: float
    floor: float
    error: float
    runs: int


class Fit(NamedTuple):
    """A straight line ``floor = intercept + slope * x`` through the points of one arm."""

    experiment: str
    arm: str
    x_name: str
    intercept: float
    slope: float
    r_squared: float


class Curve(NamedTuple):
    """A mean gap by step, and the bound that holds for it."""

    arm: str
    gap: np.ndarray
    bound: np.ndarray


class Findings(NamedTuple):
    """What the experiments found: the table, the fits, learning curves, and sentences."""

    rows: list[Row]
    fits: list[Fit]
    curves: list[Curve]
    sentences: list[str]


BoundFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(epsilon by step, pairs seen before each step) -> the bound by step, both [steps]."""

OnRuns = Callable[[int], None]
"""Called with the number of further runs that are done."""


def run_arms(
    family: Family,
    arms: Sequence[Arm],
    runs: int,
    sizes: Sizes,
    seed: int = 0,
    on_runs: OnRuns = lambda n: None,
) -> Trace:
    """Simulates every arm `runs` times; arms share their keys, so that they differ by nothing else.

    Returns:
      The traces as NumPy arrays with leading axes [arms, runs].
    """
    keys = jax.random.split(jax.random.key(seed), runs)
    index = np.arange(len(arms) * runs)
    columns = [np.asarray([np.asarray(getattr(a, name)) for a in arms]) for name in Arm._fields]
    compiled = _simulator(sizes)
    parts = []
    for start in range(0, index.size, _CHUNK):
        chosen = np.resize(index[start : start + _CHUNK], _CHUNK)  # filled up with repetitions
        kept = min(_CHUNK, index.size - start)
        batch = Arm(*(jnp.asarray(column[chosen // runs]) for column in columns))
        traces = jax.device_get(compiled(family, batch, keys[chosen % runs]))
        parts.append(jax.tree.map(lambda x, n=kept: x[:n], traces))
        on_runs(kept)
    return jax.tree.map(
        lambda *x: np.concatenate(x).reshape(len(arms), runs, *x[0].shape[1:]), *parts
    )


@cache
def _simulator(sizes: Sizes) -> Any:
    simulate = lambda family, arm, key: theory.simulate(family, arm, key, sizes)  # noqa: E731
    return jax.jit(jax.vmap(simulate, in_axes=(None, 0, 0)))


def floors(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Mean gap [arms] over the settled end of the runs, and its standard error over runs."""
    gap = np.asarray(trace.gap)
    settled = gap[..., -int(_SETTLED * gap.shape[-1]) :].mean(-1)
    return settled.mean(-1), settled.std(-1, ddof=1) / np.sqrt(settled.shape[-1])


def straight_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Intercept, slope and R^2 of the least-squares line."""
    slope, intercept = np.polyfit(x, y, 1)
    left = np.sum((y - intercept - slope * x) ** 2)
    return float(intercept), float(slope), float(1.0 - left / np.sum((y - y.mean()) ** 2))


class _Study:
    """Collects what the experiments find; one instance per call of `study`."""

    def __init__(self, runs: int, seed: int, on_runs: OnRuns) -> None:
        self.runs, self.seed, self.on_runs = runs, seed, on_runs
        self.family = theory.make_family(jax.random.key(seed))
        self.found = Findings([], [], [], [])
        self.pairs_needed = np.nan  # T0, once measured

    def measure(
        self, experiment: str, name: str, x_name: str, xs: Iterable[float], arms: list[Arm],
        sizes: Sizes,
    ) -> np.ndarray:  # fmt: skip
        trace = run_arms(self.family, arms, self.runs, sizes, self.seed, self.on_runs)
        mean, error = floors(trace)
        for x, m, e in zip(xs, mean, error, strict=True):
            row = Row(experiment, name, x_name, float(x), float(m), float(e), self.runs)
            self.found.rows.append(row)
        return mean

    def fit(self, experiment: str, name: str, x_name: str, x: np.ndarray, y: np.ndarray) -> Fit:
        fit = Fit(experiment, name, x_name, *straight_line(x, y))
        self.found.fits.append(fit)
        return fit


BIASES = np.linspace(0.0, 0.3, 7)
NOISES = np.sqrt(np.linspace(0.0, 0.25, 6))
FROZEN_AFTER = (0, 20, 40, 80, 160, 240)
RATE = 1.0
_DEBIASED = Sizes(capacity=2048, min_pairs=16)


def study(runs: int = 64, seed: int = 0, on_runs: OnRuns = lambda n: None) -> Findings:
    """All experiments; see each function below.

    Args:
      runs: simulated runs for each point.
      seed: decides the family of tasks and every run.
      on_runs: progress.
    """
    s = _Study(runs, seed, on_runs)
    floor_by_bias(s)
    floor_by_noise(s)
    floor_by_pairs(s)
    fused_streams(s)
    rank_breaking(s)
    drift(s)
    bounds(s)
    return s.found


def planned_runs(runs: int) -> int:
    """How many runs `study` simulates, for a progress display."""
    points = 3 * len(BIASES) + len(NOISES) + len(FROZEN_AFTER) + 1 + 4 * len(NOISES[1:])
    return runs * (points + 3 + 3 + 2)


def floor_by_bias(s: _Study) -> None:
    """Uncorrected training: the floor grows as B^2, whatever the bias looks like."""
    for shape in range(3):
        arms = [Arm(shape, b, learning_rate=RATE, fraction=0.0) for b in BIASES]
        mean = s.measure("bias", BIAS_SHAPES[shape], "B", BIASES, arms, Sizes())
        fit = s.fit("bias", BIAS_SHAPES[shape], "B^2", BIASES**2, mean)
        s.found.sentences.append(
            f"Uncorrected, {BIAS_SHAPES[shape]} bias: the floor is {fit.intercept:.2g} + "
            f"{fit.slope:.2g} B^2 (R^2 {fit.r_squared:.3f}, B up to {BIASES[-1]:g})."
        )


def floor_by_noise(s: _Study) -> None:
    """Uncorrected training: the floor grows as sigma^2."""
    arms = [Arm(noise=n, learning_rate=RATE, fraction=0.0) for n in NOISES]
    mean = s.measure("noise", "uncorrected", "sigma", NOISES, arms, Sizes())
    fit = s.fit("noise", "uncorrected", "sigma^2", NOISES**2, mean)
    s.found.sentences.append(
        f"Uncorrected, noisy scores: the floor is {fit.intercept:.2g} + {fit.slope:.2g} sigma^2 "
        f"(R^2 {fit.r_squared:.3f}, sigma up to {NOISES[-1]:g})."
    )


def floor_by_pairs(s: _Study) -> None:
    """Debiasing alone: the floor falls with the anchor pairs that the map was fitted to.

    Executed rewards are noisy, so that one pair says little; the map is frozen after a while.
    """
    base = Arm(1, 0.4, execution_noise=0.3, learning_rate=RATE, fraction=1 / 16)
    arms = [base._replace(frozen_after=n) for n in FROZEN_AFTER]
    pairs = np.array(FROZEN_AFTER) * _DEBIASED.rollouts  # one anchor group a step
    mean = s.measure("pairs", "debiased", "pairs", pairs, arms, _DEBIASED)
    unbiased = s.measure("pairs", "unbiased", "pairs", [0], [base._replace(bias_size=0.0)], Sizes())
    excess = np.maximum(mean - unbiased, 1e-9)
    s.pairs_needed = _halving(pairs, excess)
    power, _ = np.polyfit(np.log(pairs[1:]), np.log(excess[1:]), 1)
    s.found.sentences.append(
        f"Debiased: what the bias adds to the floor falls from {excess[0]:.2g} without a map to "
        f"{excess[-1]:.2g} with one fitted to {pairs[-1]} pairs, about as pairs^{power:.2f}; "
        f"{s.pairs_needed:.0f} pairs halve it."
    )


def _halving(pairs: np.ndarray, excess: np.ndarray) -> float:
    """T0 of ``excess[0] / (1 + pairs / T0)``, by least squares over the relative excess."""
    candidates = np.geomspace(0.1, 1e4, 2000)[:, None]
    error = np.sum((1.0 / (1.0 + pairs / candidates) - excess / excess[0]) ** 2, axis=1)
    return float(candidates[np.argmin(error), 0])


def fused_streams(s: _Study) -> None:
    """Denoising alone: variance and floor of the fused gradient lie below both streams'."""
    noises = NOISES[1:]
    base = Arm(learning_rate=RATE, fraction=1 / 8)
    names = ("anchors alone", "world model alone", "equal weights", "fused")
    arms = {
        names[0]: base._replace(world_model=False),
        names[1]: base._replace(fraction=0.0),
        names[2]: base,
        names[3]: base._replace(denoise=True),
    }
    mean = {
        name: s.measure(
            "fusion", name, "sigma", noises, [arm._replace(noise=n) for n in noises], Sizes()
        )
        for name, arm in arms.items()
    }
    below = np.minimum(mean[names[0]], mean[names[1]]) - mean[names[3]]
    variances = np.array([_variances(s, arms[names[3]]._replace(noise=n)) for n in noises])
    for column, name in enumerate((*names[:2], "fused", "theory")):
        for n, v in zip(noises, variances[:, column], strict=True):
            s.found.rows.append(Row("variance", name, "sigma", float(n), float(v), 0.0, _DRAWS))
    ratio = variances[:, 2] / np.minimum(variances[:, 0], variances[:, 1])
    far = np.max(np.abs(variances[:, 2] / variances[:, 3] - 1))
    s.found.sentences.append(
        f"Fused: the gradient's variance is {ratio.min():.2f} to {ratio.max():.2f} of the better "
        f"stream's, within {100 * far:.0f} % of V_WM V_E / (V_WM + V_E); the floor is below both "
        f"streams' at {int(np.sum(below > 0))} of {len(noises)} noise levels."
    )


def _variances(s: _Study, arm: Arm) -> tuple[float, float, float, float]:
    """Traces of the covariances of anchor, world-model and fused gradients, and the harmonic one.

    At the policy half-way to the optimum, with the moments of that policy known well.
    """
    theta = 0.5 * s.family.optimum
    arm = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), arm)  # no weak types: one program
    sizes = Sizes()
    moments = theory.measured_moments(s.family, arm, theta, jax.random.key(s.seed + 1), sizes)
    keys = jax.random.split(jax.random.key(s.seed + 2), _DRAWS)
    streams = _estimator(sizes)(s.family, arm, theta, moments, keys)
    v_e, v_wm, v_fused = (float(jnp.sum(jnp.var(g, axis=0))) for g in streams)
    return v_e, v_wm, v_fused, float(theory.fused_variance(v_wm, v_e))


@cache
def _estimator(sizes: Sizes) -> Any:
    estimate = lambda f, a, t, m, k: theory.estimate_gradient(f, a, t, m, k, sizes)  # noqa: E731
    return jax.jit(jax.vmap(estimate, in_axes=(None, None, None, None, 0)))


def rank_breaking(s: _Study) -> None:
    """A monotone map cannot undo a bias that breaks the ranking; the anchors' own weight can."""
    base = Arm(2, 0.3, learning_rate=RATE, fraction=1 / 8)
    plain = s.measure("rank_breaking", "uncorrected", "B", [0.3], [base], Sizes())
    both = s.measure(
        "rank_breaking", "debiased", "B", [0.3, 0.3],
        [base, base._replace(denoise=True)], _DEBIASED,
    )  # fmt: skip
    s.found.rows[-1] = s.found.rows[-1]._replace(arm="debiased and fused")
    kept = 100 * both[0] / plain[0]
    s.found.sentences.append(
        f"Rank-breaking bias (B 0.3): a monotone map cannot undo it; the floor with debiasing is "
        f"{kept:.0f} % of the uncorrected one ({both[0]:.2g} against {plain[0]:.2g}); with the "
        f"fusion besides, {both[1]:.2g}."
    )


def drift(s: _Study) -> None:
    """A bias that grows as the policy moves: the map must be refitted, a frozen one goes stale."""
    base = Arm(3, 0.8, learning_rate=RATE, fraction=1 / 8)
    plain = s.measure("drift", "uncorrected", "B", [0.8], [base], Sizes())
    arms = [base._replace(frozen_after=20), base]
    both = s.measure("drift", "frozen map", "B", [0.8, 0.8], arms, _DEBIASED)
    s.found.rows[-1] = s.found.rows[-1]._replace(arm="online map")
    s.found.sentences.append(
        f"Drifting bias (B 0.8): floor {plain[0]:.2g} uncorrected, {both[0]:.2g} with a map frozen "
        f"after 20 steps, {both[1]:.2g} with the map refitted online."
    )


def bounds(s: _Study) -> None:
    """Mean learning curves under the bounds, whose constants are the fitted floors."""
    shape, size, noise = 1, 0.3, 0.3
    slope = {(f.experiment, f.arm): f.slope for f in s.found.fits}
    factors = {
        "bias_factor": slope["bias", BIAS_SHAPES[shape]],
        "variance_factor": slope["noise", "uncorrected"],
    }
    ideal = next(r.floor for r in s.found.rows if r.experiment == "noise")
    mu = float(theory.curvature(s.family))
    base = Arm(shape, size, noise=noise, learning_rate=RATE)

    def curve(name: str, arm: Arm, sizes: Sizes, bound_of: BoundFn, formula: str) -> None:
        trace = run_arms(s.family, [arm], s.runs, sizes, s.seed, s.on_runs)
        gap = np.asarray(trace.gap)[0].mean(0)
        epsilon = theory.optimisation_term(jnp.arange(gap.size), float(gap[0]), RATE, mu)
        bound = np.asarray(bound_of(epsilon, jnp.asarray(trace.pairs)[0].mean(0))) + ideal
        s.found.curves.append(Curve(name, gap, bound))
        held = 100 * float(np.mean(gap <= bound * 1.05))
        s.found.sentences.append(
            f"Bound, {name}: with mu = {mu:.3g} measured and the constants fitted, the mean gap "
            f"lies below {formula} (5 % allowed) at {held:.0f} % of the steps."
        )

    curve(
        "uncorrected", base._replace(fraction=0.0), Sizes(),
        lambda epsilon, pairs: theory.uncorrected_bound(epsilon, size, noise**2, **factors),
        "epsilon(T) + c_B B^2 + c_V sigma^2",
    )  # fmt: skip
    v_e, v_wm, _, _ = _variances(s, base._replace(denoise=True))
    curve(
        "corrected", base._replace(denoise=True), _DEBIASED,
        lambda epsilon, pairs: theory.corrected_bound(
            epsilon, size, noise**2, noise**2 * v_e / v_wm, pairs, s.pairs_needed, **factors
        ),
        "epsilon(T) + c_B B^2 / (1 + T/T0) + c_V sigma^2 / (1 + V_WM/V_E)",
    )  # fmt: skip
