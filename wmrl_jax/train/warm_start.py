"""The warm start: corpus, tokenizer, agent, executed cases, world model and its fidelity.

Each is made once in a folder that is named by a digest of what it depends on, so that runs which
differ in the training only (the arms of a comparison, say) start from the same weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from wmrl_jax.errors import UserError
from wmrl_jax.models.pretrained import Pretrained, load_pretrained, open_pretrained
from wmrl_jax.models.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from wmrl_jax.tasks.corpus.generate import completion_text, generate
from wmrl_jax.train.checkpoint import load_params, save_params
from wmrl_jax.train.config import Config
from wmrl_jax.train.execution import execute_completions, open_queue
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.ledger import CompileClock, Ledger
from wmrl_jax.train.mesh import replicated
from wmrl_jax.train.programs import draw_programs
from wmrl_jax.train.progress import Progress
from wmrl_jax.train.setting import Setting, TaskSet
from wmrl_jax.train.sft import sft
from wmrl_jax.types import Outcome
from wmrl_jax.world_model.cases import Case, case_rows, load_cases, make_cases, save_cases
from wmrl_jax.world_model.fidelity import measure, save_report
from wmrl_jax.world_model.readout import WorldModel, level_positions
from wmrl_jax.world_model.tune import predict_rows, tune

CORPUS, TOKENIZER, AGENT = "corpus.jsonl", "tokenizer", "agent"
CASES, WORLD_MODEL, FIDELITY = "cases.jsonl", "world_model", "fidelity.json"


class WarmStart(NamedTuple):
    """What a run starts from.

    Attributes:
      folder: where it lies.
      setting: tokenizer, model, compiled functions.
      agent: the warm-started parameters.
      world_model: tuned on executed cases; None where the run's reward is execution alone.
      ledger: seconds and slot-seconds that it took when it was made, as `Ledger.state`.
    """

    folder: Path
    setting: Setting
    agent: Any
    world_model: WorldModel | None
    ledger: dict[str, Any]


def warm_start_folder(config: Config, tasks: TaskSet) -> Path:
    """The folder of a configuration's warm start; its name carries a digest of what decides it."""
    parts = (
        config.seed, config.model, config.warm_start, config.world_model, config.sampler,
        config.train.groups, config.train.group_size, tasks.train,
    )  # fmt: skip
    listing = json.dumps(
        [dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts]  # type: ignore[arg-type]
    )
    listing += json.dumps(tasks.prompts)
    return Path(config.out) / f"warm_start-{hashlib.sha256(listing.encode()).hexdigest()[:8]}"


