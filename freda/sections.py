"""Dataclasses as TOML sections: built with checks, overridden from the command line, written back.

A key that does not exist fails and names the nearest one that does; a value of the wrong type fails and says which type
is wanted. The sections themselves are in the `config` module of each package.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from freda.errors import FredaError, require
from freda.files import located, parse_toml, read_text

MOST = 2**63  # no setting is larger
NAMED = ("source", "benchmark", "system")  # sections of many tables, each with a name of the user's: [source.math]


def knob(default: Any, help: str, **about: Any) -> Any:
    """A config field: its default and the one line that documents it. Settings that are `stored=True` are kept in model
    folders; one that came later is what it is `absent=` where a folder does not have it."""
    return dataclasses.field(default=default, metadata={"help": help, **about})


def require_at_least(least: int, config: Any, section: str, *names: str) -> None:
    """Reject settings of a section that are below `least`."""
    for name in names:
        require(getattr(config, name) >= least, f"{section}.{name} is {getattr(config, name)}; use {least} or more")


def read_tables(path: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The tables of a TOML file (none without a path) with `section.key=value` overrides applied, in order."""
    values: dict[str, Any] = {}
    if path is not None:
        require(path.exists(), f"there is no config file {path}")
        require(not path.is_dir(), f"{path} is a folder; name a .toml file in it")
        with located(path.parent):
            text = read_text(path)
        try:
            values = parse_toml(text)
        except ValueError as error:
            raise FredaError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        apply_override(values, override)
    return values


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries, the inverse of `build`; unset (None) values are omitted."""
    return dataclasses.asdict(config, dict_factory=lambda pairs: {key: v for key, v in pairs if v is not None})


def tables_as_toml(sections: Mapping[str, Any]) -> str:
    """Sections as the text of a TOML file."""
    lines = []
    for section, values in sections.items():
        tables = {f"{section}.{name}": table for name, table in values.items()}
        for title, table in tables.items() if section in NAMED else [(section, values)]:
            lines += [f"[{title}]", *(f"{key} = {toml_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool | str):  # as in JSON
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into nested dictionaries."""
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    whole = bool(equals and sections) and all((*sections, key))
    require(whole, f"--set wants section.key=value, for example train.lr=3e-4; got {override!r}")
    target: Any = values
    for section in sections:
        target = target.setdefault(section, {}) if isinstance(target, dict) else None
    if isinstance(target, dict):
        try:
            target[key] = parse_toml(f"value = {text}")["value"]
        except ValueError:  # taken as a string, so that paths need no quotes
            target[key] = text.strip()


def build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a table; `where` is the table's name with a dot behind, or empty for the whole file."""
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    hints = {key: hint for key, hint in typing.get_type_hints(kind).items() if key in fields}
    for key in (key for key in values if key not in hints):
        section, near = "key" if where else "section", difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
        guess = f"did you mean '{where}{near[0]}'? (legal: {', '.join(hints)})"
        raise FredaError(f"unknown {section} '{where}{key}'; {guess}")
    arguments = {}
    for key, value in values.items():
        hint, name = section_kind(hints[key]), f"{where}{key}"
        if dataclasses.is_dataclass(hint):
            arguments[key] = _section(typing.cast(type, hint), value, name)
        elif not where and key in NAMED:
            tables = value if isinstance(value, Mapping) else {"NAME": value}
            for title in tables:
                plain = title.isascii() and title.replace("-", "").replace("_", "").isalnum()
                require(plain, f"[{name}.{title}] has a name that is no file name; use letters, digits, - and _")
            kind_ = typing.get_args(hint)[1]
            arguments[key] = {title: _section(kind_, table, f"{name}.{title}") for title, table in tables.items()}
        else:
            arguments[key] = _checked(hint, value, name)
    return kind(**arguments)


def section_kind(hint: Any) -> Any:
    """The dataclass of a section that may be missing (`X | None`); any other type as it is."""
    kinds = [kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind)]
    return kinds[0] if type(None) in typing.get_args(hint) and kinds else hint


def _section(kind: type, values: Any, name: str) -> Any:
    """One section as its dataclass. Sections that carry a name of the user's say it in their errors."""
    table = isinstance(values, Mapping)
    require(table, f"{name} is {_shown(values)}; it is a section: write [{name}] and keys below it")
    if hasattr(kind, "variant"):  # a key of the section says which class it is
        kind, values = kind.variant(values)
    try:
        return build(kind, values, f"{name}.")
    except FredaError as error:
        told = name in str(error) or name.partition(".")[0] not in NAMED
        raise FredaError(str(error) if told else f"{name}: {error}") from None


def _checked(hint: Any, value: Any, name: str) -> Any:
    """`value` as type `hint`, or an error that names both."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        require(value in choices, f"{name} is {_shown(value)}; use one of {', '.join(map(str, choices))}")
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # only `X | None` is used
        return value if value is None else _checked(typing.get_args(hint)[0], value, name)
    if typing.get_origin(hint) is tuple:  # only `tuple[X, ...]` is used; one X alone is a list of one
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_checked(typing.get_args(hint)[0], item, name) for item in items)
    if typing.get_origin(hint) is not None:
        hint = typing.get_origin(hint)
    if hint in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        require(-MOST <= value <= MOST, f"{name} is {_shown(value)}; use a number between -{MOST} and {MOST}")
        value = float(value) if hint is float else value
    right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(hint, "a table")
    require(right, f"{name} is {_shown(value)} ({type(value).__name__}); it must be {wanted}")
    return value


def _shown(value: Any) -> str:
    """A value in an error, cut where it is long; Python refuses to write numbers of more than 4,300 digits."""
    text = hex(value) if isinstance(value, int) and abs(value) > MOST else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
