"""Stop strings by token: against a search in the text, and inside the sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wmrl_jax.errors import UserError
from wmrl_jax.models.tokenizer import train_tokenizer
from wmrl_jax.rollout import stopping
from wmrl_jax.rollout.stopping import stop_table

PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"abab", b"\n", "é".encode(), "é".encode()[:1]]


def first_stop(ids, stops):
    """The number of tokens after which a stop string is in the text; None if there is none."""
    text = b""
    for count, number in enumerate(ids, 1):
        text += PIECES[number]
        if any(stop.encode() in text for stop in stops):
            return count
    return None


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    stops=st.lists(
        st.sampled_from(["a", "ab", "bab", "abab", "aabaab", "\n\n", "é", "bb\n", "baé"]),
        min_size=1, max_size=3,
    ),
)  # fmt: skip
@settings(max_examples=300)
def test_the_table_stops_where_a_search_in_the_text_finds_a_string(ids, stops):
    table = stop_table(PIECES, stops)
    state, found = 0, None
    for count, number in enumerate(ids, 1):
        state = table.next[state, number]
        if state == table.stop and found is None:
            found = count
    assert found == first_stop(ids, stops)
    assert (state == table.stop) == (found is not None)


def test_no_string_an_empty_one_and_too_long_ones_are_refused(monkeypatch):
    for stops in ([], [""], ["a", ""]):
        with pytest.raises(UserError, match="at least one character"):
            stop_table(PIECES, stops)
    monkeypatch.setattr(stopping, "MOST_CELLS", 50)
    with pytest.raises(UserError, match="or 50 cells"):
        stop_table(PIECES, ["aaaaaaaa"])


def test_more_states_than_an_int16_tells_apart_are_refused():
    assert len(stop_table(PIECES, ["a" * (2**15 - 2)]).next) == 2**15
    with pytest.raises(UserError, match="32769 states for 10 tokens"):
        stop_table(PIECES, ["a" * (2**15 - 1)])


def test_bytes_of_tokens_are_those_of_their_text():
    tokenizer = train_tokenizer(["déjà vu\n  print('x')\n" * 3], 400)
    pieces = tokenizer.token_bytes()
    assert len(pieces) == tokenizer.vocab_size
    for text in ("déjà", "  print('x')\n", "日本"):
        assert b"".join(pieces[number] for number in tokenizer.encode(text)) == text.encode()
    assert pieces[tokenizer.eos_id] == b""


def test_a_row_ends_with_the_token_in_which_a_stop_string_ends(sampled_with):
    rows = sampled_with(stop=stop_table(PIECES, ["ab"]), new_tokens=24)
    tokens, lengths = np.asarray(rows.tokens), np.asarray(rows.lengths)
    starts = np.asarray(rows.prompt_lengths)
    stopped = 0
    for group in range(tokens.shape[0]):
        for row in range(tokens.shape[1]):
            own = tokens[group, row, starts[group] :][:24]
            expected = first_stop(own[: lengths[group, row] - starts[group]], ["ab"])
            written = lengths[group, row] - starts[group]
            assert rows.finished[group, row] == (expected is not None)
            assert written == (expected if expected is not None else 24)
            stopped += expected is not None
    assert stopped > 10


def test_limits_and_settings_may_differ_by_row(sampled_with):
    limit = np.array([[3, 5, 7, 9], [2, 4, 6, 30]])
    rows = sampled_with(new_tokens=24, limit=limit)
    written = np.asarray(rows.lengths - rows.prompt_lengths[:, None])
    np.testing.assert_array_equal(written, np.minimum(limit, 24))
    assert not np.asarray(rows.finished).any()
    cold = sampled_with(new_tokens=24, temperature=np.array([0.0, 1.0]))
    same = np.asarray(cold.tokens)[0]
    assert (same == same[0]).all()
    assert not (np.asarray(cold.tokens)[1] == np.asarray(cold.tokens)[1, 0]).all()


@pytest.fixture(scope="module")
def sampled_with():
    from wmrl_jax.models.model import build_model
    from wmrl_jax.rollout.sampler import make_sampler
    from wmrl_jax.train.config import ModelConfig

    config = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
    model = build_model(config, len(PIECES))
    params = model.init(jax.random.key(0))
    prompts, lengths = jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2])

    def sample(*, stop=None, new_tokens, **options):
        sampler = make_sampler(
            model, group_size=4 if stop is None else 16, prompt_tokens=3, new_tokens=new_tokens,
            eos_id=-1, pad_id=0, stop=stop, segment=8,
        )  # fmt: skip
        return sampler(params, prompts, lengths, jax.random.key(1), **options)

    return sample
