from wmrl_jax.tasks.corpus import reference_programs
from wmrl_jax.tasks.task import Task


def test_references_are_distinct_right_and_repeatable(suite: dict[str, Task]) -> None:
    for task in suite.values():
        programs = reference_programs(task, 40, 0)
        assert programs == reference_programs(task, 40, 0)
        assert len({p.program for p in programs}) == 40
        assert {p.kind for p in programs} == {"right"}


def test_references_reach_from_a_dummy_to_ensembles(suite: dict[str, Task]) -> None:
    for task in suite.values():
        texts = [p.program for p in reference_programs(task, 100, 0)]
        assert "Dummy" in texts[0]
        assert any("Voting" in text for text in texts)
