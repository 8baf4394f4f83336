"""Rows of a journal, for tests of the view."""

from __future__ import annotations

from raafl.config.targets import Goals


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# ---- the state ----


def goals(**fields):
    return Goals(**fields).to_json()


def run_row(runtime="distributed", **fields):
    return {"time_s": 0.0, "event": "run", "runtime": runtime, "title": "a run", "goals": goals(**fields)}


def joined(client, time_s=0.0, incarnation=0, name="default"):
    return {
        "time_s": time_s,
        "event": "joined",
        "client": client,
        "incarnation": incarnation,
        "profile": {"name": name},
    }


def assigned(number, client, time_s, version=0, **more):
    row = {"time_s": time_s, "event": "assigned", "id": number, "client": client, "incarnation": 0, "version": version}
    return {**row, "spec": {}, "assigned_s": time_s, "pace_s": 0.0, **more}


def arrived(number, client, time_s, incarnation=0):
    return {"time_s": time_s, "event": "arrived", "assignment": number, "client": client, "incarnation": incarnation}


def ended(number, client, since_s, until_s, version, outcome="merged", **more):
    row = {"client": client, "assignment": number, "outcome": outcome, "assigned_s": since_s, "arrived_s": until_s}
    return {
        **row,
        "merged_version": version,
        "staleness": 0,
        "bytes_down": 1000,
        "bytes_up": 500,
        "spec": "full",
        **more,
    }
