"""The hybrid family's own promises: states behind padded prompts, caches, pattern, settings.

Parity with transformers, for all families alike, is in `test_parity`.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.method.logprobs import token_logprobs
from wmrl_jax.models.families import family_of
from wmrl_jax.models.packing import make_packing
from wmrl_jax.models.pretrained import abstract_params, load_pretrained, open_pretrained
from wmrl_jax.models.qwen3_5 import FAMILY, architecture, make_model, weights
from wmrl_jax.models.qwen3_5_layers import FULL, LINEAR, HybridArchitecture
from wmrl_jax.rollout.sampler import make_sampler

ARCH = HybridArchitecture(
    vocab_size=29, layers=4, width=24, heads=4, kv_heads=2, head_dim=8, mlp_width=32,
    rope_theta=100.0, rotary_dim=4, norm_eps=1e-6, tied_embeddings=False, linear_key_heads=2,
    linear_value_heads=4, linear_key_dim=4, linear_value_dim=6, conv_width=4,
    layer_types=(LINEAR, FULL) * 2, dtype="float32",
)  # fmt: skip
PUBLISHED = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "attn_output_gate": True, "full_attention_interval": 4,
    "layer_types": ([LINEAR] * 3 + [FULL]) * 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 248044, "use_cache": True,
    "dtype": "bfloat16", "initializer_range": 0.02,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
"""The text part of the 27B model's config.json; the smaller ones have the same keys."""
NESTED = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": PUBLISHED}
GROUPS, ROWS, STEPS = 3, 2, 6


def random_params(model):
    """No norm of ones and no bias of zeros."""
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)


class Decoded(NamedTuple):
    """Prompts of three lengths, two rows each, decoded token by token; the cache grows once."""

    prompts: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    caches: Any
    last: jax.Array
    states: np.ndarray  # [G, N, S, D]
    whole: np.ndarray  # [G, N, S + 1, D], of a full pass over every row


MODEL = make_model(ARCH)
DECODE, HIDDEN, PREFILL = jax.jit(MODEL.decode), jax.jit(MODEL.hidden), jax.jit(MODEL.prefill)


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL)


@pytest.fixture(scope="module")
def decoded(params):
    lengths = np.array([5, 3, 1], np.int32)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 29, (GROUPS, 5)).astype(np.int32)
    tokens = rng.integers(0, 29, (GROUPS, ROWS, STEPS)).astype(np.int32)
    prompt, last = PREFILL(params, prompts, lengths)
    decode_weights = jax.jit(partial(MODEL.decode_weights, positions=12))(params)
    cache = MODEL.empty_cache(GROUPS, ROWS, 4)
    states = []
    for step in range(STEPS):
        if step == 4:
            cache = MODEL.grow_cache(cache, 8)
        cache, hidden = DECODE(decode_weights, prompt, cache, tokens[:, :, step], np.int32(step))
        states.append(hidden)
    texts = np.zeros((GROUPS, ROWS, 5 + STEPS), np.int32)
    for group, length in enumerate(lengths):
        texts[group, :, :length] = prompts[group, :length]
        texts[group, :, length : length + STEPS] = tokens[group]
    full = np.asarray(HIDDEN(params, texts.reshape(GROUPS * ROWS, -1)))
    full = full.reshape(GROUPS, ROWS, 5 + STEPS, -1)
    whole = np.stack([full[g, :, n - 1 : n + STEPS] for g, n in enumerate(lengths)])
    return Decoded(prompts, lengths, tokens, (prompt, cache), last, np.stack(states, 2), whole)


def test_decoding_behind_prompts_of_several_lengths_equals_a_full_pass(decoded):
    np.testing.assert_allclose(decoded.last, decoded.whole[:, 0, 0], atol=1e-4)
    np.testing.assert_allclose(decoded.states, decoded.whole[:, :, 1:], atol=1e-4)


def test_rows_that_share_a_prompt_give_the_states_of_a_full_pass(decoded, params):
    shared = jax.jit(MODEL.completion_states)(
        params, decoded.prompts, decoded.lengths, decoded.tokens
    )
    np.testing.assert_allclose(shared, decoded.whole, atol=1e-4)


def test_packed_rows_of_uneven_lengths_give_the_states_of_a_full_pass(decoded, params):
    lengths = np.random.default_rng(5).integers(0, STEPS + 1, (GROUPS, ROWS))
    scored = np.arange(STEPS) < lengths[..., None]
    packing = make_packing(jnp.asarray(lengths), STEPS, int(lengths.sum(1).max()))
    packed = jax.jit(MODEL.packed_states)(
        params, decoded.prompts, decoded.lengths, decoded.tokens, packing
    )
    for group in range(GROUPS):
        expected = decoded.whole[group, :, :-1][scored[group]]
        np.testing.assert_allclose(packed[group, : len(expected)], expected, atol=1e-4)


