import json
import math
from pathlib import Path

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.types import Outcome, Status
from wmrl_jax.world_model.cases import (
    Case,
    case_rows,
    load_cases,
    make_cases,
    save_cases,
    split_of,
)


def outcome(status: Status, reward: float, position: float | None = None) -> Outcome:
    return Outcome(status, reward, position, position, "text", None, 0.25)


CASE = Case("a", "täxt\n", "valid", 0.5, 0.9, 0.75, 0.25, "train")


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    cases = [CASE, Case("b", "y\n\u2028", "timeout", None, None, 0.1, 20.0, "heldout")]

    save_cases(tmp_path / "new" / "cases.jsonl", cases)

    assert load_cases(tmp_path / "new" / "cases.jsonl") == cases


def test_ungraded_outcomes_and_repeated_texts_make_no_case() -> None:
    cases = make_cases(
        [
            ("a", "x", outcome("valid", 0.6, 0.2)),
            ("a", "x", outcome("valid", 0.6, 0.2)),
            ("b", "x", outcome("no_submission", 0.2)),
            ("a", "y", outcome("unknown", math.nan)),
        ]
    )

    assert [(c.task, c.status, c.position, c.reward) for c in cases] == [
        ("a", "valid", 0.2, 0.6),
        ("b", "no_submission", None, 0.2),
    ]


def test_the_split_is_decided_by_the_text_and_has_the_right_shares() -> None:
    splits = [split_of("task", f"program {n}", 0.2) for n in range(4000)]

    assert splits == [split_of("task", f"program {n}", 0.2) for n in range(4000)]
    assert abs(splits.count("heldout") / 4000 - 0.2) < 0.02
    assert abs(splits.count("validation") / 4000 - 0.1) < 0.015


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"status": "fine"}, "line 2: 'fine' is not the status"),
        ({"status": "unknown"}, "line 2: 'unknown' is not the status"),
        ({"split": "test"}, "line 2: 'test' is none of the splits"),
        ({"position": None}, "line 2: a valid case, and no other, has a position"),
        ({"position": 1.5}, "line 2: a valid case, and no other, has a position"),
        ({"reward": 0.9}, "line 2: reward 0.9 is not what the ladder gives"),
        ({"extra": 1}, "line 2: a case has exactly the fields task, completion"),
    ],
)
def test_a_line_that_is_no_case_is_named(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    path = tmp_path / "cases.jsonl"
    good = CASE._asdict()
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")

    with pytest.raises(UserError, match=sentence):
        load_cases(path)


def test_broken_json_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")

    with pytest.raises(UserError, match="line 1: not JSON"):
        load_cases(tmp_path / "broken.jsonl")
    with pytest.raises(UserError, match="wmrl world-model cases"):
        load_cases(tmp_path / "none.jsonl")


def test_rows_are_prompt_and_completion_encoded_apart_with_an_end(tokenizer: Tokenizer) -> None:
    cases = [CASE, CASE._replace(completion="q" * 99)]

    rows, kept = case_rows(tokenizer, {"a": "task a\n"}, cases, max_tokens=30)

    assert kept == [CASE]
    assert tokenizer.decode(rows[0].prompt) == "task a\n"
    assert tokenizer.decode(rows[0].completion) == "täxt\n"
    assert rows[0].completion[-1] == tokenizer.eos_id


def test_cases_of_a_task_without_a_prompt_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="cases of a, which this run's tasks do not"):
        case_rows(tokenizer, {"b": "task b\n"}, [CASE])
