"""Estimate the energy that the clients of a run used: the power of each device times the seconds that it worked."""

from __future__ import annotations

import csv
from pathlib import Path

import yaml

from raafl.devices import Device, assign, load_devices
from raafl.devices.catalog import watts
from raafl.runfolder.schema import CLIENTS, CONFIG


def energy_kj(folder: Path) -> float | None:
    """Estimate the energy in kilojoules that the clients used for finished tasks, including transfers.

    Returns:
        The energy; None if the power of a client's device is unknown.
    """
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    devices = config.get("devices")
    if devices is None:
        return None
    found = load_devices(devices) if isinstance(devices, str) else [Device(**row) for row in devices]
    power = [watts(profile.name) for profile in assign(found, config["clients"])]
    if None in power:
        return None
    with (folder / CLIENTS).open(newline="") as file:
        joules = sum(
            (power[int(row["client"]) - 1] or 0.0) * float(row["train_s"])
            for row in csv.DictReader(file)
            if row["train_s"]
        )
    return joules / 1e3
