"""What a run writes down can be read back, rewound, and never holds a step twice."""

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from wmrl_jax.train import metrics
from wmrl_jax.train.metrics import JsonLines, MetricsWriter, read_metrics, write_versions


def events(run_dir: Path) -> list[Event]:
    """Every TensorBoard event, files in the order in which they were written."""
    found = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length (8 bytes), its checksum (4), the event, its checksum (4)
            length = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    return found


def test_a_step_is_one_line_with_sorted_keys_written_at_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5, "anchors": 2})

        text = (tmp_path / "metrics.jsonl").read_text()

    assert text == '{"anchors": 2, "reward": 0.5, "step": 1}\n'


def test_unknown_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            1, {"a": math.nan, "b": np.float32("nan"), "c": math.inf, "d": [1.0, math.nan]}
        )

    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"a": None, "b": None, "c": None, "d": [1.0, None], "step": 1}
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["a"])
    assert math.isnan(record["d"][1])


def test_arrays_and_numpy_numbers_become_plain_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": jnp.float32(0.25), "b": np.int64(3), "c": np.array([1, 2]), "d": "x"})

    assert read_metrics(tmp_path) == [{"a": 0.25, "b": 3, "c": [1, 2], "d": "x", "step": 1}]


def test_rewinding_drops_later_steps_and_returns_the_others(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward": step / 10})
        kept = writer.rewind(2)
        writer.write(3, {"reward": 0.9})

    assert [record["step"] for record in kept] == [1, 2]
    assert [r["reward"] for r in read_metrics(tmp_path)] == [0.1, 0.2, 0.9]


def test_rewinding_leaves_the_kept_lines_as_they_were(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.1 + 0.2, "lost": math.nan, "n": 1})
        before = (tmp_path / "metrics.jsonl").read_text()
        writer.rewind(1)

    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"reward": 0.1, "step": 1}\n{"reward": 0.2, "st')

    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.rewind(5)
        writer.write(2, {"reward": 0.3})
    assert [record["reward"] for record in read_metrics(tmp_path)] == [0.1, 0.3]


def test_a_run_without_metrics_reads_as_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_tensorboard_gets_the_finite_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5, "lost": math.nan, "text": "x", "list": [1.0]})

    scalars = [(v.tag, e.step, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert scalars == [("reward", 1, 0.5)]


def test_tensorboard_is_told_from_which_step_on_a_resumed_run_writes(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5})
        writer.rewind(0)
        writer.write(1, {"reward": 0.25})

    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts[-1] == 1


def test_several_records_may_share_a_step(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "pairs.jsonl")
    for step, value in ((1, 0.1), (1, 0.2), (2, 0.3)):
        file.append({"step": step, "predicted": value})

    kept = file.rewind(1)

    assert [record["predicted"] for record in kept] == [0.1, 0.2]
    assert file.read() == kept


def test_versions_name_python_jax_and_the_devices(tmp_path: Path) -> None:
    write_versions(tmp_path)

    (entry,) = json.loads((tmp_path / "versions.json").read_text())
    assert entry["python"] == ".".join(map(str, sys.version_info[:3]))
    assert entry["packages"]["jax"] == jax.__version__
    assert len(entry["devices"]) == jax.device_count()


def test_versions_get_a_second_entry_only_when_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_versions(tmp_path)
    write_versions(tmp_path)
    monkeypatch.setattr(metrics.platform, "python_version", lambda: "3.99.0")
    write_versions(tmp_path)

    entries = json.loads((tmp_path / "versions.json").read_text())

    assert [entry["python"] for entry in entries][1:] == ["3.99.0"]
