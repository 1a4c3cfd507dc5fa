"""The families against transformers: logits, padding, packing, caches, text, gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.models.pretrained import Pretrained, export, load_pretrained, open_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 48
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
HYBRID = dict(
    head_dim=16, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
CASES = {
    "qwen3, untied, wide heads": ("Qwen3", dict(head_dim=16, tie_word_embeddings=False)),
    "qwen3, tied, a head each, long base": (
        "Qwen3",
        dict(head_dim=8, num_key_value_heads=4, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="default", rope_theta=5e6)),
    ),
    "llama, tied, one key head, short base": (
        "Llama",
        dict(num_key_value_heads=1, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    ),
    "llama 3.1": ("Llama", dict(tie_word_embeddings=False, rope_parameters=LLAMA3)),
    "llama, linear": (
        "Llama",
        dict(head_dim=4, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    ),
    "qwen3.5, untied, published pattern": (
        "Qwen3_5Text", dict(**HYBRID, num_hidden_layers=4, tie_word_embeddings=False)
    ),
    "qwen3.5, tied, two by two, a value head each": (
        "Qwen3_5Text",
        dict(HYBRID, linear_num_value_heads=2, num_hidden_layers=4, tie_word_embeddings=True,
             layer_types=[LINEAR, FULL] * 2, num_key_value_heads=1, linear_conv_kernel_dim=3,
             rope_parameters=dict(rope_type="default", rope_theta=100.0,
                                  partial_rotary_factor=0.5)),
    ),
    "qwen3.5, no repetition": ("Qwen3_5Text", dict(**HYBRID, layer_types=[FULL, LINEAR, LINEAR])),
}  # fmt: skip


class Pair(NamedTuple):
    theirs: "transformers.PreTrainedModel"
    ours: Pretrained
    params: dict


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(", ", "-"))
def pair(request, tmp_path_factory):
    """A random model of theirs, saved by them and loaded by us."""
    family, options = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **options})
    kind = family.removesuffix("Text") + "ForCausalLM"
    theirs = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():  # no norm of ones, no logits near zero
            weight.add_(0.2 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    ours = open_pretrained(folder)
    return Pair(theirs, ours, load_pretrained(ours))


@partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, positions=None, segments=None):
    hidden = model.hidden(params, tokens, positions=positions, segments=segments)
    return hidden @ model.unembedding(params)


def their_logits(model, tokens, **options):
    with torch.no_grad():
        return model(torch.tensor(tokens), **options).logits.numpy()


def some_tokens(*shape):
    return np.random.default_rng(1).integers(0, VOCABULARY, shape).astype(np.int32)


def test_logits_equal_theirs(pair):
    tokens = some_tokens(2, 24)
    got = logits_of(pair.ours.model, pair.params, tokens)
    np.testing.assert_allclose(got, their_logits(pair.theirs, tokens), atol=1e-4)


def test_padding_on_the_left_changes_nothing(pair):
    tokens = some_tokens(2, 24)
    pads = np.array([5, 11])
    real = np.arange(24) >= pads[:, None]
    positions = np.maximum(np.arange(24) - pads[:, None], 0).astype(np.int32)
    expected = their_logits(
        pair.theirs, tokens, attention_mask=torch.tensor(real.astype(np.int64)),
        position_ids=torch.tensor(positions, dtype=torch.long),
    )  # fmt: skip
    got = logits_of(pair.ours.model, pair.params, tokens, positions, real.astype(np.int32))
    np.testing.assert_allclose(np.asarray(got)[real], expected[real], atol=1e-4)


def test_packed_texts_do_not_see_each_other(pair):
    tokens = some_tokens(1, 24)
    lengths = (7, 12, 5)
    segments = np.repeat(np.arange(3), lengths)[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    got = logits_of(pair.ours.model, pair.params, tokens, positions, segments)
    for number in range(3):
        inside = segments[0] == number
        alone = their_logits(pair.theirs, tokens[:, inside])
        np.testing.assert_allclose(np.asarray(got)[:, inside], alone, atol=1e-4)


def test_decoding_with_a_cache_gives_their_greedy_text_and_the_logits_of_a_full_pass(pair):
    model, params = pair.ours.model, pair.params
    prompts, lengths, new = some_tokens(2, 6), np.array([6, 6], np.int32), 64
    with torch.no_grad():
        expected = pair.theirs.generate(
            torch.tensor(prompts), do_sample=False, max_new_tokens=new, pad_token_id=0
        ).numpy()

    @jax.jit
    def greedy(params):
        cache, hidden = model.prefill(params, prompts, lengths)
        weights = model.decode_weights(params, 6 + new)

        def step(carry, number):
            rows, hidden = carry
            logits = hidden @ model.unembedding(params)
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return model.decode(weights, cache, rows, token, number), (token[:, 0], logits[:, 0])

        start = (model.empty_cache(2, 1, new), hidden[:, None])
        return jax.lax.scan(step, start, jnp.arange(new))[1]

    tokens, logits = (np.asarray(part).swapaxes(0, 1) for part in greedy(params))
    np.testing.assert_array_equal(tokens, expected[:, 6:])
    full = logits_of(model, params, expected.astype(np.int32))
    np.testing.assert_allclose(logits, np.asarray(full)[:, 5:-1], rtol=1e-4, atol=1e-4)


def test_the_shared_prompt_gives_the_states_of_whole_rows(pair):
    model, params = pair.ours.model, pair.params
    prompt, completions = some_tokens(1, 9), some_tokens(3, 7)
    states = jax.jit(model.completion_states)(
        params, np.pad(prompt, ((0, 0), (0, 2))), np.array([9], np.int32), completions[None]
    )
    rows = np.concatenate([np.repeat(prompt, 3, axis=0), completions], axis=1)
    expected = jax.jit(model.hidden)(params, rows)[:, 8:]
    np.testing.assert_allclose(states[0], expected, atol=1e-4)


def test_gradients_of_a_loss_equal_theirs(pair):
    tokens = some_tokens(2, 16)
    pair.theirs.zero_grad()
    logits = pair.theirs(torch.tensor(tokens)).logits[:, :-1]
    targets = torch.tensor(tokens[:, 1:], dtype=torch.long)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    theirs = dict(pair.theirs.named_parameters())

    @jax.jit
    @jax.grad
    def gradient(params):
        logp = jax.nn.log_softmax(logits_of(pair.ours.model, params, tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    ours = gradient(pair.params)
    for weight in pair.ours.weights:
        leaf = ours
        for key in weight.path:
            leaf = leaf[key]
        got = np.asarray(leaf if weight.layer is None else leaf[weight.layer])
        expected = theirs[weight.name].grad.numpy()
        got = got.T if weight.transpose else got.reshape(expected.shape)
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 1e-3, weight.name


def test_an_exported_model_has_their_logits(pair, tmp_path):
    export(pair.ours, pair.params, tmp_path, dtype="float32")
    kind = type(pair.theirs)
    back = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = some_tokens(1, 12)
    np.testing.assert_array_equal(their_logits(back, tokens), their_logits(pair.theirs, tokens))