def test_what_stands_in_the_padding_of_a_prompt_does_not_reach_its_state(decoded, params):
    padding = np.arange(5) >= decoded.lengths[:, None]
    other = np.where(padding, (decoded.prompts + 1) % 29, decoded.prompts)
    prompt, last = PREFILL(params, other, decoded.lengths)
    np.testing.assert_array_equal(last, decoded.last)
    for kind, ours, theirs in zip(
        ARCH.layer_types, prompt.layers, decoded.caches[0].layers, strict=True
    ):
        if kind == LINEAR:
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_rows_taken_out_of_their_groups_decode_on_as_before(decoded, params):
    taken = np.array([5, 0, 2])

    @jax.jit
    def both(params, caches, tokens):
        read, step = MODEL.decode_weights(params, 12), jnp.int32(STEPS)
        _, together = MODEL.decode(read, *caches, tokens, step)
        fewer = MODEL.take_rows(*caches, taken)
        _, apart = MODEL.decode(read, *fewer, tokens.reshape(-1, 1)[taken], step)
        return together.reshape(-1, ARCH.width)[taken], apart[:, 0]

    together, apart = both(params, decoded.caches, decoded.tokens[:, :, 0])
    np.testing.assert_allclose(apart, together, atol=1e-5)


def test_in_bfloat16_decoding_stays_near_the_shared_pass_and_states_are_float32(params):
    """A wrong state is off by the size of the hidden states, about 1."""
    model = make_model(replace(ARCH, dtype="bfloat16"))
    rng = np.random.default_rng(3)
    prompts, tokens = rng.integers(0, 29, (2, 5)), rng.integers(0, 29, (2, 2, STEPS))
    lengths = np.array([5, 2], np.int32)

    @jax.jit
    def run(params):
        cache, last = model.prefill(params, prompts, lengths)
        read = model.decode_weights(params, 12)

        def step(rows, now):
            return model.decode(read, cache, rows, *now)

        along = (jnp.moveaxis(tokens, 2, 0), jnp.arange(STEPS))
        rows, states = jax.lax.scan(step, model.empty_cache(2, 2, STEPS), along)
        shared = model.completion_states(params, prompts, lengths, tokens)
        return rows, last, jnp.moveaxis(states, 0, 2), shared

    rows, last, states, shared = run(params)
    assert states.dtype == shared.dtype == jnp.bfloat16
    assert rows[0].matrix.dtype == jnp.float32 and rows[0].recent.dtype == jnp.bfloat16
    assert rows[1][0].dtype == jnp.bfloat16
    off = np.abs(np.float32(states) - np.float32(shared[:, :, 1:]))
    assert off.mean() < 0.02 and off.max() < 0.2
    assert np.abs(np.float32(last) - np.float32(shared[:, 0, 0])).max() < 0.1


@pytest.mark.slow
def test_the_sampler_says_the_logprobs_that_the_trainer_recomputes():
    """Also of the rows that go on in a smaller batch, when most have ended."""
    groups, rows, new = 8, 8, 12
    arch = replace(ARCH, vocab_size=8, layers=2, layer_types=(LINEAR, FULL))
    model = make_model(arch)
    params = jax.tree.map(lambda x: 2 * x, random_params(model))
    lengths = np.array([4, 3, 1, 4, 2, 4, 3, 4], np.int32)
    prompts = np.random.default_rng(1).integers(2, 8, (groups, 4)).astype(np.int32)
    sample = make_sampler(
        model, group_size=rows, prompt_tokens=4, new_tokens=new, eos_id=1, pad_id=0, segment=4
    )
    rollouts = sample(params, prompts, lengths, jax.random.key(3))
    ended = np.asarray(rollouts.lengths) - lengths[:, None]
    assert (ended < new).mean() > 0.5 and (ended == new).any()

    @jax.jit
    def recomputed(rollouts):
        texts = rollouts.tokens.reshape(groups * rows, -1)
        hidden = model.hidden(params, texts)
        scored, _ = token_logprobs(
            hidden[:, :-1], model.unembedding(params), texts[:, 1:], chunk=8, temperature=1.0
        )
        scored = jnp.pad(scored, ((0, 0), (1, 0))).reshape(rollouts.tokens.shape)
        return jnp.where(rollouts.loss_mask, scored, 0.0)

    # Chunks and steps of the delta rule round differently.
    np.testing.assert_allclose(rollouts.behaviour_logprobs, recomputed(rollouts), atol=1e-3)


