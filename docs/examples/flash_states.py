"""Convert the phone states that FLASH recorded to a CSV file for the field `recorded` of devices.

python docs/examples/flash_states.py user_behavior_tiny.json states.csv

A phone is available while it charges with its screen locked or off.
Its link is the profile's on Wi-Fi, and slower on mobile networks.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

LINK = {
    "wifi": 1.0,
    "5G": 0.5,
    "4G": 0.25,
    "3G": 0.05,
    "2G": 0.005,
}  # an assumption: FLASH records networks, not speeds
IDLE = {"screen_off": True, "screen_lock": True, "screen_on": False, "screen_unlock": False}
CHARGING = {"battery_charged_on": True, "battery_charged_off": False}


def rows(phones: Mapping[str, Mapping[str, Any]]) -> Iterator[list[object]]:
    """Yield the rows of the CSV file, its header first; seconds count from the first message of each phone."""
    yield ["device", "time_s", "link", "available"]
    for name, phone in phones.items():
        messages = [line.split("\t") for line in phone["messages"].splitlines() if "\t" in line]
        timed = sorted((datetime.fromisoformat(at.strip()).timestamp(), state.strip()) for at, state in messages)
        is_idle = is_charging = False
        states: dict[float, tuple[float | str, int]] = {}  # the last of each second
        link: float | str = ""
        for at, state in timed:
            is_idle, is_charging = IDLE.get(state, is_idle), CHARGING.get(state, is_charging)
            link = LINK.get(state, link)
            states[at - timed[0][0]] = (link, int(is_idle and is_charging))
        yield from (
            [name, at_s, *state] for at_s, state in states.items() if any(there for _, there in states.values())
        )


if __name__ == "__main__":
    with Path(sys.argv[2]).open("w", newline="") as file:
        csv.writer(file).writerows(rows(json.loads(Path(sys.argv[1]).read_text())))
