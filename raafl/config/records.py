"""Read a dataclass of options from a file of its own, with the checks and messages of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from raafl.config.messages import ErrorCollector, Wrong, parser_of, relative, yaml_line
from raafl.errors import BadInput

Record = TypeVar("Record")


def make_record(tree: Mapping[str, Any], kind: type[Record], name: str, file: str) -> Record:
    """Build a dataclass of options from the content of a file.

    Raises:
        BadInput: a field is unknown or has a wrong value; the message has a line for each.
    """
    assert is_dataclass(kind)
    parser = parser_of(kind)
    checked, problems = ErrorCollector(parser), []
    for field, value in tree.items():
        try:
            checked.arguments({field: value}, kind, name, kind.__name__)
        except Wrong as wrong:
            line = yaml_line(file, wrong.field.removeprefix(f"{name}.")) or yaml_line(file, str(field))
            problems.append(f"{wrong}{'' if line is None else f' ({relative(file)}, line {line})'}")
    if problems:
        raise BadInput("\n".join(problems))
    made: Record = parser.instantiate(parser.parse_object({"of": dict(tree)})).of
    return made
