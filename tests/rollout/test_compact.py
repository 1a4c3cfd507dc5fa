"""Rows taken apart at the end of their prompts, and put together again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wmrl_jax.rollout.compact import join_rows, prompt_lengths_of, split_rows


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    own=st.integers(1, 4),
)
def test_splitting_and_joining_give_each_token_its_place(lengths, rows, own):
    prompt_tokens = 5
    total = prompt_tokens + own
    tokens = np.arange(len(lengths) * rows * total).reshape(len(lengths), rows, total)
    prompts, suffixes = split_rows(tokens, np.asarray(lengths), prompt_tokens)
    joined = np.asarray(join_rows(suffixes, np.asarray(lengths), prompt_tokens))
    for group, length in enumerate(lengths):
        np.testing.assert_array_equal(prompts[group, :length], tokens[group, 0, :length])
        for row in range(rows):
            written = tokens[group, row, length : length + own]
            np.testing.assert_array_equal(suffixes[group, row], written)
            np.testing.assert_array_equal(joined[group, row, length : length + own], written)


def test_a_prompt_ends_where_a_row_of_its_group_first_writes():
    mask = np.zeros((3, 2, 8), bool)
    mask[0, :, 3:6] = True
    mask[1, 1, 2:4] = True
    np.testing.assert_array_equal(prompt_lengths_of(mask, 5), [3, 2, 5])
