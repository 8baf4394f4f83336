"""Parse the hours of the week in which a client's site works, such as ``mon-fri 20:00-06:00``, and find when they begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from raafl.errors import BadInput

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TEXT = re.compile(r"([a-z]{3}(?:[-,][a-z]{3})*)\s+(\d\d):(\d\d)-(\d\d):(\d\d)")
_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """A window of time on certain days of the week, in the local time of the machine."""

    days: frozenset[int]  # days on which the window begins, Monday = 0
    start: int  # minute of the day at which the window begins, from 0
    minutes: int  # length of the window, 1 to 1440; it may end on the day after

    @classmethod
    def parse(cls, field: str, text: str) -> Hours:
        """Parse ``DAYS HH:MM-HH:MM``, where days are three letters each, listed (``sat,sun``) or as a range (``mon-fri``).

        Raises:
            BadInput: the text is not of that form.
        """
        match = _TEXT.fullmatch(text.strip().lower())
        days = None if match is None else _days(match[1])
        if match is None or days is None:
            raise BadInput(
                f"{field} is '{text}': give days and hours, such as 'mon-fri 20:00-06:00' or 'sat,sun 00:00-24:00'"
            )
        start, end = int(match[2]) * 60 + int(match[3]), int(match[4]) * 60 + int(match[5])
        if start >= _MINUTES or end > _MINUTES or match[3] >= "60" or match[5] >= "60":
            raise BadInput(f"{field} is '{text}': give hours from 00:00 to 24:00")
        return cls(days, start, end - start if end > start else end - start + _MINUTES)

    def holds(self, at: datetime) -> bool:
        """Check whether a local time is within these hours."""
        return any(begin <= at < begin + timedelta(minutes=self.minutes) for begin in self._around(at))

    def next_start(self, at: datetime) -> datetime:
        """Return the next time after ``at`` at which these hours begin, in local time."""
        return min(begin for begin in self._around(at) if begin > at)

    def _around(self, at: datetime) -> list[datetime]:
        """List the beginnings from the day before ``at`` to a week after it."""
        midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
        days = (midnight + timedelta(days=number) for number in range(-1, 8))
        return [day + timedelta(minutes=self.start) for day in days if day.weekday() in self.days]


def opens_at(hours: Sequence[Hours], at: datetime) -> datetime | None:
    """Return the next time at which any of these hours begin; None if ``at`` is within some of them, or there are none."""
    if not hours or any(window.holds(at) for window in hours):
        return None
    return min(window.next_start(at) for window in hours)


def _days(text: str) -> frozenset[int] | None:
    """Return the numbers of the days that ``text`` names; None where it names something else."""
    days: set[int] = set()
    for part in text.split(","):
        names = part.split("-")
        if len(names) > 2 or not set(names) <= set(DAYS):
            return None
        first, last = DAYS.index(names[0]), DAYS.index(names[-1])
        days |= {number % 7 for number in range(first, last + 1 if last >= first else last + 8)}
    return frozenset(days)
