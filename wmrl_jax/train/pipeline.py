"""The stages behind the commands: warm start, evaluation, training, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from wmrl_jax.errors import UserError, did_you_mean
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.train import evaluation_io, fused
from wmrl_jax.train.checkpoint import Checkpoints
from wmrl_jax.train.completion_logprobs import make_reference
from wmrl_jax.train.config import Config
from wmrl_jax.train.data import task_iterator
from wmrl_jax.train.evaluate import Evaluation, compare, summarise
from wmrl_jax.train.execution import execute_completions, open_queue
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.ledger import CompileClock, Ledger
from wmrl_jax.train.loop import Parts, resume
from wmrl_jax.train.loop import train as training_loop
from wmrl_jax.train.mesh import check_divisible
from wmrl_jax.train.metrics import write_versions
from wmrl_jax.train.optimizer import make_optimizer
from wmrl_jax.train.policy import Policy, make_policy
from wmrl_jax.train.programs import draw_programs
from wmrl_jax.train.progress import Progress
from wmrl_jax.train.records import RunLog
from wmrl_jax.train.report import write_report
from wmrl_jax.train.run_folder import claim_run_folder, load_run_config
from wmrl_jax.train.setting import Setting, TaskSet
from wmrl_jax.train.step import init_state, make_train_step
from wmrl_jax.train.warm_start import FIDELITY, Stages, WarmStart
from wmrl_jax.types import TrainState
from wmrl_jax.world_model import fidelity as fidelity_report
from wmrl_jax.world_model.readout import make_scorer

OUTCOMES = "outcomes.sqlite"


def run(config: Config, console: Console | None = None) -> Path:
    """The whole job; what an earlier call finished is not done again. Returns the run's folder.

    Raises:
      UserError: something that the user can mend.
      KeyboardInterrupt: the run was interrupted; the same call goes on.
    """
    console = console or Console(stderr=True)
    folder, stages = _open_run(config, console)
    start = stages.all()
    before = _evaluate_once(config, start, start.agent, folder / "eval_before.json", console)
    state = _train(config, start, folder, console)
    trained = _policy(config, start).full(state.params)
    after = _evaluate_once(config, start, trained, folder / "eval_after.json", console)
    if start.world_model is not None:
        write_whole(folder / FIDELITY, (start.folder / FIDELITY).read_text(encoding="utf-8"))
    console.print(evaluation_io.evaluation_table(after, title="The trained agent, executed"))
    console.print(evaluation_io.comparison_table(compare(before, after)))
    console.print(f"report: {write_report(folder)}")
    return folder


def train(config: Config, console: Console | None = None) -> Path:
    """Warm start (where it is not there yet) and the updates; no evaluation."""
    console = console or Console(stderr=True)
    folder, stages = _open_run(config, console)
    _train(config, stages.all(), folder, console)
    return folder


def corpus(config: Config) -> Path:
    """Writes the corpus; returns the warm start's folder."""
    stages = _stages(config)
    stages.corpus()
    return stages.folder


def sft(config: Config) -> Path:
    """Warm-starts the agent; returns the warm start's folder."""
    stages = _stages(config)
    stages.agent()
    return stages.folder


def cases(config: Config) -> Path:
    """Executes programs of the corpus; returns the warm start's folder."""
    stages = _stages(config)
    stages.cases()
    return stages.folder


def tune(config: Config) -> Path:
    """Tunes the world model; returns the warm start's folder."""
    stages = _stages(config)
    stages.world_model()
    return stages.folder


def fidelity(run_folder: Path) -> None:
    """Prints how far the world model of a run agrees with execution on held-out cases."""
    config = load_run_config(run_folder)
    print(fidelity_report.table(_stages(config).fidelity()))


def evaluate(
    run_folder: Path, *, tasks: Sequence[str] | None = None, samples: int | None = None
) -> Evaluation:
    """Executes fresh programs of a run's newest checkpoint; writes eval.json and eval.csv there.

    Args:
      run_folder: the run's folder.
      tasks: names; None: all of the run's.
      samples: programs a task; None: as configured.
    """
    config = load_run_config(run_folder)
    if samples is not None:
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, samples=samples))
    console = Console()
    stages = _stages(config, Console(stderr=True))
    for name in tasks or ():
        if name not in stages.tasks.names:
            raise UserError(
                f"{name!r} is no task of this run{did_you_mean(name, stages.tasks.names)}"
            )
    start = WarmStart(stages.folder, stages.setting(), stages.agent(), None, {})
    state = _restore(config, start, run_folder)
    trained = _policy(config, start).full(state.params)
    evaluation = _evaluate(config, start.setting, trained, run_folder, tasks, console)
    evaluation_io.write_json(evaluation, run_folder / "eval.json")
    evaluation_io.write_csv(evaluation, run_folder / "eval.csv")
    console.print(evaluation_io.evaluation_table(evaluation))
    return evaluation


def _open_run(config: Config, console: Console) -> tuple[Path, Stages]:
    """The run's folder, claimed once the tasks were seen to be sound, and its stages."""
    tasks = TaskSet(config)
    folder = claim_run_folder(config)
    write_versions(folder)
    return folder, Stages(config, tasks, console)


def _stages(config: Config, console: Console | None = None) -> Stages:
    return Stages(config, TaskSet(config), console or Console(stderr=True))


