"""Select the sections of a config that must be equal on server and clients, and the sections that a client receives.

Fields that are null are left out of both where null is their default: so a field that a later version of raafl adds, null unless
used, keeps nobody of an earlier version away.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from raafl.config.experiment import SECTIONS, marked
from raafl.devices import Device
from raafl.devices.checks import CHANGES
from raafl.devices.files import load_devices
from raafl.plain_yaml import dump_yaml

_SERVERS_OWN = (*CHANGES, "repeat_s", "recorded")


def sections(config_yaml: str, *, own_data: bool = False) -> dict[str, str]:
    """Return a digest of each section of the config that must be equal on server and client, by name of the section."""
    import yaml

    config = yaml.safe_load(config_yaml) or {}
    given = {name: _without_null(config.get(name)) for name in marked("must_match")}
    digests = {name: config_digest(value)[:16] for name, value in given.items()}
    return digests | ({"data": "own"} if own_data else {})


def config_digest(value: object) -> str:
    """Return a digest of values of a config, whatever the order of its mappings, in hexadecimal digits."""
    try:
        text = json.dumps(value, sort_keys=True, default=str)
    except TypeError:  # a mapping has keys of several types, such as a model's own arguments may have
        text = json.dumps(_with_named_keys(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_named_keys(value: object) -> object:
    if isinstance(value, dict):
        return {json.dumps(key, default=str): _with_named_keys(item) for key, item in value.items()}
    return [_with_named_keys(item) for item in value] if isinstance(value, list | tuple) else value


def for_clients(config_yaml: str) -> str:
    """Return the sections of the server's config that are sent to clients without a config.

    The contents of device files are included, but not how the speed of a device changes over time, since only the
    server uses that.
    """
    import yaml

    config = yaml.safe_load(config_yaml) or {}
    kept = {
        name: _without_unset(config[name], SECTIONS.get(name)) for name in marked("sent_to_clients") if name in config
    }
    if isinstance(kept.get("devices"), str):
        devices = load_devices(kept["devices"])
        names = [field.name for field in fields(Device) if field.init]
        rows = [{name: _as_list(getattr(device, name)) for name in names} for device in devices]
        kept["devices"] = rows
    if isinstance(kept.get("devices"), list):
        rows = [{name: row[name] for name in row if name not in _SERVERS_OWN} for row in kept["devices"]]
        kept["devices"] = [_without_unset(row, Device) for row in rows]
    return dump_yaml(kept) if kept else ""


def _without_null(value: object) -> object:
    """Remove null fields at any depth, so that a raafl version without such a field computes the same digest."""
    if isinstance(value, dict):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _without_unset(value: Any, made_by: Callable[..., Any] | None = None) -> Any:
    """Remove arguments of ``made_by`` that are null by default, so that a raafl version without them computes the same digest."""
    if not isinstance(value, dict):
        return value
    if "class_path" in value:
        arguments = value.get("init_args")
        return {**value, "init_args": _without_unset(arguments, _imported(value["class_path"]))} if arguments else value
    try:
        known = inspect.signature(made_by).parameters if made_by is not None else {}
    except (TypeError, ValueError):
        known = {}
    unset = {name for name, item in value.items() if item is None and name in known and known[name].default is None}
    return {name: _without_unset(item) for name, item in value.items() if name not in unset}


def _imported(path: object) -> Callable[..., Any] | None:
    """Return the class or function at a dotted path; None if its module is not imported yet."""
    module, _, name = str(path).rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _as_list(value: object) -> object:
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value
