"""Chat templates against transformers' `apply_chat_template`, and turns that are only appended."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from wmrl_jax.errors import UserError
from wmrl_jax.models.chat import Chat
from wmrl_jax.models.pretrained_tokenizer import tokenizer_of_folder

# Short forms of the three families' templates, with the features that these use.
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}\n"
    "    {% if true %}\n"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = """
{%- if tools %}{{- '# Tools\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{% endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if m.role == "user" and ns.last == messages|length - 1 and index != ns.last %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and '</think>' in m.content %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = m.content %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant'] %}
        {{- raise_exception("Only user and assistant turns, not " + m.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
    {{- m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ {'said': m.content, 'by': m.role} | tojson(indent=2, sort_keys=true) }}"
    "<|im_end|>{% endif %}\n{% if loop.last %}{% break %}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA}
TALK = [
    {"role": "user", "content": "Add 1 to <x> & 'y'.\n"},
    {"role": "assistant", "content": "<think>\n1\n</think>\n\nété: 2"},
    {"role": "user", "content": "  And 3?  "},
]
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|reserved|>",
)  # fmt: skip


def write_folder(folder, template, *, bos="<|endoftext|>", eos="<|im_end|>"):
    """A published tokenizer: the bytes, no merges, special tokens; <think> is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIAL))
    bpe.add_tokens(["<think>", "</think>"])
    # The template writes the first token itself; it must not come twice.
    first = ("<|endoftext|>", bpe.token_to_id("<|endoftext|>"))
    bpe.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[first]
    )
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "pad_token": eos, "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(params=list(TEMPLATES))
def pair(request, tmp_path):
    """Our tokenizer and transformers' of the same folder."""
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "model", TEMPLATES[request.param])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer_of_folder(folder, 320), theirs


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": " Terse. "}]])
@pytest.mark.parametrize("prompt", [False, True])
def test_text_and_ids_are_those_of_transformers(pair, system, prompt):
    ours, theirs = pair
    for length in (1, 3):
        messages = [*system, *TALK[:length]]
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.chat.render(messages, add_generation_prompt=prompt) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.chat.encode(messages) == list(ids)


def test_turns_that_are_appended_are_those_of_the_whole_conversation(pair):
    ours, theirs = pair
    written = ours.encode("2, été")  # what the agent sampled, without its end
    appended = [
        *ours.encode_prompt("One?"), *written, *ours.chat.between_turns(
            {"role": "user", "content": "Two?"}
        ),
    ]  # fmt: skip
    whole = theirs.apply_chat_template(
        [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "2, été"},
            {"role": "user", "content": "Two?"},
        ],
        add_generation_prompt=True,
    )["input_ids"]
    assert appended == list(whole)


def test_a_message_that_a_template_refuses_is_a_user_error():
    chat = Chat(LLAMA, lambda text: [], {"bos_token": ""})
    with pytest.raises(UserError, match="Only user and assistant turns, not tool"):
        chat.render([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])


def test_a_template_that_is_no_jinja_is_a_user_error():
    with pytest.raises(UserError, match="cannot be read"):
        Chat("{% if %}", lambda text: [], {}).render(TALK)


def test_a_template_cannot_reach_the_interpreter():
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UserError, match="refuses"):
        Chat(escape, lambda text: [], {}).render(TALK)


def test_a_template_that_asks_for_tools_finds_none():
    text = "{% if tools is not none or documents is not none %}tools{% endif %}"
    assert Chat(text, lambda text: [], {}).render(TALK) == ""


def test_marked_assistant_turns_and_json_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "model", MARKED)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tokenizer_of_folder(folder, 320)
    assert ours.chat.render(TALK) == theirs.apply_chat_template(TALK, tokenize=False)


def test_whatever_is_said_between_turns_is_encoded():
    said = {"role": "user", "content": "\N{SNOWMAN} fell"}
    chat = Chat(CHATML, lambda text: [ord(c) for c in text], {})
    expected = "<|im_end|>\n<|im_start|>user\n\N{SNOWMAN} fell<|im_end|>\n<|im_start|>assistant\n"
    assert chat.between_turns(said) == [ord(c) for c in expected]