def _train(config: Config, start: WarmStart, folder: Path, console: Console) -> TrainState:
    setting = start.setting
    check_divisible(config.train.groups, config.train.microbatches, setting.mesh)
    optimizer = make_optimizer(config.train)
    policy = _policy(config, start)
    state = init_state(policy.initial, optimizer, config, setting.key("training"), setting.mesh)
    names = setting.tasks.train
    prompts, lengths = setting.prompt_arrays(names)
    ledger = Ledger()
    ledger.load(start.ledger)
    with ExitStack() as stack:
        queue = stack.enter_context(open_queue(config, setting.tasks.tasks, folder / OUTCOMES))
        compiles = stack.enter_context(CompileClock(ledger))
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep, console.print)
        stack.callback(checkpoints.close)
        progress = stack.enter_context(
            Progress("training", config.train.steps, start=checkpoints.latest or 0, console=console)
        )
        run_log = RunLog(folder, ledger, queue, progress, compiles)
        stack.callback(run_log.close)
        data = task_iterator(len(names), config.train.groups, config.seed)
        train_step = make_train_step(setting.model, optimizer, config, setting.mesh, policy)
        reference = make_reference(setting.model, config, setting.mesh)
        score = _score_fn(config, start)
        if config.train.fused:
            state, waiting = resume(config, queue, state, data, checkpoints, run_log, ledger)
            host = fused.AnchorHost(config, queue, setting.tokenizer, names, ledger, waiting)
            step_fn = fused.make_fused_step(
                config,
                setting.mesh,
                host,
                sample=_sample_fn(config, setting, policy),
                score=score,
                reference=reference,
                train_step=train_step,
            )
            frozen = fused.Frozen(start.world_model, start.agent if reference else None)
            return fused.train(
                config, step_fn, host, frozen, (prompts, lengths), setting.mesh,
                state, data, checkpoints, run_log, ledger,
            )  # fmt: skip
        parts = Parts(
            task_names=names,
            prompts=prompts,
            prompt_lengths=lengths,
            tokenizer=setting.tokenizer,
            sample=_sample_fn(config, setting, policy),
            score=score and partial(score, start.world_model),
            reference=reference and partial(reference, start.agent),
            train_step=train_step,
            queue=queue,
            mesh=setting.mesh,
        )
        return training_loop(config, parts, state, data, checkpoints, run_log, ledger)


def _restore(config: Config, start: WarmStart, folder: Path) -> TrainState:
    """The newest readable state of a run."""
    setting = start.setting
    like = init_state(
        _policy(config, start).initial,
        make_optimizer(config.train),
        config,
        setting.key("training"),
        setting.mesh,
    )
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    state = checkpoints.restore_state(like)
    checkpoints.close()
    if state is None:
        raise UserError(f"{folder} has no checkpoint yet; train first with `wmrl run`")
    return state


def _policy(config: Config, start: WarmStart) -> Policy:
    return make_policy(config.lora, start.agent, start.setting.key("adapters"))


def _sample_fn(config: Config, setting: Setting, policy: Policy) -> Any:
    drawing = dict(
        temperature=config.sampler.temperature,
        top_k=config.sampler.top_k,
        top_p=config.sampler.top_p,
    )
    return lambda params, prompts, lengths, key: setting.sampler(
        policy.full(params), prompts, lengths, key, **drawing
    )


def _score_fn(config: Config, start: WarmStart) -> Any:
    if start.world_model is None:
        return None
    score = make_scorer(
        start.setting.model,
        start.setting.tokenizer,
        config.world_model.quality_levels,
        mesh=start.setting.mesh,
    )
    return lambda world_model, rollouts: score(world_model, rollouts.tokens, rollouts.lengths).score


def _evaluate_once(
    config: Config, start: WarmStart, params: Any, path: Path, console: Console
) -> Evaluation:
    """The evaluation behind `path`, made now unless the file is there."""
    if not path.exists():
        evaluation = _evaluate(config, start.setting, params, path.parent, None, console)
        evaluation_io.write_csv(evaluation, path.with_suffix(".csv"))
        evaluation_io.write_json(evaluation, path)
    return evaluation_io.load_json(path)


def _evaluate(
    config: Config,
    setting: Setting,
    params: Any,
    folder: Path,
    names: Sequence[str] | None,
    console: Console,
) -> Evaluation:
    chosen = list(names or setting.tasks.names)
    total = len(chosen) * config.eval.samples
    with (
        open_queue(config, setting.tasks.tasks, folder / OUTCOMES) as queue,
        Progress("evaluation", total, console=console) as progress,
    ):
        records = evaluate_policy(config, setting, params, chosen, queue, progress)
    return summarise(records, bootstrap=config.eval.bootstrap, seed=config.seed)


def evaluate_policy(
    config: Config,
    setting: Setting,
    params: Any,
    names: Sequence[str],
    queue: SandboxQueue,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Samples programs of a policy, executes all of them, and returns the records of `evaluate`.

    The noise depends on the configured seed alone, so two policies are compared on the same draws.
    """
    key = setting.key("evaluation")
    drawn = draw_programs(setting, params, names, config.eval.samples, key, config.eval.temperature)
    outcomes = execute_completions(queue, [(d.task, d.completion) for d in drawn], progress.update)
    return [
        {
            **d._asdict(),
            "split": setting.tasks.split_of(d.task),
            **{k: v for k, v in outcome._asdict().items() if k != "feedback"},
        }
        for d, outcome in zip(drawn, outcomes, strict=True)
    ]
