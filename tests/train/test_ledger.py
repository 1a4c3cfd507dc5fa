"""The ledger: every second has one purpose, and the saving is what its definition says."""

import json
import math
import threading

import jax
import jax.numpy as jnp
import pytest

from wmrl_jax.train.ledger import PURPOSES, CompileClock, Ledger


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_go_to_the_purpose_of_their_block() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    with ledger.time("sampling"):
        clock.now += 2.0
    with ledger.time("training"):
        clock.now += 3.0
    with ledger.time("sampling"):
        clock.now += 0.5

    seconds = ledger.summary()["seconds"]
    assert (seconds["sampling"], seconds["training"]) == (2.5, 3.0)
    assert sum(seconds.values()) == 5.5


def test_a_purpose_inside_another_is_not_counted_twice() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    with ledger.time("evaluation"):
        clock.now += 1.0
        with ledger.time("sampling"):
            clock.now += 4.0
            with ledger.time("waiting"):
                clock.now += 8.0
        clock.now += 1.0

    seconds = ledger.summary()["seconds"]
    assert (seconds["evaluation"], seconds["sampling"], seconds["waiting"]) == (2.0, 4.0, 8.0)


def test_compiling_is_taken_out_of_what_it_interrupts() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    with ledger.time("evaluation"), ledger.time("sampling"):
        clock.now += 5.0
        ledger.count_compilation(3.0)

    seconds = ledger.summary()["seconds"]
    assert (seconds["compiling"], seconds["sampling"], seconds["evaluation"]) == (3.0, 2.0, 0.0)


def test_a_block_that_raises_is_still_counted() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    with pytest.raises(RuntimeError), ledger.time("scoring"):
        clock.now += 2.0
        raise RuntimeError

    assert ledger.summary()["seconds"]["scoring"] == 2.0


def test_blocks_of_other_threads_do_not_nest_in_this_one() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    def elsewhere() -> None:
        with ledger.time("evaluation"):
            clock.now += 2.0

    with ledger.time("waiting"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    seconds = ledger.summary()["seconds"]
    assert (seconds["waiting"], seconds["evaluation"]) == (2.0, 2.0)


def test_a_wrong_purpose_or_role_names_the_right_one() -> None:
    with pytest.raises(ValueError, match="'sampling'"), Ledger().time("samplin"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="'evaluation'"):
        Ledger().count_execution("evaluations", 1.0)  # type: ignore[arg-type]


def test_the_saving_is_the_mean_executed_group_times_the_predicted_groups() -> None:
    ledger = Ledger()
    ledger.count_groups(executed=[6.0, 10.0], predicted=14)
    ledger.count_groups(executed=[2.0], predicted=7)
    ledger.count_execution("evaluation", 1000.0)

    summary = ledger.summary()

    assert summary["slot_seconds_per_group"] == 6.0
    assert summary["slot_seconds_saved"] == 6.0 * 21
    assert summary["slot_seconds_every_group"] == 6.0 * 24
    assert summary["predicted_share"] == 21 / 24
    assert summary["slot_seconds"] == {
        "training": 18.0,
        "world_model": 0.0,
        "evaluation": 1000.0,
    }


def test_nothing_executed_leaves_the_saving_unknown() -> None:
    ledger = Ledger()
    ledger.count_groups(predicted=8)

    summary = ledger.summary()

    assert math.isnan(summary["slot_seconds_saved"])
    assert summary["predicted_share"] == 1.0
    assert math.isnan(Ledger().summary()["predicted_share"])


def test_the_state_comes_back_exactly_through_json() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for purpose in PURPOSES:
        with ledger.time(purpose):
            clock.now += 0.1
    ledger.count_groups(executed=[0.1, 0.2], predicted=3)
    ledger.count_execution("world_model", 1 / 3)

    restored = Ledger(clock)
    restored.load(json.loads(json.dumps(ledger.state())))

    assert restored.state() == ledger.state()
    assert restored.summary() == ledger.summary()


def test_a_state_is_a_copy() -> None:
    ledger = Ledger()
    state = ledger.state()

    ledger.count_groups(executed=[1.0])

    assert state["groups"]["executed"] == 0


def test_each_new_program_is_counted_once_and_its_seconds_are_booked() -> None:
    ledger = Ledger()
    double = jax.jit(lambda x: x * 2.0)
    first, longer = jnp.ones(3), jnp.ones(4)

    with CompileClock(ledger) as compiles, ledger.time("training"):
        jax.block_until_ready(double(first))
        after_one = compiles.count
        jax.block_until_ready(double(first))
        after_repeat = compiles.count
        jax.block_until_ready(double(longer))

    assert (after_one, after_repeat, compiles.count) == (1, 1, 2)
    seconds = ledger.summary()["seconds"]
    assert seconds["compiling"] > 0
    assert seconds["training"] >= 0


def test_compilations_outside_the_block_are_not_counted() -> None:
    compiles = CompileClock(Ledger())
    with compiles:
        pass

    jax.block_until_ready(jax.jit(lambda x: x * 3.0)(jnp.ones(5)))

    assert compiles.count == 0
