"""Text that somebody else wrote, made fit for a terminal, a log and a table: the one function for it.

Whatever a peer says that is shown or kept goes through `foreign` where it comes in: names in HELLO, reasons of a STOP or a
refusal, names of metrics, fields of a config that differ.
"""

from __future__ import annotations

MOST = 200
"""Characters kept of a foreign text."""


def foreign(text: object, most: int = MOST) -> str:
    """Return ``text`` on one line, of at most ``most`` characters, none of which steers a terminal or turns text around.

    Line breaks, control and escape characters, bidi and other invisible controls, and halves of surrogate pairs appear as
    backslash escapes; a text that is cut ends in an ellipsis. What was cleaned before comes out as it is.
    """
    whole = str(text)
    clean = "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in whole[: most + 1]
    )
    return clean if len(clean) <= most and len(whole) <= most else clean[: most - 1] + "…"
