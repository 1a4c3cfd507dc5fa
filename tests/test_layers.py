"""Imports point one way (DESIGN section 3)."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wmrl_jax"

FOUNDATION = {"errors", "types"}
MIDDLE = {"models", "rollout", "world_model", "sandbox", "tasks"}
ALLOWED = {
    "errors": set(),
    "types": set(),
    "method": FOUNDATION,
    **{layer: {*FOUNDATION, "method", *MIDDLE} for layer in MIDDLE},
    "embodied": {*FOUNDATION, "method", *MIDDLE},
    "train": {*FOUNDATION, "method", *MIDDLE, "embodied"},
    "cli": {*FOUNDATION, "method", *MIDDLE, "embodied", "train"},
}
"""Layers that a layer may import beside itself."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules of this project that a file imports, and whether for its annotations alone."""
    source = ast.parse(path.read_text())
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, typing_only: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                walk(child, True)
            for child in node.orelse:
                walk(child, typing_only)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, typing_only) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found.append((module, typing_only))
            found.extend((f"{module}.{alias.name}", typing_only) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child, typing_only)

    walk(source, False)
    return [(name, only) for name, only in found if name.split(".")[0] == "wmrl_jax"]


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


# The package itself is left out: it offers the public API of the layers below it.
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_a_layer_imports_no_higher_one(path: Path) -> None:
    own = layer(module_name(path))
    higher = sorted(
        {
            name
            for name, typing_only in imports(path)
            if not typing_only
            and layer(name) in ALLOWED
            and layer(name) != own
            and layer(name) not in ALLOWED[own]
        }
    )

    assert higher == [], f"{module_name(path)} is in the layer {own}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_nothing_private_of_another_file_is_imported(path: Path) -> None:
    private = [
        name
        for name, _ in imports(path)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])
    ]

    assert private == []


def test_every_layer_of_the_package_has_its_place_in_the_order() -> None:
    layers = {layer(module_name(path)) for path in FILES}

    assert layers <= ALLOWED.keys()


def test_the_middle_layers_import_each_other_in_no_circle() -> None:
    edges = {
        (layer(module_name(path)), layer(name))
        for path in FILES
        for name, typing_only in imports(path)
        if not typing_only
    }
    below = {one: {b for a, b in edges if a == one and b in MIDDLE and b != one} for one in MIDDLE}

    while below:
        lowest = {one for one, under in below.items() if not under}
        assert lowest, f"these import each other: {below}"
        below = {one: under - lowest for one, under in below.items() if one not in lowest}


def test_the_pure_core_knows_no_model_no_files_and_no_clock() -> None:
    forbidden = {"flax", "optax", "orbax", "os", "pathlib", "time", "random", "subprocess", "io"}
    found = []
    for path in (PACKAGE / "method").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            found += [(path.name, n) for n in names if n.split(".")[0] in forbidden]

    assert found == []


def test_every_import_of_a_third_party_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["suite"], *extras["bench"], *extras["gguf"]]
    names = {d.split(">")[0].split("[")[0].lower().replace("-", "_") for d in declared}
    import_names = {"scikit_learn": "sklearn", "orbax_checkpoint": "orbax", "pyyaml": "yaml"}
    known = {import_names.get(name, name) for name in names} | {"wmrl_jax", "__future__"}
    known |= {"scipy"}  # scikit-learn and JAX both require it
    foreign = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                foreign |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                foreign.add(node.module.split(".")[0])

    assert {n for n in foreign if n.lower() not in known} - sys.stdlib_module_names == set()
