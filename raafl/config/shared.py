"""Select the sections of a config that server and clients must share, and those that a client receives."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

from raafl.config.experiment import marked
from raafl.devices import Device, load_devices
from raafl.devices.checks import CHANGES

_SERVERS_OWN = (*CHANGES, "repeat_s", "recorded")


def sections(config_yaml: str, *, own_data: bool = False) -> dict[str, str]:
    """Return a digest of each section of a config that must be equal on both sides; "own" for a client's own data."""
    import yaml

    config = yaml.safe_load(config_yaml) or {}
    digests = {name: json.dumps(config.get(name), sort_keys=True, default=str) for name in marked("must_match")}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in digests.items()}
    return digests | ({"data": "own"} if own_data else {})


def for_clients(config_yaml: str) -> str:
    """Select the sections of the server's config that are sent to clients without a config.

    Device files are sent as their contents. Recordings of devices are not sent, since the server alone emulates them.
    """
    import yaml

    config = yaml.safe_load(config_yaml) or {}
    kept = {name: config[name] for name in marked("sent_to_clients") if name in config}
    if isinstance(kept.get("devices"), str):
        devices = load_devices(kept["devices"])
        names = [field.name for field in fields(Device) if field.init]
        rows = [{name: _as_list(getattr(device, name)) for name in names} for device in devices]
        kept["devices"] = rows
    if isinstance(kept.get("devices"), list):
        kept["devices"] = [{name: row[name] for name in row if name not in _SERVERS_OWN} for row in kept["devices"]]
    return yaml.safe_dump(kept, sort_keys=False) if kept else ""


def _as_list(value: object) -> object:
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value
