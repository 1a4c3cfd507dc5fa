"""The corpus of programs: the warm start of the agent, and the solutions behind leaderboards."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from wmrl_jax.tasks.corpus.faults import FAULTS, Draft
from wmrl_jax.tasks.corpus.recipes import draw_recipe, pick
from wmrl_jax.tasks.corpus.text import render, write
from wmrl_jax.tasks.corpus.traits import Traits, traits_of

if TYPE_CHECKING:
    from wmrl_jax.tasks.task import Task

FAULTY = 0.5
"""Share of the corpus that is spoilt by a fault."""

UNFENCED = 0.01
"""Share of the corpus whose completion lacks the code fence."""

_ATTEMPTS = 20


class CorpusProgram(NamedTuple):
    """One program of the corpus.

    Attributes:
      task: name of the task that it was written for.
      program: the whole text.
      kind: `right`, `unfenced` (a right program whose completion has no code block), or the name of
        its fault in `FAULTS`.
      recipe: its decisions in one line.
    """

    task: str
    program: str
    kind: str
    recipe: str


def completion_text(program: CorpusProgram) -> str:
    """What an agent that writes this program would complete the prompt with."""
    if program.kind == "unfenced":
        return program.program
    return f"```python\n{program.program}```"


def generate(task: Task, n: int, seed: int) -> list[CorpusProgram]:
    """`n` programs for a task, about half of them right.

    The same arguments give the same programs, and a smaller `n` gives the first of them. A
    repetition is drawn again a few times, so that nearly all differ.
    """
    traits = traits_of(task)
    seen: set[str] = set()
    programs = []
    for index in range(n):
        rng = Random(f"{task.name}/{seed}/{index}")
        program = _draw(traits, rng)
        for _ in range(_ATTEMPTS):
            if program.program not in seen:
                break
            program = _draw(traits, rng)
        seen.add(program.program)
        programs.append(program)
    return programs


def _draw(traits: Traits, rng: Random) -> CorpusProgram:
    recipe = draw_recipe(traits, rng)
    lines = write(recipe, traits)
    kind = "unfenced" if rng.random() < UNFENCED else "right"
    if rng.random() < FAULTY:
        kind, lines = _spoil(Draft(recipe, lines, traits, rng))
    return CorpusProgram(traits.task, render(lines), kind, recipe.summary())


def _spoil(draft: Draft) -> tuple[str, list]:
    """Applies a fault that the program allows."""
    weights = {name: weight for name, (weight, _) in FAULTS.items()}
    while True:
        name = pick(draft.rng, weights)
        spoilt = FAULTS[name][1](draft)
        if spoilt and spoilt != draft.lines:
            return name, spoilt
        del weights[name]
