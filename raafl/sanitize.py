"""Make text from other people safe to print on a terminal, in a log or in a table.

Whatever a peer says that is shown or kept goes through `sanitize_text` where it comes in: names in HELLO, reasons of a STOP or a
refusal, names of metrics, fields of a config that differ. So does what is shown of a run folder that somebody else may have
made (`sanitize_tree`).
"""

from __future__ import annotations

import re
from typing import Any, Final

MOST = 200
"""Largest number of characters kept of a text from others."""
URL: Final = re.compile(r"([a-z0-9+.-]*)://(.*)", re.S | re.I)
"""Pattern of a URL: scheme and rest."""
LARGEST = 2**63 - 1
_MAX_VALUES, _MAX_DEPTH = 100_000, 24  # limits of YAML from other people: number of values, depth of nesting


def is_url(text: object) -> bool:
    """Check whether a text is meant as a URL, and not as a path; the URL may lack its scheme or bucket."""
    return isinstance(text, str) and URL.fullmatch(text) is not None


def sanitize_text(text: object, most: int = MOST) -> str:
    """Return ``text`` as one line of at most ``most`` characters that are safe to print on a terminal.

    Line breaks, control characters, escape sequences, invisible characters and lone surrogates become backslash
    escapes. A shortened text ends in an ellipsis. Applying the function twice changes nothing more.
    """
    whole = str(text)
    if len(whole) <= most and whole.isprintable():
        return whole
    clean = "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in whole[: most + 1]
    )
    return clean if len(clean) <= most and len(whole) <= most else clean[: most - 1] + "…"


def sanitize_tree(value: object, most: int = 1000) -> Any:
    """Apply `sanitize_text` to every text in nested plain data, including the keys of mappings; return the result."""
    if isinstance(value, str):
        return sanitize_text(value, most)
    if isinstance(value, dict):
        return {sanitize_tree(name, most): sanitize_tree(item, most) for name, item in value.items()}
    return [sanitize_tree(item, most) for item in value] if isinstance(value, list) else value


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
    num, level = 0, [tree]
    for _ in range(_MAX_DEPTH):
        below = []
        for value in level:
            found = inside(value)
            below += found
            num += len(found)
            if any(type(one) is int and abs(one) > LARGEST for one in found):
                raise ValueError("it has a number of more than 64 bits")
            if num > _MAX_VALUES:  # a short text can expand to very many values by aliases of aliases
                raise ValueError(f"it has more than {_MAX_VALUES:,} values")
        level = below
    if level:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    return tree


def inside(value: object) -> list[Any]:
    """List the direct children of a mapping (keys and values) or a list; return [] for anything else."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []
