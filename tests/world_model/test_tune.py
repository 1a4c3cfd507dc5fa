import jax
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import Model
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.train.config import WorldModelConfig
from wmrl_jax.types import STATUSES, reward_of
from wmrl_jax.world_model.cases import Case, case_rows, split_of
from wmrl_jax.world_model.readout import level_positions, outcome_rewards
from wmrl_jax.world_model.tune import outcome_targets, predict_rows, tune

PROMPTS = {"a": "task a\n", "b": "task b\n"}
QUALITY = {"good\n": 0.9, "fair\n": 0.5, "bad\n": 0.1}
CONFIG = WorldModelConfig(epochs=20, batch_size=16, learning_rate=4e-3, quality_levels=10)


def synthetic_cases(n: int = 160) -> list[Case]:
    """`oops` is a runtime error; else the word is the quality, which task b turns round."""
    rng = np.random.default_rng(0)
    cases = {}
    while len(cases) < n:
        task, word = str(rng.choice(["a", "b"])), str(rng.choice([*QUALITY, "oops\n"]))
        lines = ["x = 1\n"] * int(rng.integers(0, 9))
        lines.insert(int(rng.integers(0, len(lines) + 1)), word)
        lines.append(f"y = {int(rng.integers(0, 99))}\n")
        text = "".join(lines)
        position = QUALITY.get(word)
        if position is not None and task == "b":
            position = 1.0 - position
        status = "runtime_error" if position is None else "valid"
        cases[task, text] = Case(
            task, text, status, position, position,
            reward_of(status, position), 0.1, split_of(task, text, 0.2),
        )  # fmt: skip
    return list(cases.values())


def test_a_synthetic_rule_is_learnt_and_holds_on_cases_never_seen(
    model: Model, tokenizer: Tokenizer, params: object
) -> None:
    cases = synthetic_cases()
    before = jax.device_get(params)
    steps: list[tuple[int, int, float]] = []

    def on_step(*step: int | float) -> None:
        steps.append(step)  # type: ignore[arg-type]

    tuned = tune(
        model, tokenizer, params, cases, PROMPTS, CONFIG, jax.random.key(0), on_step, patience=20
    )

    rows, heldout = case_rows(tokenizer, PROMPTS, [c for c in cases if c.split == "heldout"])
    prediction = predict_rows(model, tokenizer, tuned.world_model, rows)
    truth = np.asarray([case.reward for case in heldout])
    right = [STATUSES[s] == c.status for s, c in zip(prediction.status, heldout, strict=True)]
    assert np.mean(right) > 0.9
    assert np.abs(prediction.score - truth).mean() < 0.1 < np.abs(truth - truth.mean()).mean()
    assert steps[-1][0] <= steps[-1][1]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))


def test_the_best_epoch_is_kept_and_tuning_ends_when_nothing_gets_better(
    model: Model, tokenizer: Tokenizer, params: object
) -> None:
    cases = synthetic_cases(60)
    hopeless = WorldModelConfig(epochs=9, batch_size=16, learning_rate=1.0, quality_levels=4)

    tuned = tune(model, tokenizer, params, cases, PROMPTS, hopeless, jax.random.key(0), patience=2)

    errors = [entry["validation_rmse"] for entry in tuned.history]
    best = int(np.argmin(errors))
    assert len(errors) == min(9, best + 3)
    rows, kept = case_rows(tokenizer, PROMPTS, [c for c in cases if c.split == "validation"])
    score = predict_rows(model, tokenizer, tuned.world_model, rows).score
    rmse = np.sqrt(np.mean((score - np.asarray([c.reward for c in kept])) ** 2))
    np.testing.assert_allclose(rmse, errors[best], rtol=1e-4)


def test_predictions_come_back_in_the_order_of_the_rows(
    model: Model, tokenizer: Tokenizer, params: object
) -> None:
    tuned = tune(
        model, tokenizer, params, synthetic_cases(60), PROMPTS,
        WorldModelConfig(epochs=1, quality_levels=4), jax.random.key(0),
    )  # fmt: skip
    rows, _ = case_rows(tokenizer, PROMPTS, synthetic_cases(30))

    together = predict_rows(model, tokenizer, tuned.world_model, rows)

    for index in (0, 11, 29):
        alone = predict_rows(model, tokenizer, tuned.world_model, [rows[index]])
        np.testing.assert_allclose(together.score[index], alone.score[0], atol=1e-5)
        np.testing.assert_allclose(together.probs[index], alone.probs[0], atol=1e-5)


def test_a_targets_expected_reward_is_the_cases_reward() -> None:
    cases = synthetic_cases(50)
    edge = [cases[0]._replace(status="valid", position=p, reward=0.5 + p / 2) for p in (0.0, 1.0)]

    targets = outcome_targets([*cases, *edge], 10)

    np.testing.assert_allclose(targets.sum(1), 1.0, rtol=1e-6)
    assert (np.count_nonzero(targets, axis=1) <= 2).all()
    expected = targets @ np.asarray(outcome_rewards(level_positions(10)))
    np.testing.assert_allclose(expected, [c.reward for c in [*cases, *edge]], atol=1e-6)


def test_cases_without_a_validation_split_are_refused(
    model: Model, tokenizer: Tokenizer, params: object
) -> None:
    cases = [case for case in synthetic_cases(60) if case.split != "validation"]

    with pytest.raises(UserError, match=r"to validate on \(0\); raise world_model.cases"):
        tune(model, tokenizer, params, cases, PROMPTS, CONFIG, jax.random.key(0))
