import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.train.report import write_report
from wmrl_jax.train.report.build import SECTIONS

VOID = {"meta", "br", "img", "input", "link", "hr"}
HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"' $x_1^2$ é"


class Page(HTMLParser):
    """The elements, ids, links and text of a page; fails where elements are not nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.ids, self.attributes, self.open, self.text = Counter(), [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())


def parse(path):
    return Page(path.read_text(encoding="utf-8"))


def test_the_report_of_a_whole_run_has_every_section_with_its_pictures(whole_run):
    page = parse(whole_run / "report.html")
    assert set(SECTIONS) <= set(page.ids)
    # Eight sections with pictures, one of them with two, each drawn for wide and narrow windows.
    assert page.tags["svg"] == 2 * 9
    assert page.tags["article"] == 3
    assert ("class", "missing") not in page.attributes


def test_the_same_files_give_the_same_report_and_nothing_else_is_left_behind(whole_run):
    names, text = set(whole_run.iterdir()), (whole_run / "report.html").read_bytes()
    assert write_report(whole_run) == whole_run / "report.html"
    assert (whole_run / "report.html").read_bytes() == text
    assert set(whole_run.iterdir()) == names


def test_ids_are_unique_and_every_reference_inside_the_page_has_its_target(whole_run):
    page = parse(whole_run / "report.html")
    assert [i for i, n in Counter(page.ids).items() if n > 1] == []
    values = [value or "" for _, value in page.attributes]
    targets = {v[1:] for n, v in page.attributes if n == "href"}
    targets |= {t for v in values for t in re.findall(r"url\(#([^)]+)\)", v)}
    assert targets <= set(page.ids)


def test_the_page_asks_for_nothing_from_outside_and_runs_no_script(whole_run):
    text = (whole_run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert not [name for name, _ in page.attributes if name == "src" or name.startswith("on")]
    assert re.findall(r"https?:|//[a-z]|@import|url\((?!#)", text) == []


def test_text_from_programs_tasks_and_configuration_cannot_become_markup(make_run):
    folder = make_run(program=HOSTILE)
    for name in ("eval_before.json", "eval_after.json", "samples.jsonl", "fidelity.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("iris-species", json.dumps(HOSTILE)[1:-1]))
    with (folder / "config.yaml").open("a") as config:
        config.write(f"# {HOSTILE}\n")
    versions = [{"python": HOSTILE, HOSTILE: [HOSTILE]}]
    (folder / "versions.json").write_text(json.dumps(versions))
    hostile = folder.rename(folder.with_name("<script>alert(1)<"))
    page = parse(write_report(hostile))
    assert page.tags["script"] == page.tags["img"] == 0
    assert page.words.count(HOSTILE) >= 6


def test_the_headline_says_what_was_measured(whole_run):
    after = json.loads((whole_run / "eval_after.json").read_text())
    before = json.loads((whole_run / "eval_before.json").read_text())
    gain = after["splits"][0]["reward"]["mean"] - before["splits"][0]["reward"]["mean"]
    words = parse(whole_run / "report.html").words
    assert f"rose by {gain:+.3f} on the training tasks" in words
    assert "87.5 %" in words  # seven groups of eight
    assert "420 of 480" in words
    assert "2.0 min instead of 15.7 min" in words  # 118 s of one group in eight: 944 s
    assert "finished" in words
    assert "world model and anchors, both corrections" in words


@pytest.mark.parametrize("kept", ["", "config.yaml", "metrics.jsonl", "pairs.jsonl", "ledger.json"])
def test_a_run_of_which_nearly_everything_is_missing_says_so(make_run, kept):
    folder = make_run(steps=3)
    for path in folder.iterdir():
        if path.name != kept:
            path.unlink()
    page = parse(write_report(folder))
    assert set(SECTIONS) <= set(page.ids)
    assert "in progress" in page.words
    assert "eval_before.json and eval_after.json are missing" in page.words


@pytest.mark.parametrize("content", ["", '{"half', "[1, 2]\n[3]\n", '{"step": null}\n', "\0"])
def test_files_that_are_broken_leave_a_report_that_says_so(make_run, content):
    folder = make_run(steps=2)
    for path in folder.iterdir():
        path.write_text(content)
    page = parse(write_report(folder))
    assert set(SECTIONS) <= set(page.ids)
    assert ("class", "missing") in page.attributes


def test_a_run_after_its_first_step_has_a_report(make_run):
    folder = make_run(steps=1)
    (folder / "eval_after.json").unlink()
    words = parse(write_report(folder)).words
    assert "in progress: step 1 of 60" in words
    assert "eval_after.json is missing" in words


def test_steps_without_any_known_number_have_a_report(make_run):
    folder = make_run(steps=2)
    lines = [{"step": 1, "reward_executed": None, "kl": "text"}, {"step": 2}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert "No rewards yet" in parse(write_report(folder)).words


def test_programs_that_are_cut_short_are_warned_of(make_run):
    folder = make_run(steps=2)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(
        re.sub(r'"truncation_rate": [^,}]+', '"truncation_rate": 0.8', text)
    )
    assert "80 % of the latest programs were cut" in parse(write_report(folder)).words


def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="nowhere is no folder"):
        write_report(tmp_path / "nowhere")


def test_a_run_without_anchors_says_why_it_has_no_pairs(make_run):
    folder = make_run(steps=2)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("source: mixed", "source: execution"))
    for name in ("pairs.jsonl", "curves.jsonl"):
        (folder / name).unlink()
    words = parse(write_report(folder)).words
    assert "GRPO on real execution" in words
    assert "There are no anchors in this run: reward.source is execution." in words
