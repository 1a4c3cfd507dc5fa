"""Small runs of the loop, staged or fused, that tests compare: a process's worth in a folder."""

import dataclasses
import hashlib
import json
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from wmrl_jax.models.model import build_model
from wmrl_jax.rollout.sampler import make_sampler
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.train import fused
from wmrl_jax.train.checkpoint import Checkpoints
from wmrl_jax.train.config import Config, ModelConfig, TrainConfig
from wmrl_jax.train.data import task_iterator
from wmrl_jax.train.ledger import CompileClock, Ledger
from wmrl_jax.train.loop import Parts, resume, train
from wmrl_jax.train.mesh import make_mesh
from wmrl_jax.train.progress import Progress
from wmrl_jax.train.records import RunLog
from wmrl_jax.train.step import init_state, make_train_step
from wmrl_jax.types import Outcome

PROMPT, NEW, EOS, PAD = 4, 6, 1, 0
STEPS = 5


class IdTokenizer:
    """Every sequence of ids decodes to a program that names them."""

    eos_id = EOS

    def decode(self, ids):
        return f"```python\nids = {list(ids)}\n```"


def reward_of_text(text):
    return int(hashlib.sha256(text.encode()).hexdigest()[:4], 16) / 0xFFFF


def outcome(job, slot):
    reward = 0.5 + 0.5 * reward_of_text(job.task + job.program)
    return Outcome("valid", reward, 2 * reward - 1, reward, "", None, 0.01)


def make_config(groups=4, **anchors):
    config = Config(
        model=ModelConfig(
            layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16,
            prompt_tokens=PROMPT, new_tokens=NEW,
        ),
        train=TrainConfig(steps=STEPS, groups=groups, group_size=4, logprob_chunk=NEW),
    )  # fmt: skip
    return dataclasses.replace(
        config,
        anchors=dataclasses.replace(config.anchors, fraction=1 / groups, **anchors),
        corrections=dataclasses.replace(config.corrections, capacity=32, min_pairs=8),
        checkpoint=dataclasses.replace(config.checkpoint, every=2),
    )


class Compiled(NamedTuple):
    model: Any
    sampler: Any
    optimizer: Any
    steps: dict[bool, Any]  # by anchors.wait
    mesh: Mesh
    groups: int
    fused: dict[bool, Any]  # by anchors.wait


def compile_parts(devices=1, groups=4):
    config = make_config(groups)
    model = build_model(config.model, 24)
    mesh = make_mesh(jax.devices()[:devices])
    sampler = make_sampler(
        model, group_size=4, prompt_tokens=PROMPT, new_tokens=NEW, eos_id=EOS, pad_id=PAD,
        mesh=None if devices == 1 else mesh,
    )  # fmt: skip
    optimizer = optax.adamw(1e-2)
    steps = {
        wait: make_train_step(model, optimizer, make_config(groups, wait=wait), mesh)
        for wait in (True, False)
    }
    return Compiled(model, sampler, optimizer, steps, mesh, groups, {})


def score(rollouts):
    return (rollouts.tokens.sum(-1) % 17) / 17.0


PROMPTS = np.asarray([[2, 3, 4, 0], [5, 6, 7, 8]], np.int32)
LENGTHS = np.asarray([3, 4], np.int32)
NAMES = ("a", "b")


@contextmanager
def opened(folder, config, execute):
    """Queue, checkpoints, records and ledger of one process's worth of training in `folder`."""
    ledger = Ledger()
    folder.mkdir(exist_ok=True)
    with (
        SandboxQueue(execute, slots=2, retries=0, journal=folder / "outcomes.sqlite") as queue,
        CompileClock(ledger) as compiles,
        Progress("test", STEPS, console=Console(quiet=True)) as progress,
    ):
        checkpoints = Checkpoints(folder / "checkpoints", keep=3)
        run_log = RunLog(folder, ledger, queue, progress, compiles)
        try:
            yield queue, checkpoints, run_log, ledger
        finally:
            run_log.close()
            checkpoints.close()


def first_state(compiled, config):
    params = compiled.model.init(jax.random.key(0))
    return init_state(params, compiled.optimizer, config, jax.random.key(1), compiled.mesh)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder, compiled, config, execute=outcome, on_step=lambda step: None):
    """A staged run: the state, its metrics and the ledger."""
    step = compiled.steps[config.anchors.wait]

    def observed_step(state, batch):
        on_step(int(state.step))
        return step(state, batch)

    with opened(folder, config, execute) as (queue, checkpoints, run_log, ledger):
        parts = Parts(
            task_names=NAMES,
            prompts=PROMPTS,
            prompt_lengths=LENGTHS,
            tokenizer=IdTokenizer(),
            sample=compiled.sampler,
            score=score,
            reference=None,
            train_step=observed_step,
            queue=queue,
            mesh=compiled.mesh,
        )
        data = task_iterator(2, config.train.groups, seed=3)
        state = first_state(compiled, config)
        state = train(config, parts, state, data, checkpoints, run_log, ledger)
    return state, metrics_of(folder), ledger


class Exchange:
    """The other end of a compiled step's callbacks: whichever host is connected."""

    host: fused.AnchorHost

    def submit(self, *args):
        return self.host.submit(*args)

    def collect(self, *args):
        return self.host.collect(*args)


def fused_step(compiled, wait):
    """The exchange and the compiled step that calls it; made once."""
    if wait not in compiled.fused:
        exchange: Any = Exchange()
        compiled.fused[wait] = (
            exchange,
            fused.make_fused_step(
                make_config(wait=wait),
                compiled.mesh,
                exchange,
                sample=compiled.sampler,
                score=lambda world_model, rollouts: score(rollouts) + 0 * world_model,
                reference=None,
                train_step=compiled.steps[wait],
            ),
        )
    return compiled.fused[wait]


def run_fused(folder, compiled, config, execute=outcome):
    """The same by the fused step, which is compiled once for all runs; it comes back, too."""
    with opened(folder, config, execute) as (queue, checkpoints, run_log, ledger):
        data = task_iterator(2, config.train.groups, seed=3)
        state, waiting = resume(
            config, queue, first_state(compiled, config), data, checkpoints, run_log, ledger
        )
        host = fused.AnchorHost(config, queue, IdTokenizer(), NAMES, ledger, waiting)
        exchange, step = fused_step(compiled, config.anchors.wait)
        exchange.host = host
        frozen = fused.Frozen(np.float32(0), None)
        state = fused.train(
            config, step, host, frozen, (PROMPTS, LENGTHS), compiled.mesh,
            state, data, checkpoints, run_log, ledger,
        )  # fmt: skip
    return state, metrics_of(folder), ledger, step


def without_times(lines):
    host = ("seconds", "programs_compiled")
    return [{k: v for k, v in line.items() if not k.startswith(host)} for line in lines]
