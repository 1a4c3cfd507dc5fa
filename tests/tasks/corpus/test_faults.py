import difflib
from random import Random

import pytest

from wmrl_jax.tasks.corpus.faults import FAULTS, Draft
from wmrl_jax.tasks.corpus.recipes import draw_recipe
from wmrl_jax.tasks.corpus.text import render, write
from wmrl_jax.tasks.corpus.traits import traits_of
from wmrl_jax.tasks.task import Task


def spoilt(suite: dict[str, Task], name: str, n: int = 12) -> list[tuple[str, str]]:
    """Pairs of right and wrong text, over all tasks."""
    pairs = []
    for task in suite.values():
        traits = traits_of(task)
        for seed in range(n):
            rng = Random(seed)
            recipe = draw_recipe(traits, rng)
            lines = write(recipe, traits)
            wrong = FAULTS[name][1](Draft(recipe, lines, traits, rng))
            if wrong:
                pairs.append((render(lines), render(wrong)))
    return pairs


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_made_and_is_local(suite: dict[str, Task], name: str) -> None:
    pairs = spoilt(suite, name)
    assert pairs
    for right, wrong in pairs:
        same = difflib.SequenceMatcher(None, right.splitlines(), wrong.splitlines())
        kept = sum(block.size for block in same.get_matching_blocks())
        assert kept >= len(right.splitlines()) - 8


def test_only_syntax_faults_fail_to_compile(suite: dict[str, Task]) -> None:
    for name in FAULTS:
        for _, wrong in spoilt(suite, name, n=4):
            if name == "syntax":
                with pytest.raises(SyntaxError):
                    compile(wrong, "program.py", "exec")
            else:
                compile(wrong, "program.py", "exec")


def test_a_missing_import_leaves_the_rest_as_it_was(suite: dict[str, Task]) -> None:
    for right, wrong in spoilt(suite, "missing_import", n=3):
        (gone,) = set(right.splitlines()) - set(wrong.splitlines())
        assert "import" in gone


def test_nothing_is_left_unencoded_where_there_is_nothing_to_encode(
    suite: dict[str, Task],
) -> None:
    assert not spoilt({"digits": suite["digits"]}, "no_encoding")
    assert not spoilt({"digits": suite["digits"]}, "no_imputation")
