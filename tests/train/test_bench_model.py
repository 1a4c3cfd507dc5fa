"""The benchmarks of sampler and step run, leave their files, and set peers beside ours."""

import json
import sys

import pytest

from wmrl_jax.cli import main
from wmrl_jax.train import bench_model

SMALL = [
    "--layers", "1", "--width", "16", "--heads", "2", "--kv-heads", "1", "--head-dim", "8",
    "--ff", "16", "--vocab", "64", "--num-prompts", "2", "--num-generations", "2",
    "--prompt-tokens", "4", "--new-tokens", "4", "--repeats", "2",
]  # fmt: skip

PEER = """
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags["--num-prompts"] == "2" and flags["--bench"] == "generate"
print("not a figure")
print(json.dumps({"impl": "peer", "metric": "generate.seconds", "dtype": flags["--dtypes"],
                  "runs": [1.0, 3.0], "peak_rss_mb": 7.0}))
"""


@pytest.mark.parametrize(
    ("bench", "metrics"),
    [
        ("sampler", {"generate.seconds", "generate.tokens_per_s"}),
        (
            "train",
            {"train.seconds", "train.ref_seconds", "train.policy_seconds", "train.tokens_per_s"},
        ),
        (
            "ragged",
            {"ragged.train_padded_seconds", "ragged.train_packed_seconds"}
            | {
                f"ragged.sampler_{how}_{lengths}_tokens_per_s"
                for how in ("refilled", "in_step")
                for lengths in ("equal", "geometric")
            },
        ),
    ],
)
def test_a_benchmark_leaves_one_record_a_figure(bench, metrics, tmp_path):
    arguments = ["bench", bench, "--out", str(tmp_path), "--dtypes", "float32", *SMALL]
    assert main(arguments) == 0
    lines = (tmp_path / f"bench_{bench}.jsonl").read_text().splitlines()
    records = {record["metric"]: record for record in map(json.loads, lines)}
    assert records.keys() == metrics
    for record in records.values():
        assert record["impl"] == "wmrl_jax"
        assert record["min"] > 0 and record["peak_rss_mb"] > 0
        assert len(record["runs"]) == 2
    if bench == "sampler":
        seconds, speed = records["generate.seconds"], records["generate.tokens_per_s"]
        assert speed["max"] == pytest.approx(2 * 2 * 4 / seconds["min"], rel=0.01)


def test_a_peer_gets_the_same_sizes_and_its_figures_stand_beside_ours(tmp_path, capsys):
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    arguments = ["bench", "sampler", "--out", str(tmp_path), "--dtypes", "float32", *SMALL]
    assert main([*arguments, "--peer", f"{sys.executable} {peer}"]) == 0
    figures = json.loads((tmp_path / "bench_sampler.json").read_text())["figures"]
    of_peer = next(f for f in figures if f["impl"] == "peer")
    assert of_peer["median"] == 2.0
    assert "peer" in capsys.readouterr().out


def test_a_peer_that_fails_is_named_with_its_last_words(tmp_path, capsys):
    peer = f"{sys.executable} -c \"raise SystemExit('no such thing')\""
    arguments = ["bench", "sampler", "--out", str(tmp_path), "--dtypes", "float32", *SMALL]
    assert main([*arguments, "--peer", peer]) == 2
    assert "no such thing" in capsys.readouterr().err


def test_a_peer_where_none_is_asked_is_refused(tmp_path, capsys):
    assert main(["bench", "ragged", "--out", str(tmp_path), *SMALL, "--peer", "true"]) == 2
    assert "leave --peer out" in capsys.readouterr().err


def test_figures_of_several_rounds_are_pooled():
    record = {"impl": "a", "metric": "m", "dtype": "d"}
    figures = bench_model.pooled(
        [{**record, "runs": [1.0, 2.0], "peak_rss_mb": 5.0},
         {**record, "runs": [9.0], "peak_rss_mb": 4.0}]
    )  # fmt: skip
    assert figures == [{**record, "median": 2.0, "peak_rss_mb": 5.0}]
