"""The `wmrl` command. Thin: it reads arguments, calls one function, and says faults in one line.

Everything heavy is imported inside the command that needs it, so that help comes at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wmrl_jax.errors import UserError

if TYPE_CHECKING:
    from wmrl_jax.train.config import Config

SPOKEN_OS_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
)
"""Faults of the machine that one line says best; any other one keeps its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0: done; 1: the machine failed (a full disk, say); 2: the user can mend it; 130: interrupted.
    """
    args = _parser().parse_args(argv)
    _log_to_stderr()
    try:
        args.command(args)
    except UserError as fault:
        return _say(f"wmrl: {fault}", 2)
    except KeyboardInterrupt as stop:
        return _say(f"wmrl: {str(stop) or 'interrupted'}", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as fault:
        if fault.errno not in SPOKEN_OS_ERRORS:
            raise
        place = f" ({fault.filename})" if fault.filename else ""
        return _say(f"wmrl: {fault.strerror}{place}", 1)
    return 0


def _say(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status


def _log_to_stderr() -> None:
    """This project's words from INFO up, other libraries' from WARNING up.

    Orbax logs every exception that it raises as well, with its traceback, so it is not heard.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("wmrl_jax").setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wmrl",
        description="Train research agents on predicted outcomes, corrected by a few executions.",
        epilog="`wmrl COMMAND --help` says more of each; `wmrl config` lists every setting.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    _with_config(
        commands, "run", _stage("run"), "the whole job: prepare, warm-start, train, evaluate"
    )
    _with_config(
        commands, "train", _stage("train"), "the updates alone, in a run that is warm-started"
    )
    _with_config(
        commands, "corpus", _stage("corpus"), "write the programs that the warm start learns from"
    )
    _with_config(commands, "sft", _stage("sft"), "warm-start the agent on the corpus")

    evaluate = commands.add_parser("eval", help="execute fresh programs of a run's agent")
    _add_run(evaluate)
    evaluate.add_argument("--tasks", nargs="+", metavar="NAME", help="default: all of the run's")
    evaluate.add_argument("--samples", type=_count, metavar="N", help="programs a task")
    evaluate.set_defaults(command=_evaluate)

    tasks = _group(commands, "tasks", "the research tasks")
    listing = tasks.add_parser("list", help="the tasks of a folder, or of the built-in suite")
    listing.add_argument("folder", nargs="?", type=Path, help="default: the built-in suite")
    listing.set_defaults(command=_tasks_list)
    prepare = tasks.add_parser("prepare", help="write the built-in suite's task folders")
    prepare.add_argument("folder", nargs="?", type=Path, help="default: the cache folder")
    prepare.set_defaults(command=_tasks_prepare)
    board = tasks.add_parser("leaderboard", help="execute reference programs, write leaderboards")
    board.add_argument("--tasks", nargs="+", metavar="NAME", help="default: all of the suite")
    board.add_argument("--slots", type=_count, default=2, help="programs at one time (2)")
    board.set_defaults(command=_tasks_leaderboard)

    world_model = _group(commands, "world-model", "preparing the world model")
    _with_config(
        world_model, "cases", _stage("cases"), "execute corpus programs, keep their outcomes"
    )
    _with_config(world_model, "tune", _stage("tune"), "tune the world model on the executed cases")

    fidelity = commands.add_parser("fidelity", help="the world model against held-out executions")
    _add_run(fidelity)
    fidelity.set_defaults(command=_fidelity)

    report = commands.add_parser("report", help="write a run's report.html")
    _add_run(report)
    report.set_defaults(command=_report)

    _add_simulate(commands)

    bench = _group(commands, "bench", "timings against peers")
    method = bench.add_parser("method", help="the corrections, and isotonic regression")
    method.add_argument("--out", type=Path, default=Path("runs/bench"), help="(runs/bench)")
    method.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    method.set_defaults(command=_bench_method)
    for name, text in (
        ("sampler", "tokens sampled a second"),
        ("train", "one GRPO step with KL"),
        ("ragged", "rows of uneven lengths: packed or padded, slots refilled or in step"),
    ):
        _add_bench_model(bench, name, text)

    config = _with_config(
        commands, "config", _config, "print the whole configuration", optional=True
    )
    config.description = "Print the whole configuration as YAML, every field with its meaning."
    return parser


