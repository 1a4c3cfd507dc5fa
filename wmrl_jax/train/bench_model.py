"""`wmrl bench sampler`, `train` and `ragged`: tokens and steps per second, peak memory, peers.

Every measurement runs in a process of its own, so that its peak memory is its own, and leaves one
JSON line per figure. A peer is any command that takes the same options and prints lines of the
same fields; it is started in turns with ours, on the same sizes.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wmrl_jax.errors import UserError
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.metrics import versions
from wmrl_jax.train.workload import BENCHES, IMPL, Workload


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
    if peers and BENCHES[bench] is None:
        raise UserError(f"`wmrl bench {bench}` measures this package alone; leave --peer out")
    console = Console(stderr=True)
    own = [sys.executable, "-m", "wmrl_jax.train.bench_measure", bench]
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
    return [*shlex.split(command), "--bench", BENCHES[bench] or bench, "--dtypes", dtype]


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
