"""Load YAML files that users write: plain values only, and no key twice in a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.errors import BadInput, no_utf8

if TYPE_CHECKING:
    import yaml


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