class Stages:
    """The stages of the warm start, each done once: what is on disk is read, not made again."""

    def __init__(self, config: Config, tasks: TaskSet, console: Console) -> None:
        self.config, self.tasks, self.console = config, tasks, console
        self.folder = warm_start_folder(config, tasks)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger()
        self._ledger_file = self.folder / "ledger.json"
        if self._ledger_file.exists():
            self.ledger.load(json.loads(self._ledger_file.read_text()))
        self._setting: Setting | None = None
        self._pretrained: Pretrained | None = None
        if config.model.path is not None:
            self._pretrained = open_pretrained(
                config.model.path, dtype=config.model.dtype, remat=config.model.remat
            )

    def corpus(self) -> list[dict[str, str]]:
        """The corpus as records of task, completion, kind and recipe."""
        path = self.folder / CORPUS
        if not path.exists():
            records = [
                {
                    "task": name,
                    "completion": completion_text(program),
                    "kind": program.kind,
                    "recipe": program.recipe,
                }
                for name in self.tasks.train
                for program in generate(
                    self.tasks.tasks[name],
                    self.config.warm_start.programs_per_task,
                    self.config.seed,
                )
            ]
            write_whole(path, "".join(json.dumps(r) + "\n" for r in records))
            self.console.print(f"corpus: {len(records)} programs for {len(self.tasks.train)} tasks")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def setting(self) -> Setting:
        """Tokenizer (trained on the corpus and the prompts), model and compiled functions."""
        if self._setting is None:
            published = self._pretrained
            if published is None:
                self._setting = Setting(self.config, self.tasks, self._tokenizer())
            else:
                self._setting = Setting(
                    self.config, self.tasks, published.tokenizer(), published.model
                )
        return self._setting

    def _initial(self, setting: Setting) -> Any:
        """The published parameters; None where the agent is trained from scratch."""
        if self._pretrained is None:
            return None
        return load_pretrained(self._pretrained, self._abstract_params(setting))

    def _tokenizer(self) -> Tokenizer:
        folder = self.folder / TOKENIZER
        if not folder.exists():
            texts = [record["completion"] for record in self.corpus()]
            # A prompt stands before hundreds of programs: repeated, its phrases are merged too.
            weight = 1 + self.config.warm_start.programs_per_task // 32
            prompts = [self.tasks.prompts[name] for name in self.tasks.train] * weight
            train_tokenizer(texts + prompts, self.config.model.vocab_size).save(folder)
        return load_tokenizer(folder)

    def agent(self) -> Any:
        """The warm-started parameters, replicated over the devices."""
        setting = self.setting()
        key = setting.key("warm_start")
        folder = self.folder / AGENT
        if not folder.exists():
            pairs = [(self.tasks.prompts[r["task"]], r["completion"]) for r in self.corpus()]
            with self._stage("warm_start"), Progress("warm start", 1, console=self.console) as bar:
                params = sft(
                    setting.model,
                    setting.tokenizer,
                    pairs,
                    self.config.warm_start,
                    key,
                    bar.of_total,
                    prompt_tokens=self.config.model.prompt_tokens,
                    new_tokens=self.config.model.new_tokens,
                    initial=self._initial(setting),
                    mesh=setting.mesh,
                )
            save_params(folder, params)
        return load_params(folder, self._abstract_params(setting))

    def cases(self) -> list[Case]:
        """Programs of the corpus and of the agent, evenly over the tasks, with their outcomes.

        The agent's mistakes are not those of the corpus: a world model that has seen only the
        corpus ranks what the agent writes little better than chance.
        """
        path = self.folder / CASES
        if not path.exists():
            chosen = _evenly(self.corpus(), self.config.world_model.cases, self.config.seed)
            chosen += self._programs_of_agent(self.config.world_model.agent_cases)
            with (
                self._stage("world_model"),
                open_queue(self.config, self.tasks.tasks, self.folder / "outcomes.sqlite") as queue,
                Progress("executing cases", len(chosen), console=self.console) as bar,
            ):
                outcomes = execute_completions(queue, chosen, bar.update)
                self.ledger.count_execution("world_model", sum(o.seconds for o in outcomes))
            executed: list[tuple[str, str, Outcome]] = [
                (task, text, outcome)
                for (task, text), outcome in zip(chosen, outcomes, strict=True)
            ]
            save_cases(path, make_cases(executed, self.config.world_model.heldout_fraction))
        return load_cases(path)

    def _programs_of_agent(self, n: int) -> list[tuple[str, str]]:
        """`n` (task, completion) pairs that the warm-started agent draws as in training."""
        if n == 0:
            return []
        setting = self.setting()
        drawn = draw_programs(
            setting,
            self.agent(),
            self.tasks.train,
            math.ceil(n / len(self.tasks.train)),
            setting.key("cases"),
            self.config.sampler.temperature,
        )
        in_turn = sorted(drawn, key=lambda d: d.sample)
        return [(d.task, d.completion) for d in in_turn[:n]]

    def world_model(self) -> WorldModel:
        """The agent's backbone, tuned on the cases, replicated over the devices."""
        setting = self.setting()
        folder = self.folder / WORLD_MODEL
        if not folder.exists():
            agent, cases = self.agent(), self.cases()
            with (
                self._stage("world_model"),
                Progress("tuning the world model", 1, console=self.console) as bar,
            ):
                tuned = tune(
                    setting.model,
                    setting.tokenizer,
                    agent,
                    cases,
                    self.tasks.prompts,
                    self.config.world_model,
                    setting.key("world_model"),
                    bar.of_total,
                    max_tokens=self.config.model.prompt_tokens + self.config.model.new_tokens,
                )
            save_params(folder, tuned.world_model._asdict())
            write_whole(
                self.folder / "world_model_tuning.json", json.dumps(tuned.history, indent=2)
            )
        like = {
            "params": self._abstract_params(setting),
            "positions": _abstract(
                setting, lambda: level_positions(self.config.world_model.quality_levels)
            ),
        }
        return WorldModel(**load_params(folder, like))

    def fidelity(self) -> dict[str, Any]:
        """What the world model is worth on the held-out cases."""
        path = self.folder / FIDELITY
        if not path.exists():
            setting, world_model = self.setting(), self.world_model()
            heldout = [case for case in self.cases() if case.split == "heldout"]
            if not heldout:
                raise UserError(
                    "no executed case is held out; raise world_model.cases or "
                    "world_model.heldout_fraction"
                )
            rows, heldout = case_rows(setting.tokenizer, self.tasks.prompts, heldout)
            prediction = predict_rows(setting.model, setting.tokenizer, world_model, rows)
            save_report(path, measure(prediction, heldout, seed=self.config.seed))
        return json.loads(path.read_text())

    def all(self) -> WarmStart:
        """Everything that the run's reward needs."""
        agent = self.agent()
        world_model = None
        if self.config.reward.source != "execution":
            world_model = self.world_model()
            self.fidelity()
        return WarmStart(self.folder, self.setting(), agent, world_model, self.ledger.state())

    def _abstract_params(self, setting: Setting) -> Any:
        return _abstract(setting, lambda: setting.model.init(jax.random.key(0)))

    def _stage(self, purpose: str) -> _Stage:
        return _Stage(self.ledger, purpose, self._ledger_file)


class _Stage:
    """Times a stage and keeps the ledger on disk."""

    def __init__(self, ledger: Ledger, purpose: Any, file: Path) -> None:
        self._ledger, self._file = ledger, file
        self._timer, self._compiles = ledger.time(purpose), CompileClock(ledger)

    def __enter__(self) -> None:
        self._compiles.__enter__()
        self._timer.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._timer.__exit__(*error)
        self._compiles.__exit__(*error)
        if error[0] is None:
            write_whole(self._file, json.dumps(self._ledger.state(), indent=2))


def _abstract(setting: Setting, make: Any) -> Any:
    """Shapes, dtypes and the replicated sharding of what `make` returns, without computing it."""
    whole = replicated(setting.mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(make)
    )


def _evenly(corpus: Sequence[dict[str, str]], n: int, seed: int) -> list[tuple[str, str]]:
    """`n` (task, completion) pairs, the same number of each task to within one."""
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[str]] = {}
    for record in corpus:
        by_task.setdefault(record["task"], []).append(record["completion"])
    shuffled = {task: rng.permutation(len(texts)).tolist() for task, texts in by_task.items()}
    chosen: list[tuple[str, str]] = []
    for turn in range(max(map(len, by_task.values()))):
        for task, order in shuffled.items():
            if turn < len(order) and len(chosen) < n:
                chosen.append((task, by_task[task][order[turn]]))
    return chosen
