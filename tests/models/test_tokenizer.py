"""The tokenizer loses nothing, never writes a special token, and makes programs short."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wmrl_jax.errors import UserError
from wmrl_jax.models.tokenizer import load_tokenizer, train_tokenizer

PROGRAM = """import os
import pandas as pd
from sklearn.ensemble import RandomForestClassifier

train = pd.read_csv(os.environ["DATA_DIR"] + "/train.csv")
y = train["{target}"]
model = RandomForestClassifier(n_estimators={trees}, max_depth={depth})
model.fit(train.drop(columns=["{target}"]), y)
"""
TEXTS = [
    PROGRAM.format(target=("price", "Survived", "label")[i % 3], trees=i * 37 % 400, depth=i % 13)
    for i in range(200)
]
TOKENIZER = train_tokenizer(TEXTS, 1024)
SPECIAL = {TOKENIZER.pad_id, TOKENIZER.eos_id, TOKENIZER.outcome_id, *TOKENIZER.outcome_ids}


@settings(deadline=None)
@given(st.text() | st.text(alphabet="\"'\n\r\t ab1_é⟨⟩padend"))
def test_any_text_comes_back_unchanged_and_without_special_tokens(text):
    ids = TOKENIZER.encode(text)

    assert TOKENIZER.decode(ids) == text
    assert SPECIAL.isdisjoint(ids)


@pytest.mark.parametrize("name", ["⟨pad⟩", "⟨end⟩", "⟨outcome⟩", "⟨outcome 3⟩"])
def test_the_name_of_a_special_token_is_ordinary_text_even_if_trained_on(name):
    for tokenizer in (TOKENIZER, train_tokenizer([name * 50] * 50, 1024)):
        ids = tokenizer.encode(f"a {name} b")
        assert SPECIAL.isdisjoint(ids)
        assert tokenizer.decode(ids) == f"a {name} b"


def test_special_tokens_are_distinct_and_left_out_of_the_text():
    assert len(SPECIAL) == 3 + len(TOKENIZER.outcome_ids)
    assert max(SPECIAL) < TOKENIZER.vocab_size
    assert TOKENIZER.decode([TOKENIZER.pad_id, *TOKENIZER.encode("x"), TOKENIZER.eos_id]) == "x"


def test_a_line_that_many_programs_share_is_one_token():
    assert len(TOKENIZER.encode("import pandas as pd\n")) == 1
    assert len(TOKENIZER.encode(TEXTS[5])) <= 3 * TEXTS[5].count("\n")


def test_numbers_and_names_never_seen_are_written_with_known_tokens():
    unseen = PROGRAM.format(target="Längengrad_µ", trees=98765, depth=4321)

    assert TOKENIZER.decode(TOKENIZER.encode(unseen)) == unseen
    assert len(TOKENIZER.encode(unseen)) < len(unseen) / 3


def test_a_quoted_name_is_written_alike_wherever_it_stands():
    name = TOKENIZER.encode("Survived")
    for text in ('x = train["Survived"]\n', "drop(columns=['Survived', 'Age'])", '"Survived"'):
        ids = TOKENIZER.encode(text)
        assert any(ids[i : i + len(name)] == name for i in range(len(ids)))


def test_a_batch_is_encoded_as_its_texts_are_one_by_one():
    texts = [TEXTS[0], "", "é\n"]

    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


def test_training_twice_gives_the_same_tokenizer():
    again = train_tokenizer(TEXTS, 1024)

    assert [again.encode(text) for text in TEXTS[:20]] == [
        TOKENIZER.encode(text) for text in TEXTS[:20]
    ]


def test_broken_utf8_decodes_to_the_replacement_character():
    first_byte = TOKENIZER.encode("é")[:1]

    assert TOKENIZER.decode(first_byte) == "\ufffd"


def test_saving_and_loading_keeps_ids_and_encoding(tmp_path):
    TOKENIZER.save(tmp_path / "new" / "folder")

    loaded = load_tokenizer(tmp_path / "new" / "folder")

    assert loaded.encode(TEXTS[3]) == TOKENIZER.encode(TEXTS[3])
    assert loaded.vocab_size == TOKENIZER.vocab_size
    assert loaded.outcome_ids == TOKENIZER.outcome_ids


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(UserError, match="at least"):
        train_tokenizer(TEXTS, 256)


def test_a_missing_or_foreign_file_is_named_in_the_error(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(UserError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
