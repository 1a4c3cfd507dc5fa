"""Public names are documented, and what the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

from wmrl_jax.train.config_loader import schema

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "wmrl_jax").rglob("*.py"))


def undocumented(path: Path) -> list[str]:
    """Public modules, classes, functions and methods of a file that have no docstring."""
    tree = ast.parse(path.read_text())
    missing = [] if ast.get_docstring(tree) or not tree.body else [path.name]

    def walk(node: ast.Module | ast.ClassDef, prefix: str, protocol: bool) -> None:
        for item in node.body:
            if not isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if item.name.startswith("_"):
                continue
            if not protocol and not ast.get_docstring(item):
                missing.append(prefix + item.name)
            if isinstance(item, ast.ClassDef):
                is_protocol = any("Protocol" in ast.unparse(base) for base in item.bases)
                walk(item, f"{item.name}.", is_protocol)

    walk(tree, "", False)
    return missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_have_docstrings(path: Path) -> None:
    assert undocumented(path) == []


def test_the_readme_names_only_settings_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    sections = {name.partition(".")[0] for name in schema() if "." in name}

    named = {
        name
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?::[^`]*)?`", readme)
        if name.partition(".")[0] in sections
    }

    assert named
    assert named <= schema().keys()


def test_the_readme_names_only_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()

    named = set(re.findall(r"\b(?:configs|launch|wmrl_jax|tests)/[\w./]+\w", readme))
    named |= {target for target in re.findall(r"\]\(([^)#:]+)\)", readme)}

    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_readme_names_only_commands_that_exist() -> None:
    from wmrl_jax import cli

    readme = (ROOT / "README.md").read_text()
    commands = {
        tuple(words)
        for line in re.findall(r"^(?:\$ )?wmrl ([a-z][a-z -]*)", readme, re.MULTILINE)
        if (words := line.split())
    }

    assert commands
    for words in commands:
        depth = 2 if words[0] in {"tasks", "world-model", "bench"} else 1
        with pytest.raises(SystemExit) as end:
            cli.main([*words[:depth], "--help"])
        assert end.value.code == 0


def loop_of_the_readme(**changes: str) -> float:
    """Runs the example with some text replaced; returns the true reward at its end."""
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return float(names["rewards"][-1])


def test_the_loop_of_the_readme_learns_with_the_corrections_and_is_misled_without() -> None:
    corrected = loop_of_the_readme()
    uncorrected = loop_of_the_readme(
        **{
            "debias.apply(bias, predicted)": "predicted",
            "jnp.sum(~is_anchor))": 'jnp.sum(~is_anchor), rule="fixed")',
        }
    )
    best, bad = 0.9, 0.0
    assert corrected > best - 0.1
    assert uncorrected < bad + 0.1
