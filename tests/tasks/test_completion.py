"""Which program a completion means, and what is settled without executing it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_jax.tasks.completion import MAX_PROGRAM_CHARS, extract_program, precheck
from wmrl_jax.types import Outcome

EXTRACTED = {
    "python fence": ("```python\nx = 1\n```", "x = 1\n"),
    "text around": ("Let us see.\n```python\nx = 1\n```\nDone.\n", "x = 1\n"),
    "py and capitals": ("```PY\nx = 1\n```\n", "x = 1\n"),
    "two python fences, the first": ("```python\na\n```\n```python\nb\n```", "a\n"),
    "python before another language": ("```bash\nls\n```\n```python\nx = 1\n```", "x = 1\n"),
    "another language if alone": ("```json\n{}\n```", "{}\n"),
    "bare fence": ("```\nx = 1\n```", "x = 1\n"),
    "closed before unclosed": ("```\na\n```\n```python\nb\n", "a\n"),
    "no end of fence": ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
    "windows line ends": ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
    "a fence inside a line is text": ('```python\nx = "```"\n```', 'x = "```"\n'),
    "an opening inside is text": ("```python\n```python\nx\n```", "```python\nx\n"),
    "empty block": ("```python\n```", ""),
    "no fence": ("x = 1", None),
    "nothing": ("", None),
    "unicode": ("```python\ns = 'é\u2028λ'\n```", "s = 'é\u2028λ'\n"),
}


@pytest.mark.parametrize("name", EXTRACTED)
def test_the_program_is_taken_by_the_published_order(name):
    completion, program = EXTRACTED[name]
    assert extract_program(completion) == program


@given(st.text(alphabet=st.characters(blacklist_characters="`")), st.text())
def test_a_fenced_program_comes_back_as_written(program, after):
    assert extract_program(f"```python\n{program}\n```\n{after}") == f"{program}\n"


@given(st.text(alphabet="`python \n\r=x1'", max_size=80))
def test_no_completion_makes_the_check_fail(completion):
    checked = precheck(completion)
    assert isinstance(checked, str) or checked.reward == 0.0


def test_a_program_that_compiles_is_handed_on_unchanged():
    assert precheck("```python\nimport nowhere\n```") == "import nowhere\n"


@pytest.mark.parametrize("completion", ["", "I would use a forest.", "```python\n\n```"])
def test_no_program_is_malformed(completion):
    outcome = precheck(completion)
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.reward, outcome.seconds) == ("malformed", 0.0, 0.0)


HOSTILE = {
    "syntax": "x = = 1",
    "indentation": "if x:\ny = 1",
    "nul": "x = 1\0",
    "lone surrogate": "x = '\ud800'",
    "brackets": "(" * 60_000,
    "closed brackets": "[" * 5_000 + "]" * 5_000,
    "operators": "x = " + "-" * 60_000 + "1",
    "calls": "x" + "()" * 30_000 + "(",
    "attributes": "x" + ".a" * 30_000 + " =",
    "blocks": "".join(" " * i + "if x:\n" for i in range(120)),
    "giant number": "x = " + "9" * 60_000,
    "return outside": "return 1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_compile_is_a_syntax_error_and_the_process_lives(name):
    outcome = precheck(f"```python\n{HOSTILE[name]}\n```")
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.reward) == ("syntax_error", 0.0)
    assert outcome.exception
    assert len(outcome.feedback) <= 1024


def test_the_line_of_a_syntax_error_is_named():
    outcome = precheck("```python\nx = 1\ny = = 2\n```")
    assert isinstance(outcome, Outcome)
    assert "in line 2" in outcome.feedback
    assert outcome.exception == "SyntaxError"
    assert outcome.position is None
    assert not math.isnan(outcome.reward)


def test_a_program_of_great_length_is_refused_unread():
    outcome = precheck("```python\n" + "x = 1\n" * MAX_PROGRAM_CHARS + "```")
    assert isinstance(outcome, Outcome)
    assert outcome.status == "malformed"


def test_a_warning_of_the_compiler_is_neither_printed_nor_an_error(recwarn):
    assert precheck("```python\nx = '\\d' is 1\n```") == "x = '\\d' is 1\n"
    assert not recwarn.list
