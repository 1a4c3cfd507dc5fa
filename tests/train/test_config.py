"""The configuration: every field is documented and read, and every arm's file loads."""

import ast
import dataclasses
from pathlib import Path

import pytest

from wmrl_jax.train import config as config_module
from wmrl_jax.train.config import Config
from wmrl_jax.train.config_loader import load_config, schema

ROOT = Path(__file__).parents[2]
SECTIONS = {
    item.name: type(getattr(Config(), item.name)).__name__
    for item in dataclasses.fields(Config)
    if dataclasses.is_dataclass(getattr(Config(), item.name))
}


def protocols(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Protocol classes that a section satisfies, as lower layers write them, with the sections."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in node.bases):
            members = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
            members |= {ast.unparse(m.target) for m in node.body if isinstance(m, ast.AnnAssign)}
            found[node.name] = {
                cls
                for cls in SECTIONS.values()
                if members
                <= {item.name for item in dataclasses.fields(getattr(config_module, cls))}
            }
    return found


def holders_of_sections(tree: ast.Module, kinds: dict[str, set[str]]) -> dict[str, set[str]]:
    """Names in a file that hold a section, by annotation or by assignment, with its classes."""
    holders: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            words = {ast.unparse(w).rpartition(".")[2] for w in ast.walk(node.annotation)}
            for word in words & kinds.keys():
                holders.setdefault(name, set()).update(kinds[word])
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
                else:
                    pairs.append((target, node.value))
        for target, value in pairs:
            if isinstance(value, ast.Attribute) and value.attr in SECTIONS:
                holders.setdefault(ast.unparse(target), set()).add(SECTIONS[value.attr])
    return holders


def fields_read(trees: list[ast.Module]) -> set[tuple[str, str]]:
    """(class, field) pairs of the configuration that the sources read."""
    kinds = {cls: {cls} for cls in [*SECTIONS.values(), "Config"]} | protocols(trees)
    read: set[tuple[str, str]] = set()
    for tree in trees:
        holders = holders_of_sections(tree, kinds)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            if isinstance(node.value, ast.Attribute) and node.value.attr in SECTIONS:
                read.add((SECTIONS[node.value.attr], node.attr))
            for cls in holders.get(ast.unparse(node.value), ()):
                read.add((cls, node.attr))
    return read


def test_every_field_is_read_somewhere_outside_the_configuration_itself() -> None:
    own = {"config.py", "config_loader.py", "config_check.py"}
    paths = [path for path in (ROOT / "wmrl_jax").rglob("*.py") if path.name not in own]
    read = fields_read([ast.parse(path.read_text()) for path in paths])

    unread = [
        path
        for path in schema()
        if (SECTIONS.get(path.partition(".")[0], "Config"), path.rpartition(".")[2]) not in read
    ]

    assert unread == []


def test_the_search_for_reads_sees_chains_annotations_variables_and_protocols() -> None:
    source = """
def f(config: Config, sampler: SamplerConfig | None):
    train, loss = config.train, config.loss
    return config.model.width, sampler.top_k, train.steps, loss.name, other.groups

class Tuning(Protocol):
    epochs: float
    warmup_steps: int

def g(tuning: Tuning):
    return tuning.epochs
"""
    found = fields_read([ast.parse(source)])

    assert {
        ("ModelConfig", "width"),
        ("SamplerConfig", "top_k"),
        ("TrainConfig", "steps"),
        ("LossConfig", "name"),
        ("WarmStartConfig", "epochs"),
    } <= found
    assert ("TrainConfig", "groups") not in found


def test_every_section_has_a_sentence_that_the_listing_can_print() -> None:
    for name in SECTIONS.values():
        assert getattr(config_module, name).__doc__.strip().endswith(".")


@pytest.mark.parametrize(
    ("file", "source", "debias", "denoise"),
    [
        ("quickstart", "mixed", True, True),
        ("grpo", "execution", False, False),
        ("world_model_only", "world_model", False, False),
        ("no_debias", "mixed", False, True),
        ("no_denoise", "mixed", True, False),
    ],
)
def test_the_arms_differ_in_name_source_and_corrections_alone(
    file: str, source: str, debias: bool, denoise: bool
) -> None:
    quickstart = load_config(ROOT / "configs/quickstart.yaml")

    arm = load_config(ROOT / f"configs/{file}.yaml")

    assert (arm.reward.source, arm.corrections.debias, arm.corrections.denoise) == (
        source,
        debias,
        denoise,
    )
    assert arm.name == file
    restored = dataclasses.replace(
        arm,
        name=quickstart.name,
        reward=quickstart.reward,
        corrections=dataclasses.replace(arm.corrections, debias=True, denoise=True),
    )
    assert restored == quickstart