def _group(
    commands: argparse._SubParsersAction, name: str, text: str
) -> argparse._SubParsersAction:
    group = commands.add_parser(name, help=text)
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _with_config(
    commands: argparse._SubParsersAction,
    name: str,
    command: Callable[[argparse.Namespace], None],
    text: str,
    *,
    optional: bool = False,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument(
        "config", type=Path, nargs="?" if optional else None, help="a YAML file of configs/"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="overrides",
        help="override one setting, train.steps=20 for instance; may be repeated",
    )
    parser.set_defaults(command=command)
    return parser


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate", help="check the theory by simulated runs, or plan the anchor fraction"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/simulate"), help="(runs/simulate)")
    parser.add_argument("--runs", type=_count, default=64, help="simulated runs a point (64)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    plan = parser.add_argument_group("planning")
    plan.add_argument("--plan", action="store_true", help="find the cheapest anchor fraction")
    plan.add_argument("--cost-execution", type=_seconds, metavar="TIME", help="of one: 200s, 5m")
    plan.add_argument("--cost-score", type=_seconds, metavar="TIME", help="of one: 0.5s")
    plan.add_argument(
        "--cost-rollout", type=_seconds, metavar="TIME",
        help="of sampling one program and training on it (none)",
    )  # fmt: skip
    plan.add_argument(
        "--bias", type=_share, metavar="B", help="largest error of the mean score (0)"
    )
    plan.add_argument("--shape", metavar="NAME", help="of the bias (saturating)")
    plan.add_argument("--noise", type=_share, metavar="SIGMA", help="deviation of a score (0)")
    plan.add_argument(
        "--from-run", type=Path, metavar="RUN", help="bias and noise by its anchor pairs instead"
    )
    plan.add_argument(
        "--target", type=_share, metavar="SHARE", default=0.05,
        help="share of the way to the best policy that may be left (0.05)",
    )  # fmt: skip
    parser.set_defaults(command=_simulate)


def _add_bench_model(benches: argparse._SubParsersAction, name: str, text: str) -> None:
    from wmrl_jax.train.workload import Workload

    parser = benches.add_parser(name, help=text)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="(runs/bench)")
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="COMMAND", dest="peers",
        help="a program that takes the same options and prints the same figures; may be repeated",
    )  # fmt: skip
    parser.add_argument("--rounds", type=_count, default=1, help="all in turns, so often (1)")
    sizes = parser.add_argument_group("sizes")
    for field in dataclasses.fields(Workload):
        flag = f"--{field.name.replace('_', '-')}"
        kind = _count if field.default else _natural
        sizes.add_argument(flag, type=kind, default=field.default, help=f"({field.default})")
    parser.set_defaults(command=_bench_model, bench=name)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, runs/quickstart say")


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return share


def _seconds(text: str) -> float:
    """A time such as 200s, 5m or 1.5h, in seconds; a bare number is in seconds."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("msh")
    try:
        seconds = float(number) * units[text[len(number) :] or "s"]
    except (KeyError, ValueError):
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 200s, 5m or 0.5h")
    return seconds


def _load(args: argparse.Namespace) -> Config:
    from wmrl_jax.train.config_loader import load_config

    return load_config(args.config, args.overrides)


def _stage(name: str) -> Callable[[argparse.Namespace], None]:
    """The command that calls the pipeline's function of that name with the configuration."""

    def command(args: argparse.Namespace) -> None:
        config = _load(args)  # before the pipeline is imported: a wrong setting is said at once
        from wmrl_jax.train import pipeline
        from wmrl_jax.train.config_check import config_notices

        for notice in config_notices(config):
            print(f"wmrl: {notice}", file=sys.stderr)
        getattr(pipeline, name)(config)

    return command


def _evaluate(args: argparse.Namespace) -> None:
    from wmrl_jax.train import pipeline

    pipeline.evaluate(args.run, tasks=args.tasks, samples=args.samples)


def _fidelity(args: argparse.Namespace) -> None:
    from wmrl_jax.train import pipeline

    pipeline.fidelity(args.run)


def _report(args: argparse.Namespace) -> None:
    from wmrl_jax.train.report import write_report

    print(write_report(args.run))


def _simulate(args: argparse.Namespace) -> None:
    plan_only = {"--bias": args.bias, "--noise": args.noise, "--shape": args.shape}
    given = [name for name, value in plan_only.items() if value is not None]
    if args.plan and (args.cost_execution is None or args.cost_score is None):
        raise UserError("a plan needs --cost-execution and --cost-score, 200s and 0.5s say")
    if args.plan and args.from_run is not None and given:
        raise UserError(f"--from-run measures what {given[0]} says; give one of the two")
    costs = (args.cost_execution, args.cost_score, args.cost_rollout)
    if not args.plan and (given or args.from_run or any(costs)):
        raise UserError("costs, bias, noise and --from-run belong to a plan; add --plan")

    from wmrl_jax.train import simulation_report

    if args.plan:
        simulation_report.plan(
            args.out,
            cost_execution=args.cost_execution,
            cost_score=args.cost_score,
            cost_rollout=args.cost_rollout or 0.0,
            target=args.target,
            bias_shape=args.shape or "saturating",
            bias_size=args.bias or 0.0,
            noise=args.noise or 0.0,
            run=args.from_run,
            runs=args.runs,
            seed=args.seed,
        )
    else:
        simulation_report.simulate(args.out, runs=args.runs, seed=args.seed)


def _bench_method(args: argparse.Namespace) -> None:
    from wmrl_jax.train.bench import bench_method

    bench_method(args.out, quick=args.quick)


def _bench_model(args: argparse.Namespace) -> None:
    from wmrl_jax.train.bench_model import bench_model
    from wmrl_jax.train.workload import Workload

    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)}
    bench_model(
        args.bench,
        args.out,
        workload=Workload(**sizes),
        dtypes=args.dtypes,
        peers=args.peers,
        rounds=args.rounds,
    )


def _tasks_list(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from wmrl_jax.tasks.suite import default_root, materialise
    from wmrl_jax.tasks.task import load_tasks

    if args.folder is None:
        materialise(default_root())
    table = Table("task", "split", "modality", "metric", "direction", "leaderboard")
    for task in load_tasks(args.folder or default_root()).values():
        board = str(len(task.leaderboard))
        table.add_row(task.name, task.split, task.modality, task.metric, task.direction, board)
    Console().print(table)


def _tasks_prepare(args: argparse.Namespace) -> None:
    from wmrl_jax.tasks.suite import default_root, materialise

    for folder in materialise(args.folder or default_root()):
        print(folder)


def _tasks_leaderboard(args: argparse.Namespace) -> None:
    from wmrl_jax.train.leaderboards import make_leaderboards

    for path in make_leaderboards(args.tasks, slots=args.slots):
        print(path)


def _config(args: argparse.Namespace) -> None:
    from wmrl_jax.train.config_loader import config_listing

    print(config_listing(_load(args)), end="")


if __name__ == "__main__":
    sys.exit(main())
