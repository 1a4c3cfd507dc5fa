from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import Model
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.train.mesh import make_mesh
from wmrl_jax.types import STATUSES
from wmrl_jax.world_model.readout import (
    FAILURES,
    WorldModel,
    level_positions,
    make_scorer,
    outcome_count,
    outcome_token_ids,
    predict,
    split_prompts,
    status_probs,
)

LEVELS = 10
G, N, T = 8, 3, 24


@pytest.fixture(scope="module")
def world_model(params: object) -> WorldModel:
    # Untrained weights hardly tell rows apart; larger embeddings do.
    spread = jax.tree.map(lambda x: x, params)
    assert isinstance(spread, dict)
    spread = {**spread, "embed": spread["embed"] * 20}
    return WorldModel(spread, level_positions(LEVELS))


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray]:
    """Groups of one prompt each, the prompts and the completions of many lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(40, 300, (G, N, T)).astype(np.int32)
    prompt_lengths = rng.integers(2, 15, G)
    lengths = np.zeros((G, N), np.int32)
    for g, length in enumerate(prompt_lengths):
        tokens[g, :, :length] = tokens[g, 0, :length]
        lengths[g] = rng.integers(length + 1, T + 1, N)
    return tokens, lengths


def test_the_expected_reward_is_the_sum_by_hand() -> None:
    # malformed, syntax, runtime, timeout, memory, no submission, invalid; then two levels.
    probs = np.asarray([0.1, 0.05, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1, 0.3])

    prediction = predict(jnp.log(probs), jnp.asarray([0.0, 0.5]))

    by_hand = 0.25 * 0.1 + 0.2 * 0.2 + 0.1 * 0.5 + 0.3 * 0.75
    np.testing.assert_allclose(prediction.score, by_hand, rtol=1e-6)
    np.testing.assert_allclose(prediction.probs, probs, rtol=1e-5)
    assert STATUSES[int(prediction.status)] == "valid"
    np.testing.assert_allclose(status_probs(prediction.probs)[-1], 0.4, rtol=1e-6)


def test_the_likeliest_failure_is_named() -> None:
    for index, status in enumerate(FAILURES):
        logits = jnp.zeros(len(FAILURES) + 2).at[index].set(9.0)

        assert STATUSES[int(predict(logits, level_positions(2)).status)] == status


def test_scores_equal_those_of_compact_rows_by_the_plain_model(
    model: Model,
    tokenizer: Tokenizer,
    world_model: WorldModel,
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    tokens, lengths = batch
    prediction = make_scorer(model, tokenizer, LEVELS, microbatch=6)(world_model, *batch)

    ids = np.asarray(tokenizer.outcome_ids[: outcome_count(LEVELS)])
    unembedding = model.unembedding(world_model.params)[:, ids]
    rows = np.zeros((G, N, T + 1), np.int32)
    for g, n in np.ndindex(G, N):
        length = lengths[g, n]
        rows[g, n, : length + 1] = [*tokens[g, n, :length], tokenizer.outcome_id]
    hidden = jax.jit(model.hidden)(world_model.params, jnp.asarray(rows.reshape(G * N, -1)))
    for index, (g, n) in enumerate(np.ndindex(G, N)):
        expected = jax.nn.softmax(hidden[index, lengths[g, n]] @ unembedding)
        np.testing.assert_allclose(prediction.probs[g, n], expected, atol=2e-5)
    assert np.ptp(np.asarray(prediction.score)) > 0.01


def test_padding_and_order_have_no_influence(
    model: Model,
    tokenizer: Tokenizer,
    world_model: WorldModel,
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    tokens, lengths = batch
    score = make_scorer(model, tokenizer, LEVELS, microbatch=7)
    expected = score(world_model, tokens, lengths)

    junk = np.random.default_rng(1).integers(0, 300, tokens.shape)
    noisy = np.where(np.arange(T) < lengths[..., None], tokens, junk)
    groups, rows = np.random.default_rng(2).permutation(G), np.asarray([2, 0, 1])
    mixed = score(world_model, noisy[groups][:, rows], lengths[groups][:, rows])
    wider = score(world_model, np.pad(noisy, ((0, 0), (0, 0), (0, 11))), lengths)

    want = np.asarray(expected.score)
    np.testing.assert_allclose(mixed.score, want[groups][:, rows], atol=1e-5)
    np.testing.assert_allclose(wider.score, want, atol=1e-5)


def test_a_place_without_a_row_is_ungraded_and_leaves_its_group_alone(
    model: Model,
    tokenizer: Tokenizer,
    world_model: WorldModel,
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    tokens, lengths = batch
    score = make_scorer(model, tokenizer, LEVELS)
    full = score(world_model, tokens, lengths)
    gaps = lengths.copy()
    gaps[0, 0], gaps[3] = 0, 0

    prediction = score(world_model, tokens, gaps)

    absent = gaps == 0
    assert np.isnan(np.asarray(prediction.score)[absent]).all()
    assert np.isnan(np.asarray(prediction.probs)[absent]).all()
    assert (np.asarray(prediction.status)[absent] == STATUSES.index("unknown")).all()
    np.testing.assert_allclose(
        np.asarray(prediction.score)[~absent], np.asarray(full.score)[~absent], atol=1e-5
    )


def test_eight_devices_score_as_one_does(
    model: Model,
    tokenizer: Tokenizer,
    world_model: WorldModel,
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    one = make_scorer(model, tokenizer, LEVELS)(world_model, *batch)
    many = make_scorer(model, tokenizer, LEVELS, mesh=make_mesh())(world_model, *batch)

    np.testing.assert_allclose(many.score, one.score, atol=1e-5)
    np.testing.assert_array_equal(many.status, one.status)


def test_the_prompt_of_a_group_is_found_in_its_rows() -> None:
    tokens = jnp.asarray([[[1, 2, 3, 9, 0, 0], [1, 2, 4, 4, 4, 0], [7, 7, 7, 7, 7, 7]]])

    rows = split_prompts(tokens, jnp.asarray([[4, 5, 0]]))

    assert rows.prompt_lengths.tolist() == [2]
    assert rows.prompts[0, :2].tolist() == [1, 2]
    assert rows.lengths.tolist() == [[2, 3, 0]]
    assert rows.completions[0, 0, :2].tolist() == [3, 9]
    assert rows.completions[0, 1, :3].tolist() == [4, 4, 4]


def test_outcomes_have_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    ids = outcome_token_ids(tokenizer, LEVELS)

    assert len(set(ids.tolist())) == 7 + LEVELS
    assert tokenizer.outcome_id not in ids


@pytest.mark.parametrize("levels", [1, 26])
def test_levels_without_a_token_are_refused(tokenizer: Tokenizer, levels: int) -> None:
    few = replace(tokenizer, outcome_ids=tokenizer.outcome_ids[:32])

    with pytest.raises(UserError, match=f"quality_levels is {levels}; .* 2 to 25 levels"):
        outcome_token_ids(few, levels)
