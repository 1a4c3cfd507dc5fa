from wmrl_jax.tasks.corpus.traits import traits_of
from wmrl_jax.tasks.task import Task


def test_a_table_with_gaps_and_categories_is_seen_as_such(suite: dict[str, Task]) -> None:
    traits = traits_of(suite["cars-mpg"])
    assert (traits.kind, traits.output, traits.target) == ("tabular", "number", "mpg")
    assert "horsepower" in traits.numeric and "origin" in traits.categorical
    assert traits.missing_numeric and traits.non_negative and not traits.refuses_negative


def test_a_metric_without_a_value_for_negative_predictions_is_seen(suite: dict[str, Task]) -> None:
    assert traits_of(suite["randhie-visits"]).refuses_negative


def test_ordered_classes_are_seen_with_their_largest(suite: dict[str, Task]) -> None:
    traits = traits_of(suite["anes96-party"])
    assert traits.output == "label" and traits.ordinal
    assert (traits.largest, traits.classes) == (6, 7)


def test_text_of_single_words_is_told_from_text_of_several(suite: dict[str, Task]) -> None:
    names, places = traits_of(suite["names-gender"]), traits_of(suite["airport-region"])
    assert (names.kind, names.text, names.single_words) == ("text", "name", True)
    assert (places.kind, places.text, places.single_words) == ("text", "place", False)


def test_pixels_are_no_table(suite: dict[str, Task]) -> None:
    traits = traits_of(suite["digits"])
    assert traits.kind == "image" and traits.output == "label" and len(traits.numeric) == 64


def test_the_metric_decides_what_is_submitted(suite: dict[str, Task]) -> None:
    assert traits_of(suite["breast-cancer"]).output == "probability"
    assert traits_of(suite["seattle-weather"]).output == "label"