@pytest.mark.parametrize(
    ("types", "period"),
    [
        ([LINEAR, LINEAR, LINEAR, FULL] * 2, 4),
        ([LINEAR, FULL] * 3, 2),
        ([FULL] * 3, 1),
        ([LINEAR, FULL, LINEAR], 3),
        ([LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR, LINEAR], 8),
    ],
)
def test_the_period_is_the_smallest_that_divides_the_layers(types, period):
    arch = replace(ARCH, layers=len(types), layer_types=tuple(types))
    assert arch.period == period
    assert set(abstract_params(make_model(arch))["layers"]) == {str(i) for i in range(period)}


def test_more_repetitions_of_the_pattern_make_no_larger_program():
    def size(repetitions):
        kinds = (LINEAR, FULL) * repetitions
        model = make_model(replace(ARCH, layers=len(kinds), layer_types=kinds))
        tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        program = jax.jit(model.hidden).lower(abstract_params(model), tokens)
        return program.as_text().count("\n")

    assert size(8) == size(2)


def test_the_published_configuration_is_read_and_is_that_of_transformers():
    """Every tensor that transformers makes of it has its place, and no more."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, text = family_of(NESTED)
    arch = family.architecture(text, "bfloat16", "layers")
    assert (arch.period, arch.rotary_dim, arch.layers) == (4, 64, 64)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3_5TextConfig(**PUBLISHED)
        ).state_dict()
    places = {weight.name: weight for weight in weights(arch)}
    assert places.keys() == theirs.keys()
    leaves = abstract_params(make_model(arch))
    for name, tensor in theirs.items():
        weight, leaf = places[name], leaves
        for key in weight.path:
            leaf = leaf[key]
        ours = leaf.shape if weight.layer is None else leaf.shape[1:]
        ours = weight.reshape or (ours[::-1] if weight.transpose else ours)
        assert tuple(tensor.shape) == ours, name


def test_without_layer_types_every_fourth_layer_has_full_attention():
    config = {k: v for k, v in PUBLISHED.items() if k != "layer_types"}
    assert architecture(config, "float32", "none") == architecture(PUBLISHED, "float32", "none")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"num_experts": 8}, "num_experts: 8"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"attn_output_gate": False}, "attn_output_gate: False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"] * 64}, "sliding_attention"),
        ({"layer_types": [LINEAR]}, "for 1 layers"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rotary frequencies"),
        ({"rope_parameters": {"partial_rotary_factor": 0.001}}, "partial_rotary_factor"),
        ({"num_attention_heads": 6}, "num_attention_heads: 6"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads: 40"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: 0"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"shared_experts": 2}, "not supported: shared_experts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(setting, named):
    with pytest.raises(UserError) as error:
        architecture({**PUBLISHED, **setting}, "float32", "matmuls")
    assert named in str(error.value)


def test_a_mixture_of_experts_and_an_unknown_remat_are_refused_by_name():
    with pytest.raises(UserError, match="'qwen3_5_moe'"):
        family_of({"model_type": "qwen3_5_moe"})
    with pytest.raises(UserError, match="not 'everything'"):
        architecture(PUBLISHED, "float32", "everything")


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_multimodal_model_the_text_part_is_loaded_and_the_log_says_what_is_not(
    tied, tmp_path, caplog
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    text = dict(
        vocab_size=29, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        layer_types=[LINEAR, FULL], num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=8, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24,
        num_position_embeddings=16, patch_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(
            text_config=text, vision_config=vision, tie_word_embeddings=tied,
            image_token_id=25, video_token_id=26, vision_start_token_id=27, vision_end_token_id=28,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    beside = sum(name.startswith("model.visual.") for name in tensors)
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with caplog.at_level(logging.INFO, logger="wmrl_jax"):
        ours = open_pretrained(tmp_path)
        params = load_pretrained(ours)
    assert ours.family == FAMILY and ours.model.arch.tied_embeddings == tied
    assert beside > 0
    assert f"{beside + 1} tensors are not read, model.visual." in caplog.text

    tokens = np.random.default_rng(0).integers(0, 25, (2, 9))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()

    @jax.jit
    def logits(params):
        return ours.model.hidden(params, tokens) @ ours.model.unembedding(params)

    np.testing.assert_allclose(logits(params), expected, atol=1e-4)
