"""The experiments of `wmrl simulate`: what they must find, at sizes that a test can afford."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.cli import main
from wmrl_jax.method import theory
from wmrl_jax.method.theory import Arm, Sizes
from wmrl_jax.train import simulation, simulation_report


@pytest.fixture(scope="module")
def small_study():
    return simulation._Study(runs=8, seed=0, on_runs=lambda n: None)


def test_many_arms_at_once_equal_each_alone():
    family = theory.make_family(jax.random.key(0), tasks=8, actions=4, dimension=3)
    sizes = Sizes(steps=20, groups=4, rollouts=4)
    arms = [Arm(noise=0.1), Arm(bias_size=0.2, fraction=0.5)]
    both = simulation.run_arms(family, arms, 3, sizes)
    keys = jax.random.split(jax.random.key(0), 3)
    simulate = jax.jit(lambda arm, key: theory.simulate(family, arm, key, sizes))
    for i, arm in enumerate(arms):
        for j in range(3):
            alone = simulate(jax.tree.map(jnp.asarray, arm), keys[j])
            np.testing.assert_allclose(both.gap[i, j], alone.gap, atol=1e-6)


def test_a_straight_line_is_found_exactly_and_its_r_squared_falls_with_scatter():
    x = np.linspace(0, 1, 9)
    assert simulation.straight_line(x, 2 + 3 * x) == pytest.approx((2.0, 3.0, 1.0))
    scattered = 2 + 3 * x + np.array([1, -1, 1, -1, 1, -1, 1, -1, 1])
    expected = np.corrcoef(x, scattered)[0, 1] ** 2
    assert simulation.straight_line(x, scattered)[2] == pytest.approx(expected)


def test_the_uncorrected_floor_grows_as_the_square_of_bias_and_noise(small_study):
    simulation.floor_by_bias(small_study)
    simulation.floor_by_noise(small_study)
    fits = small_study.found.fits
    assert [f.arm for f in fits] == ["affine", "saturating", "rank_breaking", "uncorrected"]
    for fit in fits:
        assert fit.r_squared >= 0.98
        assert fit.slope > 0


@pytest.mark.slow
def test_simulate_finds_what_the_theory_says_and_leaves_table_and_figure(tmp_path, capsys):
    found = simulation_report.simulate(tmp_path, runs=8, seed=0)
    floor = {(r.experiment, r.arm, r.x): r.floor for r in found.rows}
    debiased = [r.floor for r in found.rows if r.arm == "debiased" and r.experiment == "pairs"]
    assert debiased[-1] < 0.2 * debiased[0]
    for noise in simulation.NOISES[2:]:
        streams = [floor["fusion", name, noise] for name in ("anchors alone", "world model alone")]
        assert floor["fusion", "fused", noise] < min(streams)
        variances = [
            floor["variance", name, noise] for name in ("anchors alone", "world model alone")
        ]
        assert floor["variance", "fused", noise] < min(variances)
    assert floor["drift", "online map", 0.8] < 0.5 * floor["drift", "frozen map", 0.8]
    assert floor["rank_breaking", "debiased", 0.3] > floor["rank_breaking", "uncorrected", 0.3]
    for curve in found.curves:
        assert np.mean(curve.gap <= 1.05 * curve.bound) > 0.95
    assert [curve.arm for curve in found.curves] == ["uncorrected", "corrected"]
    assert found.curves[1].bound[-1] < 0.5 * found.curves[0].bound[-1]
    assert any("cannot undo it" in sentence for sentence in found.sentences)
    record = json.loads((tmp_path / "simulate.json").read_text())
    assert len(record["rows"]) == len(found.rows)
    assert (tmp_path / "simulate.png").stat().st_size > 10_000
    assert len((tmp_path / "simulate.csv").read_text().splitlines()) == len(found.rows) + 1
    assert "B^2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plan"], "a plan needs --cost-execution and --cost-score"),
        (["--noise", "0.2"], "add --plan"),
        (
            ["--plan", "--cost-execution", "2s", "--cost-score", "1s", "--bias", "0.1",
             "--from-run", "x"],
            "--from-run measures what --bias says",
        ),
        (
            ["--plan", "--cost-execution", "2s", "--cost-score", "1s", "--from-run", "nowhere"],
            "nowhere has no pairs.jsonl",
        ),
    ],
)  # fmt: skip
def test_a_wrong_question_is_answered_in_one_sentence(arguments, sentence, capsys):
    assert main(["simulate", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("time", ["5x", "-1s", "s", "0s"])
def test_a_wrong_time_is_refused(time, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--plan", f"--cost-execution={time}", "--cost-score", "1s"])
    assert "is not a time such as" in capsys.readouterr().err
