"""jsonargparse's complaints as one clear line: the field, its value, and the remedy."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.config.argv import name_of, values
from raafl.config.trainer_flags import unknown
from raafl.errors import nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "Sequence": "a list, such as [200]",
    "dict": "a table",
    "Path": "a path",
}
_PARTS = {"model": "LightningModule", "data": "LightningDataModule", "algorithm": "Algorithm", "partition": "Partition"}
_EXAMPLES = {
    "model": "model_zoo.MLP",
    "data": "raafl.data.Digits",
    "algorithm": "raafl.fed_raa",
    "partition": "raafl.data.Iid",
}


def explain(message: str, parser: ArgumentParser, argv: Sequence[str]) -> str:
    """Return one line for a complaint of jsonargparse's, with the nearest known name where one is misspelt.

    A complaint of a kind that is not known here is returned as it is, on one line.
    """
    text = re.sub(r"\.? Got value: Namespace\(class_path=('[\w.]+').*", r" class_path=\1", " ".join(message.split()))
    for rule in (_unknown, _class_path, _required, _option, _wrong_value):
        line = rule(text, parser)
        if line is not None:
            return line
    return text


def place_of_field(field: str | None, argv: Sequence[str]) -> str:
    """Return where in the config of a command line a field is, in words; empty where no file has it, or an option does."""
    if field is None or any(name_of(item).startswith(f"--{field}") for item in argv):
        return ""
    for file in reversed(values(argv, "--config")):
        path = Path(file)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        number = next((i for i, line in enumerate(lines, start=1) if re.match(rf"{field}\s*:", line)), None)
        if number is not None:
            return f" ({field} is in {relative(file)}, line {number})"
    return ""


def relative(path: str) -> str:
    """Return ``path`` without the current folder before it."""
    return path.removeprefix(str(Path.cwd()) + os.sep)


def _field(text: str) -> str:
    """Return the dotted name of the field that a nested complaint is about."""
    return ".".join(re.findall(r"Parser key \"([\w.]+)\"", text))


def _unknown(text: str, parser: ArgumentParser) -> str | None:
    """A field or option that there is not."""
    if match := re.search(r"unrecognized arguments: (--?)?([\w.+-]+)", text):
        if not match[1]:
            return f"unexpected '{match[2]}': an option starts with --, as in --clients 4"
        options = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
        return unknown(f"unknown option --{match[2]}", f"--{match[2]}", options)
    if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        known = [action.dest for action in parser._actions if action.dest.startswith(match[1] + ".")]
        return unknown(f"unknown field {match[1]}.{match[2]}", f"{match[1]}.{match[2]}", known)
    if match := re.search(r"(?:Option|Key) '([\w.]+)' is not (?:accepted|expected)", text):
        owner = _field(text)
        field = f"{owner}.{match[1]}" if owner else match[1]
        accepted = _accepted(text, parser)
        if not owner:
            return unknown(f"unknown field {field}", field, accepted)
        return f"unknown field {field}: {nearest(match[1], accepted)}"
    return None


def _accepted(text: str, parser: ArgumentParser) -> list[str]:
    """Return the names that would have been accepted where ``text`` says one was not."""
    path = re.search(r"class_path[ =]'([\w.]+)'", text)
    target = _import(path[1]) if path else None
    if callable(target):
        return [name for name in inspect.signature(target).parameters if name != "self"]
    return [action.dest for action in parser._actions if action.option_strings]


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _class_path(text: str, parser: ArgumentParser) -> str | None:
    """A class path that leads nowhere, or to something of another kind."""
    field = _field(text)
    if match := re.search(r"module '([\w.]+)' has no (?:attribute|\w+) '(\w+)'", text):
        known = [f"{match[1]}.{name}" for name in _public(match[1])]
        return f"{field} is {match[1]}.{match[2]}, which does not exist: {nearest(f'{match[1]}.{match[2]}', known)}"
    if match := re.search(r"No module named '([\w.]+)'", text):
        top = match[1].partition(".")[0]
        known = [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
        hint = nearest(top, [*known, "raafl", "model_zoo"])
        if "did you mean" not in hint or importlib.util.find_spec(top):
            hint = "run the command in the folder that holds it, or install the package"
        return f"{field} cannot be imported, there is no module '{match[1]}': {hint}"
    wrong_kind = re.search(r"Import path ([\w.]+) does not correspond|Expected '([\w.]+)' to be a subclass", text)
    no_path = re.search(r"Expected a dot import path string: (.*)$", text)
    part = field.partition(".")[0]
    if wrong_kind and part in _PARTS:
        given = wrong_kind[1] or wrong_kind[2]
        return f"{field} is {given}, which makes no {_PARTS[part]}: give one that does, such as {_EXAMPLES[part]}"
    if part == "devices" and "Expected a dot import path string" in text:
        return "devices holds something else than tables of fields: write each as {name: slow, flops_per_s: 1.0e9}"
    if no_path and part in _PARTS:
        home = _EXAMPLES[part].rpartition(".")[0]
        known = [f"{home}.{name}" for name in _public(home)]
        return f"{field} is '{no_path[1]}': give a class path; {nearest(f'{home}.{no_path[1]}', known)}"
    return None


def _public(module_name: str) -> list[str]:
    """Return the names that a module means to offer: its ``__all__``, or its classes, functions and lazy names."""
    module = sys.modules.get(module_name)
    if module is None:
        return []
    if hasattr(module, "__all__"):
        return list(module.__all__)
    found = [name for name in dir(module) if not name.startswith("_")]
    own = {name: vars(module).get(name) for name in found}
    return [n for n, v in own.items() if v is None or getattr(v, "__module__", "").startswith(module_name)]


def _required(text: str, parser: ArgumentParser) -> str | None:
    """A field without a value or a default."""
    match = re.search(r"the following arguments are required: ([\w.]+(?:, [\w.]+)*)", text)
    match = match or re.search(r'(?:Key|Option) ["\']?([\w.]+)["\']? is required', text)
    if match is None:
        return None
    fields = [f"{_field(text)}.{name}".strip(".") for name in match[1].split(", ")]
    if len(fields) == 1:
        return f"{fields[0]} is missing: give it in the config, or as --{fields[0]} VALUE"
    return (
        f"{', '.join(fields)} are missing: give --config FILE with them, or {', '.join(f'--{f} VALUE' for f in fields)}"
    )


def _option(text: str, parser: ArgumentParser) -> str | None:
    """An option with too few or too many values."""
    if match := re.search(r"argument (--[\w.]+)[^:]*: expected one argument", text):
        return f"{match[1]} needs a value, as in {match[1]} VALUE"
    if match := re.search(r"argument (--[\w.]+)[^:]*: ignored explicit argument '(.*)'", text):
        return f"{match[1]} takes no value: leave '{match[2]}' out"
    return None


def _wrong_value(text: str, parser: ArgumentParser) -> str | None:
    """A value of the wrong type, or one that the field's own check refuses."""
    if match := re.search(r"Expected an? ((?:(?! - ).)+?)\. Got value: (.*?)(?=$| - | Given value| class_path=)", text):
        return f"{_field(text)} is '{match[2]}': give {_kind(match[1])}"
    if "Does not validate against any of the Union" in text:
        tried = re.search(r"Errors: - (.*) Given value type: .*? Given value: (.*)$", text)
        errors = tried[1].split(" - ") if tried else []
        own = [error for error in errors if not error.startswith("Expected a")]
        if own:
            field = _field(text)
            return f"{field}: {own[0]}" if field else own[0]
        kinds = [_kind(error.removeprefix("Expected a").removeprefix("n").strip()) for error in errors]
        if tried and kinds:
            return f"{_field(text)} is '{tried[2]}': give {' or '.join(kinds)}"
    return None


def _kind(name: str) -> str:
    """Return words for a type as jsonargparse prints it."""
    if name.startswith("typing.Literal["):
        return "one of " + ", ".join(re.findall(r"'([^']*)'", name))
    short = re.sub(r"^<class '(.+)'>$", r"\1", name).rpartition(".")[2]
    return "null" if short == "NoneType" else _KINDS.get(short, f"a value of type {short}")
