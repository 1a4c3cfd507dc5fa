"""The progress display says how far a run is, on a terminal and in a log."""

import io

from rich.console import Console

from wmrl_jax.train.progress import Progress, duration


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def display(
    clock: Clock, total: int = 60, *, terminal: bool = False
) -> tuple[Progress, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    return Progress("train", total, console=console, clock=clock), text


def test_groups_of_an_earlier_process_are_counted() -> None:
    progress, text = display(Clock())

    progress.count(executed=10, predicted=70)
    progress.step(11, reward=0.5, executed=1, predicted=7, in_flight=0)

    assert "executed / predicted 11 / 77" in text.getvalue()


def test_a_plain_line_shows_step_reward_groups_anchors_and_the_time_left() -> None:
    clock = Clock()
    progress, text = display(clock)

    progress.step(1, reward=0.25, executed=1, predicted=7, in_flight=2)
    clock.now += 10.0
    progress.step(2, reward=0.5, executed=0, predicted=7, in_flight=3)

    assert text.getvalue().splitlines() == [
        "train 1/60  reward 0.250  executed / predicted 1 / 7  anchors in flight 2",
        "train 2/60  reward 0.500  executed / predicted 1 / 14  anchors in flight 3  left 9:40",
    ]


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    clock = Clock()
    progress, text = display(clock, total=8)

    for done in range(1, 9):
        progress.update(done)
        clock.now += 2.0

    shown = [line.split()[1] for line in text.getvalue().splitlines()]
    assert shown == ["1/8", "4/8", "7/8", "8/8"]


def test_an_unknown_reward_is_shown_as_unknown() -> None:
    progress, text = display(Clock())

    progress.step(1, reward=float("nan"), executed=0, predicted=0, in_flight=8)

    assert "reward nan" in text.getvalue()


def test_the_time_left_follows_the_recent_pace_and_not_the_slow_start() -> None:
    clock = Clock()
    progress, _ = display(clock, total=100)

    progress.update(1)
    clock.now += 1000.0
    for done in range(2, 51):
        progress.update(done)
        clock.now += 2.0

    assert progress.seconds_left() == 2.0 * 50


def test_a_run_that_resumes_in_its_middle_has_an_honest_pace() -> None:
    clock = Clock()
    progress, _ = display(clock, total=60)

    progress.update(31)
    assert progress.seconds_left() is None
    clock.now += 3.0
    progress.update(32)

    assert progress.seconds_left() == 3.0 * 28


def test_a_terminal_gets_a_live_line_with_the_same_words() -> None:
    clock = Clock()
    progress, text = display(clock, terminal=True)

    with progress:
        progress.step(1, reward=0.25, executed=1, predicted=7, in_flight=2)

    shown = text.getvalue()
    assert "1/60" in shown
    assert "executed / predicted 1 / 7" in shown
    assert "\x1b[" in shown


def test_a_phase_may_say_late_how_many_steps_it_has() -> None:
    clock = Clock()
    progress, text = display(clock, total=1)

    progress.of_total(1, 40, 2.5)
    clock.now += 2.0
    progress.of_total(40, 40, 0.5)

    assert text.getvalue().splitlines() == [
        "train 1/40  loss 2.500",
        "train 40/40  loss 0.500",
    ]


def test_square_brackets_in_a_field_are_text() -> None:
    clock = Clock()
    progress, text = display(clock, terminal=True)

    with progress:
        progress.update(1, {"task": "[red]wine[/red]"})

    assert "[red]wine[/red]" in text.getvalue()


def test_durations_are_read_as_a_clock_shows_them() -> None:
    assert [duration(s) for s in (5, 65, 3600, 3725.4)] == ["0:05", "1:05", "1:00:00", "1:02:05"]
