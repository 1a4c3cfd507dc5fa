"""The loop: repeatable to the bit across an interruption, anchors late within bounds, none lost."""

import dataclasses
import hashlib
import json
import os
import signal
import threading
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from wmrl_jax.models.model import build_model
from wmrl_jax.rollout.sampler import make_sampler
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.train.checkpoint import Checkpoints
from wmrl_jax.train.config import Config, ModelConfig, TrainConfig
from wmrl_jax.train.data import task_iterator
from wmrl_jax.train.ledger import CompileClock, Ledger
from wmrl_jax.train.loop import Parts, train
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


def make_config(**anchors):
    config = Config(
        model=ModelConfig(
            layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16,
            prompt_tokens=PROMPT, new_tokens=NEW,
        ),
        train=TrainConfig(steps=STEPS, groups=4, group_size=4, logprob_chunk=NEW),
    )  # fmt: skip
    return dataclasses.replace(
        config,
        anchors=dataclasses.replace(config.anchors, fraction=0.25, **anchors),
        corrections=dataclasses.replace(config.corrections, capacity=32, min_pairs=8),
        checkpoint=dataclasses.replace(config.checkpoint, every=2),
    )


class Compiled(NamedTuple):
    model: object
    sampler: object
    optimizer: object
    steps: dict  # by anchors.wait


@pytest.fixture(scope="module")
def compiled():
    config = make_config()
    model = build_model(config.model, 24)
    sampler = make_sampler(
        model, group_size=4, prompt_tokens=PROMPT, new_tokens=NEW, eos_id=EOS, pad_id=PAD
    )
    optimizer = optax.adamw(1e-2)
    mesh = make_mesh(jax.devices()[:1])
    steps = {
        wait: make_train_step(model, optimizer, make_config(wait=wait), mesh)
        for wait in (True, False)
    }
    return Compiled(model, sampler, optimizer, steps)


def run(folder, compiled, config, execute=outcome, on_step=lambda step: None):
    """One process's worth of training in `folder`: the state, its metrics and the ledger."""
    mesh = make_mesh(jax.devices()[:1])
    model, sampler, optimizer, steps = compiled
    state = init_state(model.init(jax.random.key(0)), optimizer, config, jax.random.key(1), mesh)
    step = steps[config.anchors.wait]
    ledger = Ledger()
    folder.mkdir(exist_ok=True)

    def observed_step(state, batch):
        on_step(int(state.step))
        return step(state, batch)

    with (
        SandboxQueue(execute, slots=2, retries=0, journal=folder / "outcomes.sqlite") as queue,
        CompileClock(ledger) as compiles,
        Progress("test", STEPS, console=Console(quiet=True)) as progress,
    ):
        checkpoints = Checkpoints(folder / "checkpoints", keep=3)
        run_log = RunLog(folder, ledger, queue, progress, compiles)
        parts = Parts(
            task_names=("a", "b"),
            prompts=np.asarray([[2, 3, 4, 0], [5, 6, 7, 8]], np.int32),
            prompt_lengths=np.asarray([3, 4], np.int32),
            tokenizer=IdTokenizer(),
            sample=sampler,
            score=lambda r: (r.tokens.sum(-1) % 17) / 17.0,
            reference=None,
            train_step=observed_step,
            queue=queue,
            mesh=mesh,
        )
        data = task_iterator(2, config.train.groups, seed=3)
        try:
            state = train(config, parts, state, data, checkpoints, run_log, ledger)
        finally:
            run_log.close()
            checkpoints.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return state, lines, ledger


def without_times(lines):
    host = ("seconds", "programs_compiled")
    return [{k: v for k, v in line.items() if not k.startswith(host)} for line in lines]


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, compiled):
    config = make_config(wait=True)
    whole, expected, _ = run(tmp_path / "whole", compiled, config)

    def interrupt(step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="after step 3 of 5"):
        run(tmp_path / "parts", compiled, config, on_step=interrupt)
    resumed, lines, _ = run(tmp_path / "parts", compiled, config)
    assert without_times(lines) == without_times(expected)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_steps_after_the_last_checkpoint_are_done_again_and_written_once(tmp_path, compiled):
    config = make_config(wait=True)
    _, expected, _ = run(tmp_path / "whole", compiled, config)

    def crash(step):
        if step == 3:
            raise RuntimeError("the machine failed")

    with pytest.raises(RuntimeError, match="the machine failed"):
        run(tmp_path / "parts", compiled, config, on_step=crash)
    _, lines, _ = run(tmp_path / "parts", compiled, config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert without_times(lines) == without_times(expected)


def test_a_corrupted_newest_checkpoint_is_passed_over(tmp_path, compiled, caplog):
    config = make_config(wait=True)
    whole, _, _ = run(tmp_path, compiled, config)
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda p: p.stat().st_mtime)
    for file in (newest / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    again, _, _ = run(tmp_path, compiled, config)
    assert "cannot be read" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_late_anchors_join_a_later_step_and_survive_a_resume(tmp_path, compiled):
    release = threading.Event()

    def slow(job, slot):
        release.wait(300)
        return outcome(job, slot)

    def open_the_gate(step):
        # Called before the third update, when the anchors of that step were asked for already.
        if step == 2:
            release.set()

    config = make_config(wait=False, max_staleness=4)
    _, lines, ledger = run(tmp_path, compiled, config, execute=slow, on_step=open_the_gate)
    assert [line["anchors_joined"] for line in lines[:2]] == [0, 0]
    assert sum(line["anchors_joined"] for line in lines) >= 2
    assert max(line["staleness"] for line in lines) >= 2
    assert ledger.summary()["groups_predicted"] == STEPS * 3


def test_an_anchor_is_awaited_before_it_becomes_too_stale(tmp_path, compiled):
    def slow(job, slot):
        threading.Event().wait(0.3)
        return outcome(job, slot)

    config = make_config(wait=False, max_staleness=1)
    _, lines, _ = run(tmp_path, compiled, config, execute=slow)
    assert max(line["staleness"] for line in lines) <= 1


def test_a_fault_of_the_sandbox_is_ungraded_and_never_a_reward(tmp_path, compiled):
    def broken(job, slot):
        raise OSError("the sandbox is down")

    config = make_config(wait=True)
    _, lines, _ = run(tmp_path, compiled, config, execute=broken)
    for line in lines:
        assert line["status_unknown"] == 1.0
        assert line["reward_executed"] is None
        assert line["groups_ungraded"] == 1
        assert line["debias_pairs"] == 0
