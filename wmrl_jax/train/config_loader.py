"""YAML and `--set` into the frozen dataclasses of `config`, and back to YAML with comments.

Every fault of a file or an override is one `UserError`: where it stands, what is wrong, and the
nearest right name. A key that no field has is an error, and so is a key that stands twice.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import math
import re
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from wmrl_jax.errors import UserError, did_you_mean
from wmrl_jax.train import config as config_module
from wmrl_jax.train.config import Bounds, Config
from wmrl_jax.train.config_check import check_config

EXTENDS = "extends"
"""The one key of a file that is no field: another file, relative to this one, that it changes."""


class FieldInfo(NamedTuple):
    """One field of the configuration.

    Attributes:
      path: dotted name, `train.group_size`.
      kind: its type without the bounds.
      bounds: the allowed range of a number, else None.
      default: its value where nothing is said.
      comment: its documentation, empty where the name says enough.
    """

    path: str
    kind: Any
    bounds: Bounds | None
    default: Any
    comment: str


def load_config(path: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file (None: the defaults) with `a.b=value` overrides on top.

    Raises:
      UserError: the file cannot be read, a key is unknown or stands twice, a value has the wrong
        type or is out of range, or the values do not fit together.
    """
    values: dict[str, Any] = {} if path is None else _file_values(Path(path), seen=())
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UserError(f"--set {override}: write it as name=value, train.steps=20 say")
        where = f"--set {override}"
        if name not in schema():
            raise UserError(f"{where}: {_unknown(name)}")
        values[name] = _coerce(schema()[name], _parse_yaml(text, where), where)
    config = config_from_values(values)
    check_config(config)
    return config


@functools.cache
def schema() -> dict[str, FieldInfo]:
    """Every field of the configuration by its dotted name, in the order of the dataclasses."""
    comments = _field_comments()
    found: dict[str, FieldInfo] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = get_type_hints(cls, include_extras=True)
        for item in dataclasses.fields(cls):
            hint = hints[item.name]
            if dataclasses.is_dataclass(hint):
                assert isinstance(hint, type)
                walk(hint, f"{prefix}{item.name}.")
                continue
            bounds = None
            if get_origin(hint) is Annotated:
                hint, bounds = get_args(hint)
            comment = comments.get((cls.__name__, item.name), "")
            path = prefix + item.name
            found[path] = FieldInfo(path, hint, bounds, item.default, comment)

    walk(Config, "")
    return found


def config_values(config: Config) -> dict[str, Any]:
    """Every field's value by its dotted name; the inverse of `config_from_values`."""
    return {path: functools.reduce(getattr, path.split("."), config) for path in schema()}


def config_from_values(values: Mapping[str, Any]) -> Config:
    """A configuration from values by dotted name, defaults elsewhere; nothing is checked."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        sections.setdefault(section, {})[name] = value
    config = dataclasses.replace(Config(), **sections.pop("", {}))
    changed = {
        name: dataclasses.replace(getattr(config, name), **changes)
        for name, changes in sections.items()
    }
    return dataclasses.replace(config, **changed)


def config_listing(config: Config) -> str:
    """The configuration as YAML, every field with its comment; `load_config` reads it back."""
    lines: list[str] = []
    section = ""
    for path, value in config_values(config).items():
        head, _, name = path.rpartition(".")
        if head != section:
            section = head
            doc = inspect.getdoc(type(getattr(config, head))) or ""
            lines += ["", f"# {doc.splitlines()[0]}", f"{head}:"]
        remark = _remark(schema()[path])
        indent = "  " if head else ""
        lines.append(f"{indent}{name}: {_yaml_scalar(value)}" + (f"  # {remark}" if remark else ""))
    return "\n".join(lines) + "\n"


def _file_values(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file by dotted name, those of the file that it extends below them."""
    where = str(path)
    if path.resolve() in seen:
        raise UserError(f"{where}: the files that extend each other go in a circle")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = sorted(str(other) for other in path.parent.glob("*.yaml"))
        raise UserError(f"{where}: no such file{did_you_mean(where, others)}") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{where}: cannot be read as text ({fault})") from None
    tree = _parse_yaml(text, where)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{where}: must be a mapping of sections, not {_describe(tree)}")
    values: dict[str, Any] = {}
    if EXTENDS in tree:
        parent = tree.pop(EXTENDS)
        if not isinstance(parent, str):
            raise UserError(f"{where}: extends must name a file, not {_describe(parent)}")
        values = _file_values(path.parent / parent, (*seen, path.resolve()))
    for name, value in _flatten(tree, where).items():
        values[name] = _coerce(schema()[name], value, where)
    return values


