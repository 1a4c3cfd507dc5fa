import itertools

import jax
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.rows import (
    Row,
    bucket_lengths,
    choose_group_size,
    grouped_batches,
    key_seed,
    pad_groups,
)


def rows_of(counts: dict[int, int], rng: np.random.Generator) -> list[Row]:
    """Rows whose prompt is (p,), each completion unique, 1 to 40 tokens long."""
    return [
        Row((prompt,), (index, *range(int(rng.integers(0, 40)))))
        for prompt, count in counts.items()
        for index in range(count)
    ]


def test_padding_puts_each_row_in_its_place() -> None:
    groups = [[Row((1, 2), (3,)), Row((1, 2), (4, 5))], [Row((6,), (7, 8)), Row((6,), (9,))]]

    batch = pad_groups(groups, prompt_tokens=3, new_tokens=2, pad_id=0)

    np.testing.assert_array_equal(batch.prompts, [[1, 2, 0], [6, 0, 0]])
    np.testing.assert_array_equal(batch.prompt_lengths, [2, 1])
    np.testing.assert_array_equal(batch.completions, [[[3, 0], [4, 5]], [[7, 8], [9, 0]]])
    np.testing.assert_array_equal(batch.lengths, [[1, 2], [2, 1]])


def test_a_row_that_does_not_fit_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="completion of 3 does not fit into 4 and 2"):
        pad_groups([[Row((1,), (1, 2, 3))]], prompt_tokens=4, new_tokens=2, pad_id=0)


def test_buckets_waste_as_little_as_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 160, size=30)
        rounded = -(-lengths // 16) * 16

        found = bucket_lengths(lengths.tolist(), count=3)

        def area(buckets: tuple[int, ...], rounded: np.ndarray = rounded) -> int:
            return sum(min(b for b in buckets if b >= length) for length in rounded)

        choices = [
            (*inner, int(rounded.max()))
            for inner in itertools.combinations(sorted(set(rounded.tolist()) - {rounded.max()}), 2)
        ]
        assert area(found) == min(area(choice) for choice in choices)


def test_each_row_comes_up_about_once_per_epoch_in_groups_of_its_prompt() -> None:
    rows = rows_of({1: 40, 2: 33, 3: 7}, np.random.default_rng(1))
    buckets = bucket_lengths([len(row.completion) for row in rows], count=2)
    stream = grouped_batches(rows, buckets, batch_size=8, group_size=4, seed=5)
    epochs = 30

    seen = np.zeros(len(rows), int)
    for indices, width in itertools.islice(stream, epochs * len(rows) // 8):
        assert indices.shape == (2, 4)
        for group in indices:
            assert len({rows[i].prompt for i in group}) == 1
            assert max(len(rows[i].completion) for i in group) <= width
        np.add.at(seen, indices.ravel(), 1)

    # A row may still wait, or may have come up while rows of other queues waited.
    assert seen.min() >= epochs - 4
    assert seen.max() <= epochs + 4


def test_the_batches_depend_on_the_seed_alone() -> None:
    rows = rows_of({1: 20, 2: 20}, np.random.default_rng(2))

    def first(seed: int) -> list[list[int]]:
        stream = grouped_batches(rows, (48,), batch_size=4, group_size=2, seed=seed)
        return [indices.ravel().tolist() for indices, _ in itertools.islice(stream, 12)]

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_texts_with_prompts_of_their_own_are_not_grouped() -> None:
    alone = [Row((i,), (1,)) for i in range(64)]
    together = [Row((i % 2,), (1,)) for i in range(64)]

    assert choose_group_size(alone, 32) == 1
    assert choose_group_size(together, 32) == 8
    assert choose_group_size(together, 32, devices=8) == 4
    assert choose_group_size(together, 6) == 2


def test_keys_give_seeds_of_their_own() -> None:
    seeds = {key_seed(jax.random.fold_in(jax.random.key(0), i)) for i in range(50)}

    assert len(seeds) == 50
