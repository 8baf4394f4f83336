"""Write plain values as YAML, and load it: what users write, with no key twice in a mapping; what strangers send, within limits."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.errors import BadInput, no_utf8

if TYPE_CHECKING:
    import yaml

LARGEST = 2**63 - 1
# limits of YAML from other people: number of values (or of the text's characters, if it has more), depth of nesting
_MAX_VALUES, _MAX_DEPTH = 100_000, 24


@cache
def dumper_class() -> type[yaml.SafeDumper]:
    """Return PyYAML's writer of plain values, which here quotes each text that some reader of a config takes for a number."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """YAML writer that knows numbers such as 1e5."""

    # a number for jsonargparse, as in YAML 1.2, and a text for PyYAML
    number = re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]*[eE][-+]?[0-9]+$")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Dumper


def dump_yaml(value: object, **options: Any) -> str:
    """Write plain values as YAML in their own order, so that every reader of a config has them back as they are.

    Args:
        value: the plain values.
        **options: arguments of `yaml.dump`.
    """
    import yaml

    return str(yaml.dump(value, Dumper=dumper_class(), sort_keys=False, **options))


def load_yaml(text: str) -> Any:
    """Parse YAML with plain values; a key that a mapping has twice is an error, since the first value would vanish.

    Raises:
        yaml.YAMLError: the text is not such YAML; `yaml_problem` describes the error.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader that compares the keys of each mapping, before merge keys (`<<`) add those of other mappings."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            """Compose a mapping; raise an error if it has a key twice."""
            node = super().compose_mapping_node(anchor)
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and not key.tag.endswith((":merge", ":value")):
                    name = self.construct_object(key)
                    if name in seen:
                        raise yaml.composer.ComposerError(None, None, f"'{key.value}' is given twice", key.start_mark)
                    seen.add(name)
            return node

    try:
        return yaml.load(text, Loader)
    except (ValueError, RecursionError) as error:  # PyYAML raises these for values such as a date in month 13
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


def read_yaml(path: Path, what: str, fault: str = "is not valid YAML") -> Any:
    """Read a YAML file by `load_yaml`.

    Raises:
        BadInput: the file is not text in UTF-8, or not YAML.
        OSError: the file cannot be read.
    """
    import yaml

    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise BadInput(f"{what} {fault}: {yaml_problem(error)}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{what} {no_utf8(error)}") from None


def yaml_problem(error: yaml.YAMLError) -> str:
    """Describe an error of `load_yaml` in one line, with line and column where they are known."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return where + " ".join(str(getattr(error, "problem", None) or error).split())


def load_untrusted_yaml(text: str) -> dict[str, Any]:
    """Parse a YAML mapping from an untrusted source: only plain values are allowed, and the size is limited.

    Raises:
        ValueError: the text is not such a mapping, or is too large.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader for plain values without merge keys (`<<`), since these let a short text fill the memory."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Raise an error if a mapping has a merge key (`<<`); configs that raafl writes have none."""
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise yaml.YAMLError("a merge key")

    try:
        tree = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not YAML with plain values ({type(error).__name__})") from None
    if not isinstance(tree, dict):
        raise ValueError("it is not a mapping of fields")
    # a list of thousands of devices is read; without aliases no text has more values than characters
    num, most, level = 0, max(_MAX_VALUES, len(text)), [tree]
    for _ in range(_MAX_DEPTH):
        below = []
        for value in level:
            found = inside(value)
            below += found
            num += len(found)
            if any(type(one) is int and abs(one) > LARGEST for one in found):
                raise ValueError("it has a number of more than 64 bits")
            if num > most:  # a short text can expand to very many values by aliases of aliases
                raise ValueError(f"it has more than {most:,} values")
        level = below
    if level:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    return tree


def inside(value: object) -> list[Any]:
    """List the direct children of a mapping (keys and values) or a list; return [] for anything else."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []
