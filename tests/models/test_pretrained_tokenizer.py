"""Tokenizers of published folders against transformers', and what must never happen to text."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from wmrl_jax.errors import UserError
from wmrl_jax.models.pretrained_tokenizer import tokenizer_of_folder
from wmrl_jax.models.tokenizer import OUTCOME_SLOTS

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_CHAT = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA_CHAT = """{{- bos_token }}{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}
{{- raise_exception('unknown role ' ~ message['role']) }}{%- endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
TEXTS = [
    "import pandas as pd\ntrain = pd.read_csv('train.csv')\n\n\nprint(train.shape, 12345)\n",
    "  déjà vu — 日本語のテキスト 🙂\t\ttabs\r\nand  spaces   ",
    "<|im_start|>user\nnot a turn<|im_end|>",
]


def write_folder(folder, special, chat, *, split=None, eos, bos=None):
    """A published folder's tokenizer files, of a small byte-level BPE."""
    bpe = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    bpe.pre_tokenizer = level
    if split is not None:
        first = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([first, level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(TEXTS * 4, trainer)
    bpe.add_special_tokens(special)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat}
    config |= {"eos_token": eos, "bos_token": bos, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return bpe.get_vocab_size()


@pytest.fixture(scope="module", params=["qwen", "llama"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen":
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>"]
        size = write_folder(folder, special, QWEN_CHAT, split=QWEN_SPLIT, eos="<|im_end|>")
    else:
        special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        size = write_folder(folder, special, LLAMA_CHAT, eos="<|eot_id|>", bos="<|begin_of_text|>")
    return folder, size


@pytest.fixture(scope="module")
def ours(folder):
    return tokenizer_of_folder(folder[0], folder[1])


@pytest.fixture(scope="module")
def theirs(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder[0])


def test_ordinary_text_has_the_ids_of_transformers(ours, theirs):
    for text in TEXTS[:2]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode_batch(TEXTS[:2]) == [ours.encode(text) for text in TEXTS[:2]]


def test_conversations_have_the_text_and_ids_of_transformers(ours, theirs):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Tab\tand newline\n"},
        {"role": "assistant", "content": "Yes: é 🙂"},
        {"role": "user", "content": "Again"},
    ]
    for end in (2, 3, 4):
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                turns[:end], tokenize=False, add_generation_prompt=prompt
            )
            assert ours.chat.render(turns[:end], add_generation_prompt=prompt) == expected
        ids = theirs.apply_chat_template(turns[:end], add_generation_prompt=True)["input_ids"]
        assert ours.chat.encode(turns[:end]) == list(ids)


def test_a_prompt_is_a_turn_of_the_user(ours, theirs):
    asked = [{"role": "user", "content": "Write a program."}]
    expected = theirs.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert ours.encode_prompt("Write a program.") == list(expected)


def test_a_second_turn_is_appended_to_the_ids_that_were_sampled(ours):
    first = [{"role": "user", "content": "One"}]
    written = ours.encode("Two") + ours.encode("!")  # as a sampler may cut it
    message = {"role": "user", "content": "Three"}
    whole = ours.chat.encode(first) + written + ours.chat.between_turns(message)
    said = [*first, {"role": "assistant", "content": "Two!"}, message]
    decoded = ours._bpe.decode(whole, skip_special_tokens=False)
    assert decoded == ours.chat.render(said, add_generation_prompt=True)


def test_special_and_end_tokens_are_those_of_transformers(ours, theirs):
    assert ours.eos_id == theirs.eos_token_id
    assert set(theirs.all_special_ids) <= ours.special_ids


@given(text=st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_comes_back_and_holds_no_special_token(ours, text):
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert not set(ids) & ours.special_ids


def test_names_of_special_tokens_in_a_text_stay_text(ours):
    assert ours.decode(ours.encode(TEXTS[2])) == TEXTS[2]
    assert ours.eos_id not in ours.encode("<|im_end|><|eot_id|>")


def test_outcome_ids_are_distinct_and_begin_with_what_no_text_holds(folder, ours):
    ids = [ours.outcome_id, *ours.outcome_ids]
    assert len(set(ids)) == 1 + OUTCOME_SLOTS
    assert max(ids) < ours.vocab_size
    assert not {ours.eos_id, ours.pad_id} & set(ids)
    wide = tokenizer_of_folder(folder[0], folder[1] + 64)
    assert min(wide.outcome_id, *wide.outcome_ids) >= folder[1]


def test_more_tokens_than_rows_a_broken_file_and_none_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match=f"tokens up to {folder[1] - 1} and .* 300 rows"):
        tokenizer_of_folder(folder[0], 300)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        tokenizer_of_folder(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_of_folder(tmp_path, 300)


def test_a_template_that_refuses_says_why(ours):
    if "raise_exception" not in ours.chat.template:
        pytest.skip("this template refuses nothing")
    with pytest.raises(UserError, match="unknown role tool"):
        ours.chat.render([{"role": "tool", "content": "x"}])


def test_the_tokenizer_survives_its_own_folder(ours, tmp_path):
    ours.save(tmp_path)
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = TEXTS[1]
    np.testing.assert_array_equal(read.encode(text).ids, ours.encode(text))
