"""The transformer against a reference written with loops, and against transformers' own Qwen3."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import build_model
from wmrl_jax.train.config import ModelConfig

SMALL = ModelConfig(
    layers=2, width=24, heads=4, kv_heads=2, head_dim=8, mlp_width=40, rope_theta=100.0
)
VOCABULARY = 29


def perturbed(params):
    """Parameters in which no norm scale is one and no two weights are alike."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: np.asarray(x) + 0.2 * random.normal(size=x.shape).astype(np.float32), params
    )


def some_tokens(*shape):
    return np.random.default_rng(2).integers(0, VOCABULARY, shape).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens):
    return model.hidden(params, tokens) @ model.unembedding(params)


def reference_logits(config, params, ids):
    """Qwen3 by the book for one row: loops over layers, heads and positions, in float64."""

    def norm(vector, scale):
        return vector / np.sqrt(np.mean(vector**2) + config.norm_eps) * scale

    def turn(vector, position):
        out = np.empty_like(vector)
        half = config.head_dim // 2
        for i in range(half):
            angle = position / config.rope_theta ** (2 * i / config.head_dim)
            a, b = vector[i], vector[i + half]
            out[i] = a * np.cos(angle) - b * np.sin(angle)
            out[i + half] = b * np.cos(angle) + a * np.sin(angle)
        return out

    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    stream = [params["embed"][token] for token in ids]
    for index in range(config.layers):
        w = {name: stacked[index] for name, stacked in params["layers"].items()}
        keys, values = [], []
        for position, x in enumerate(stream):
            y = norm(x, w["input_norm"])
            split = (config.kv_heads, config.head_dim)
            keys.append([turn(norm(k, w["k_norm"]), position) for k in (y @ w["k"]).reshape(split)])
            values.append((y @ w["v"]).reshape(split))
        moved = []
        for position, x in enumerate(stream):
            y = norm(x, w["input_norm"])
            heads = []
            for head, q in enumerate((y @ w["q"]).reshape(config.heads, config.head_dim)):
                q = turn(norm(q, w["q_norm"]), position)
                kv = head // (config.heads // config.kv_heads)
                scores = [q @ keys[s][kv] / np.sqrt(config.head_dim) for s in range(position + 1)]
                shares = np.exp(scores) / np.sum(np.exp(scores))
                heads.append(sum(p * values[s][kv] for s, p in enumerate(shares)))
            x = x + np.concatenate(heads) @ w["o"]
            y = norm(x, w["post_norm"])
            gate = y @ w["gate"]
            moved.append(x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"])
        stream = moved
    hidden = np.stack([norm(x, params["final_norm"]) for x in stream])
    return hidden @ (params["embed"].T if config.tied_embeddings else params["head"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_logits_equal_a_reference_written_with_loops(tied, kv_heads):
    config = replace(SMALL, tied_embeddings=tied, kv_heads=kv_heads)
    model = build_model(config, VOCABULARY)
    params = perturbed(model.init(jax.random.key(0)))
    tokens = some_tokens(2, 9)

    logits = logits_of(model, params, tokens)

    for row, ids in zip(logits, tokens, strict=True):
        expected = reference_logits(config, params, np.asarray(ids))
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)


def test_logits_equal_those_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = build_model(SMALL, VOCABULARY)
    params = perturbed(model.init(jax.random.key(0)))
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=SMALL.width,
            intermediate_size=SMALL.mlp_width,
            num_hidden_layers=SMALL.layers,
            num_attention_heads=SMALL.heads,
            num_key_value_heads=SMALL.kv_heads,
            head_dim=SMALL.head_dim,
            rms_norm_eps=SMALL.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    published = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    weights = {
        "model.embed_tokens.weight": params["embed"],
        "lm_head.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
    }
    for name, stacked in params["layers"].items():
        for index, array in enumerate(stacked):
            weights[f"model.layers.{index}.{published[name]}.weight"] = array.T
    theirs.load_state_dict({name: torch.tensor(np.array(w)) for name, w in weights.items()})
    tokens = some_tokens(3, 11)

    with torch.no_grad():
        expected = theirs(torch.tensor(np.array(tokens))).logits.numpy()

    logits = logits_of(model, params, tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_what_stands_behind_a_position_does_not_change_it():
    model = build_model(SMALL, VOCABULARY)
    params = model.init(jax.random.key(0))
    tokens = some_tokens(2, 9)
    padded = np.where(np.arange(9) < 6, tokens, 0)

    whole, cut = (np.asarray(logits_of(model, params, ids)) for ids in (tokens, padded))

    np.testing.assert_array_equal(whole[:, :6], cut[:, :6])


def test_rematerialisation_changes_the_compiled_memory_and_not_the_gradient():
    tokens = some_tokens(4, 64)
    params = build_model(SMALL, VOCABULARY).init(jax.random.key(0))
    gradients, memory = [], []
    for remat in ("none", "matmuls", "layers"):
        model = build_model(SMALL, VOCABULARY, remat=remat)
        gradient = jax.jit(jax.grad(lambda p, model=model: model.hidden(p, tokens)[..., 0].sum()))
        compiled = gradient.lower(params).compile()
        gradients.append(compiled(params))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)

    for other in gradients[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
            gradients[0],
            other,
        )
    assert memory[2] < memory[1] < 0.8 * memory[0]


def test_every_parameter_gets_a_gradient_at_initialisation():
    model = build_model(SMALL, VOCABULARY)
    tokens = some_tokens(2, 9)
    weights = np.random.default_rng(3).normal(size=SMALL.width).astype(np.float32)

    gradient = jax.jit(jax.grad(lambda p: (model.hidden(p, tokens) @ weights).sum()))(
        model.init(jax.random.key(0))
    )

    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


def test_bfloat16_computes_close_to_float32_from_float32_parameters():
    wide, narrow = (
        build_model(replace(SMALL, dtype=d), VOCABULARY) for d in ("float32", "bfloat16")
    )
    params = narrow.init(jax.random.key(0))
    tokens = some_tokens(2, 9)

    hidden = jax.jit(narrow.hidden)(params, tokens)

    assert hidden.dtype == jnp.bfloat16
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    expected = jax.jit(wide.hidden)(params, tokens)
    np.testing.assert_allclose(np.asarray(hidden, np.float32), expected, atol=0.1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv_heads": 3}, "multiple of model.kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_sentence(change, word):
    with pytest.raises(UserError, match=word):
        build_model(replace(SMALL, **change), VOCABULARY)


def test_an_unknown_rematerialisation_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="none, matmuls, layers"):
        build_model(SMALL, VOCABULARY, remat="all")
