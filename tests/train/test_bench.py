"""The benchmark runs, leaves its files, and its figures fit together; no time is judged here."""

import csv
import json
import math
import time

import numpy as np
import pytest
from sklearn.isotonic import isotonic_regression

from wmrl_jax.cli import main
from wmrl_jax.train import bench


def test_calls_are_made_in_turns_and_their_median_is_told():
    order = []

    def call(name, seconds):
        order.append(name)
        time.sleep(seconds)

    taken = bench.time_in_turns(
        {"a": lambda: call("a", 0.002), "b": lambda: call("b", 0.02)}, seconds=0.05
    )
    assert order[:6] == ["a", "b"] * 3
    assert 0.002 <= taken["a"] < taken["b"]


def test_the_exponent_of_a_power_law_is_found():
    timings = [
        bench.Timing(bench.ISOTONIC, name, n, 1e-9 * n**1.5, "scikit-learn", 1.0)
        for name in bench.INPUTS
        for n in (512, 1024, 4096)
    ]
    assert all(e == pytest.approx(1.5) for e in bench.exponents(timings).values())


def test_the_command_leaves_table_and_plot_with_every_input_and_piece(tmp_path, capsys):
    assert main(["bench", "method", "--quick", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "bench_method.json").read_text())
    seen = {(t["what"], t["inputs"], t["size"]) for t in record["timings"]}
    assert {(bench.ISOTONIC, name, n) for name in bench.INPUTS for n in (512, 1024)} <= seen
    for timing in record["timings"]:
        assert timing["seconds"] > 0
        if timing["peer"]:
            expected = timing["seconds"] / timing["peer_seconds"]
            assert math.isclose(timing["ratio"], expected)
    assert any(t["what"] == bench.CORRECTIONS for t in record["timings"])
    rows = list(csv.DictReader((tmp_path / "bench_method.csv").open()))
    assert len(rows) == len(record["timings"])
    assert (tmp_path / "bench_method.png").stat().st_size > 10_000
    assert "time grows as n^" in capsys.readouterr().out


@pytest.mark.parametrize("name", bench.INPUTS)
def test_every_contender_fits_the_same(name):
    y, weights = bench.INPUTS[name](300, np.random.default_rng(0))
    y, weights = (None if x is None else x.astype(np.float32) for x in (y, weights))
    expected = isotonic_regression(y, sample_weight=weights)
    np.testing.assert_allclose(bench._fit(y, weights), expected, atol=1e-5)
    if not bench._with_torch():
        pytest.skip("torch, torchisotonic and a C++ compiler are not all here")
    np.testing.assert_allclose(bench._torch_fit(y, weights)(), expected, atol=1e-5)
