import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import Model, build_model
from wmrl_jax.models.rows import Row, pad_groups
from wmrl_jax.models.tokenizer import Tokenizer, train_tokenizer
from wmrl_jax.train.config import ModelConfig, WarmStartConfig
from wmrl_jax.train.mesh import make_mesh
from wmrl_jax.train.sft import SftState, completion_loss, encode_pairs, sft

TINY = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=48)
CONFIG = WarmStartConfig(epochs=8, batch_size=8, learning_rate=1e-2, warmup_steps=2)
PAIRS = [
    (f"task {letter}\n", f"import {letter}\n" + "x = 1\n" * (n % 3) + f"print({letter})\n")
    for letter in "abcd"
    for n in range(16)
]


ONE = make_mesh(jax.devices()[:1])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([text for pair in PAIRS for text in pair], 320)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Model:
    return build_model(TINY, tokenizer.vocab_size)


def test_the_loss_is_the_sum_over_completion_tokens_alone(model: Model) -> None:
    params = model.init(jax.random.key(0))
    rows = [Row((5, 6, 7), (8, 9)), Row((5, 6, 7), (10, 11, 12, 1))]
    batch = pad_groups([rows], prompt_tokens=5, new_tokens=6, pad_id=0)

    total, count = completion_loss(model, params, batch, chunk=3)

    ids = [(*row.prompt, *row.completion) for row in rows]
    padded = jnp.asarray([(*row, *([0] * (9 - len(row)))) for row in ids])
    logits = np.asarray(model.hidden(params, padded) @ model.unembedding(params), np.float64)
    expected = 0.0
    for row, row_logits in zip(ids, logits, strict=True):
        for t in range(3, len(row)):
            before = row_logits[t - 1]
            expected += np.log(np.exp(before).sum()) - before[row[t]]
    assert count == 6
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_the_loss_falls_on_a_toy_corpus_and_the_speed_is_logged(
    model: Model, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[tuple[int, int, float]] = []

    def on_step(*step: int | float) -> None:
        seen.append(step)  # type: ignore[arg-type]

    sft(model, tokenizer, PAIRS, CONFIG, jax.random.key(0), on_step, mesh=ONE)

    assert [step for step, _, _ in seen] == list(range(1, 65))
    assert {total for _, total, _ in seen} == {64}
    assert seen[0][2] > 4.0
    assert seen[-1][2] < 1.0
    assert "completion tokens/s" in caplog.text


def test_one_device_gives_what_eight_give(model: Model, tokenizer: Tokenizer) -> None:
    config = WarmStartConfig(epochs=1, batch_size=8, learning_rate=1e-3)
    key = jax.random.key(1)

    # Prompts of their own, so that the batches are the same on any number of devices.
    pairs = [(f"{n} {prompt}", completion) for n, (prompt, completion) in enumerate(PAIRS)]
    many = sft(model, tokenizer, pairs, config, key)
    one = sft(model, tokenizer, pairs, config, key, mesh=ONE)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), many, one)


def test_a_run_from_a_saved_state_ends_where_the_whole_one_ends(
    model: Model, tokenizer: Tokenizer
) -> None:
    config = WarmStartConfig(epochs=1.5, batch_size=8, learning_rate=1e-3)
    key = jax.random.key(2)
    saved: list[SftState] = []

    whole = sft(
        model, tokenizer, PAIRS, config, key, mesh=ONE, on_state=saved.append, state_every=5
    )
    rest: list[int] = []
    resumed = sft(
        model, tokenizer, PAIRS, config, key,
        lambda step, *_: rest.append(step), mesh=ONE, state=saved[0],
    )  # fmt: skip

    assert saved[0].step == 5
    assert rest == list(range(6, 13))
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_completions_beyond_the_limit_are_left_out_with_a_warning(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [("a\n", "short\n"), ("a\n", "q" * 100)]

    rows = encode_pairs(tokenizer, pairs, new_tokens=20)

    assert len(rows) == 1
    assert rows[0].completion[-1] == tokenizer.eos_id
    assert "1 of 2 completions" in caplog.text


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([], "nothing to learn from"),
        ([("", "x\n")], "empty prompt"),
        ([("p" * 40, "x\n")], "model.prompt_tokens is 16"),
        ([("p", "x" * 90)], "longer than model.new_tokens = 16"),
    ],
)
def test_texts_that_cannot_be_learnt_are_refused(
    tokenizer: Tokenizer, pairs: list[tuple[str, str]], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        encode_pairs(tokenizer, pairs, prompt_tokens=16, new_tokens=16)


def test_a_batch_that_the_devices_do_not_divide_is_refused(
    model: Model, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match="batch_size is 6, which 8 devices do not divide"):
        sft(model, tokenizer, PAIRS, WarmStartConfig(batch_size=6), jax.random.key(0))
