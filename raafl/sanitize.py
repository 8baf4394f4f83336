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
