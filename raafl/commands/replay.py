"""Parse the options of `raafl replay`, and print the result of a replay."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raafl.config.argv import add_replay_options
from raafl.errors import BadInput


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl replay`."""
    found = ArgumentParser(prog="raafl replay", exit_on_error=False, description="Re-execute a recorded run.")
    found.add_argument("run", metavar="RUN", help="the run's folder, or its URL in an object store")
    found.add_argument("--until", type=int, metavar="EVENT", help="stop after so many events and write a checkpoint")
    add_replay_options(found)
    found.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else, on standard output"
    )
    return found


def client_file(text: str) -> tuple[int, str]:
    """Split `ID=FILE` into the id of a client and the path of a YAML file with its ``data`` section.

    Raises:
        BadInput: the text has another form.
    """
    number, sign, file = text.partition("=")
    if not sign or not number.isdecimal() or not Path(file).is_file():
        raise BadInput(
            f"client_data is '{text}': give ID=FILE, with a client's number and a YAML file that has its data section"
        )
    return int(number), file


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Format the result of `replay` as lines of text."""
    lines = [
        f"replayed {result['events']} events to version {result['versions']}, model digest {result['model_digest']}"
    ]
    lines += [f"warning: {line}; the replay may give other bits" for line in result["differences"]]
    if rows := result["altered"]:
        lines.append(
            f"warning: events.jsonl: row {rows[0]} was altered, or is not the one that followed row {rows[0] - 1}; "
            "`raafl audit RUN` lists all that was changed"
        )
    if result["equal"]:
        lines.append("equal to the recorded run, to the last bit")
    elif result["equal"] is False:
        lines.append(f"NOT equal: the run recorded {result['recorded_digest']}")
    if parted := result["parted_at"]:
        lines.append(
            f"run and replay differ from event {parted['event']} on, {parted['what']}: recorded "
            f"{parted['recorded']}, now {parted['replayed']}"
        )
    if distance := result.get("distance"):
        lines.append(
            f"from the checkpoint of version {distance['version']}: largest difference {distance['max']:.3g}, "
            f"root mean square {distance['rms']:.3g}"
        )
    if "checkpoint" in result:
        lines.append(f"state after event {result['events']} written to {result['checkpoint']}")
    return lines
