"""Load YAML files that users write: plain values only, and no key twice in a mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    except (ValueError, RecursionError) as error:  # such as a date with a month 13
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


def yaml_problem(error: yaml.YAMLError) -> str:
    """Describe an error of `load_yaml` in one line, with line and column where they are known."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return where + " ".join(str(getattr(error, "problem", None) or error).split())