def _flatten(tree: dict[Any, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Dotted names and raw values of a nested mapping; an unknown key is an error."""
    sections = {path.rpartition(".")[0] for path in schema()} - {""}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in schema():
            values[name] = value
        elif name not in sections:
            raise UserError(f"{where}: {_unknown(name)}")
        elif isinstance(value, dict):
            values |= _flatten(value, where, f"{name}.")
        elif value is not None:
            raise UserError(
                f"{where}: {name} is a section and needs its keys below it, not {_describe(value)}"
            )
    return values


def _unknown(name: str) -> str:
    """Sentence on an unknown key, with the nearest right name: same section, same leaf, any."""
    known = list(schema())
    section, _, leaf = name.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == section]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    if any(path.startswith(f"{name}.") for path in known):
        return f"{name} is a section; set one of its keys, {name}.{_first_leaf(name)} for instance"
    if same_leaf and not did_you_mean(name, siblings):
        return f"unknown key {name}; did you mean '{same_leaf[0]}'?"
    sections = sorted({path.partition(".")[0] for path in known})
    hint = (
        did_you_mean(name, siblings)
        or (did_you_mean(name, sections) if not section else "")
        or did_you_mean(name, known)
        or "; `wmrl config` lists them all"
    )
    return f"unknown key {name}{hint}"


def _first_leaf(section: str) -> str:
    return next(path for path in schema() if path.startswith(f"{section}.")).rpartition(".")[2]


def _coerce(info: FieldInfo, value: Any, where: str) -> Any:
    """The value as the field's type, within its range."""
    kind = info.kind

    def wrong(expected: str) -> UserError:
        return UserError(f"{where}: {info.path} must be {expected}, not {_describe(value)}")

    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise UserError(
                f"{where}: {info.path} must be one of {', '.join(choices)}, "
                f"not {_describe(value)}{hint}"
            )
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong("on or off")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise wrong("a list of names such as [wine, iris]")
        return tuple(value)
    if kind == (str | None) and value is None:
        return None
    if kind is str or kind == (str | None):
        if not isinstance(value, str):
            raise wrong("text (put it in quotes)")
        return value
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise wrong("a whole number" if kind is int else "a number")
    if info.bounds is not None and not _inside(value, info.bounds):
        raise UserError(f"{where}: {info.path} is {value} but must be {_range_text(info.bounds)}")
    return kind(value)


def _inside(value: float, bounds: Bounds) -> bool:
    above = value > bounds.low if bounds.open_low else value >= bounds.low
    return above and value <= bounds.high and math.isfinite(value)


def _range_text(bounds: Bounds) -> str:
    if bounds.high == math.inf:
        return f"above {bounds.low}" if bounds.open_low else f"at least {bounds.low}"
    low = f"above {bounds.low} and " if bounds.open_low else f"between {bounds.low} and "
    return f"{low}at most {bounds.high}" if bounds.open_low else f"{low}{bounds.high}"


def _describe(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)


def _remark(info: FieldInfo) -> str:
    """The field's comment, with its choices or its two-sided range."""
    parts = [info.comment] if info.comment else []
    if get_origin(info.kind) is Literal and len(get_args(info.kind)) > 1:
        parts.append(" | ".join(get_args(info.kind)))
    elif info.bounds is not None and info.bounds.high < math.inf:
        parts.append(_range_text(info.bounds))
    return "; ".join(parts)


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    plain = list(value) if isinstance(value, tuple) else value
    # Unprintable characters, YAML's own line breaks among them, survive as escapes only.
    words = value if isinstance(value, tuple) else [str(value)]
    readable = all(word.isprintable() for word in words)
    text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf, allow_unicode=readable)
    return text.removesuffix("...\n").strip()


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand once, and 1e-4 is a number as in YAML 1.2."""


def _mapping_without_twins(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            line = node.value[position][0].start_mark.line + 1
            raise yaml.constructor.ConstructorError(None, None, f"line {line}: {key} stands twice")
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_twins)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(fault, "problem", None) or str(fault).splitlines()[0]
        raise UserError(f"{where}: not valid YAML: {line}{problem}") from None


def _field_comments() -> dict[tuple[str, str], str]:
    """Trailing comments of the fields in the source of `config`, by class and field name."""
    source = inspect.getsource(config_module)
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        (cls.name, item.target.id): by_line[item.lineno]
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for item in cls.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and item.lineno in by_line
    }
