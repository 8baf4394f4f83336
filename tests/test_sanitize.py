from __future__ import annotations

import pytest

from raafl.sanitize import MOST, sanitize_text, sanitize_tree


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("phone", "phone"),
        ("Gerät Nr. 3, 電話", "Gerät Nr. 3, 電話"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),  # CSI in one character
        ("abc\u202edcba\u2066x\u200f", r"abc\u202edcba\u2066x\u200f"),
        ("one\u2028two\u2029three\x85four", r"one\u2028two\u2029three\x85four"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("half \udc80", r"half \udc80"),
        ("\U000e0041tag", r"\U000e0041tag"),
        (None, "None"),
        (float("nan"), "nan"),
    ],
)
def test_what_steers_a_terminal_is_shown_and_not_done(text, shown):
    assert sanitize_text(text) == shown and sanitize_text(sanitize_text(text)) == shown


def test_every_character_comes_out_printable():
    """Of the planes that hold characters each one, of those that are empty or for private use, alike throughout, some."""
    codes = [*range(0x40000), *range(0x40000, 0x110000, 97), *range(0xE0000, 0xE0200), 0x10FFFF]
    assert all(sanitize_text(chr(code)).isprintable() for code in codes)


@pytest.mark.parametrize("text", ["x" * 201, "x" * (1 << 20), "\x1b" * 200, "\x1b" * 51])
def test_a_long_text_is_cut(text):
    assert len(sanitize_text(text)) == MOST and sanitize_text(text).endswith("…")
    assert sanitize_text("x" * 200) == "x" * 200
    assert sanitize_text("abcdef", 4) == "abc…"


def test_plain_data_are_cleaned_within():
    assert sanitize_tree({"a\x1b": [1, None, {"b": "\u202ec"}], "d": 2.5}) == {
        r"a\x1b": [1, None, {"b": r"\u202ec"}],
        "d": 2.5,
    }
