from __future__ import annotations

import pytest

from raafl.sanitize import MOST, cleaned, foreign


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
    assert foreign(text) == shown and foreign(foreign(text)) == shown


def test_every_character_comes_out_printable():
    assert all(foreign(chr(code)).isprintable() for code in range(0x110000))


@pytest.mark.parametrize("text", ["x" * 201, "x" * (1 << 20), "\x1b" * 200, "\x1b" * 51])
def test_a_long_text_is_cut(text):
    assert len(foreign(text)) == MOST and foreign(text).endswith("…")
    assert foreign("x" * 200) == "x" * 200
    assert foreign("abcdef", 4) == "abc…"


def test_plain_data_are_cleaned_within():
    assert cleaned({"a\x1b": [1, None, {"b": "\u202ec"}], "d": 2.5}) == {
        r"a\x1b": [1, None, {"b": r"\u202ec"}],
        "d": 2.5,
    }
