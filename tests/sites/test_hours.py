"""A site's hours: which minutes of the week they hold, and when they begin next."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from raafl.errors import BadInput
from raafl.sites.policy import DAYS, Hours, opens_at

MONDAY = datetime(2026, 11, 23)


def minutes(*texts):
    """The minutes of a week that the hours hold, by looking at each."""
    hours = [Hours.parse("hours", text) for text in texts]
    return {n for n in range(7 * 24 * 60) if opens_at(hours, MONDAY + timedelta(minutes=n)) is None}


def of_day(day, start, end):
    return {(DAYS.index(day) * 1440 + n) % (7 * 1440) for n in range(start, end)}


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_begins():
    # Sunday's ends on Monday: the week goes round
    assert minutes("fri,sun 22:30-06:00") == of_day("fri", 1350, 1800) | of_day("sun", 1350, 1800)


def test_days_are_a_range_that_may_go_round_a_list_or_both():
    day = set().union(*(of_day(day, 0, 1440) for day in ("sat", "sun", "mon", "wed")))
    assert minutes("sat-mon,wed 00:00-24:00") == day
    assert minutes("tue 00:00-00:01", "tue 00:30-00:31") == {1440, 1470}
    assert len(minutes("mon-sun 08:00-08:00")) == 7 * 1440  # an end that is not after the start is a day later


def test_the_next_opening_is_the_first_minute_that_is_open():
    hours = [Hours.parse("hours", "tue 10:00-11:00"), Hours.parse("hours", "thu 09:30-09:45")]
    for at in (MONDAY, MONDAY + timedelta(days=1, hours=11), MONDAY + timedelta(days=5)):
        later = at
        while opens_at(hours, later) is not None:
            later += timedelta(minutes=1)
        assert opens_at(hours, at) == later
    assert opens_at(hours, MONDAY + timedelta(days=1, hours=10, seconds=59)) is None
    assert opens_at([], MONDAY) is None


@pytest.mark.parametrize(
    "text", ["always", "mon 8:00-9:00", "mon-fri-sat 08:00-09:00", "mon 25:00-26:00", "mon 08:60-09:00", ""]
)
def test_other_texts_are_refused(text):
    with pytest.raises(BadInput, match=r"^policy.hours\[0\] is '.*': give "):
        Hours.parse("policy.hours[0]", text)
