"""The loop: repeatable to the bit across an interruption, anchors late within bounds, none lost."""

import os
import shutil
import signal
import threading

import jax
import numpy as np
import pytest
from loop_runs import STEPS, compile_parts, make_config, outcome, run, without_times

from wmrl_jax.errors import UserError


@pytest.fixture(scope="module")
def compiled():
    return compile_parts()


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


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    tmp_path, compiled, monkeypatch
):
    config = make_config(wait=True)
    whole, _, _ = run(tmp_path / "whole", compiled, config)
    room = iter([10**9, 100])

    def usage(folder):
        return shutil._ntuple_diskusage(10**9, 0, next(room))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", usage)
        with pytest.raises(UserError, match=r"checkpoint of step 4 needs .* MB and .* has 0 MB"):
            run(tmp_path / "parts", compiled, config)
    resumed, lines, _ = run(tmp_path / "parts", compiled, config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


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
