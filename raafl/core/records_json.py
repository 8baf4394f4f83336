"""Convert clients, events and assignments to plain data and back, for the journal and the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from raafl.core.types import Arrived, Assignment, ClientInfo, Event, Joined, Lost, Sending, Stop, SumGroup, Timer
from raafl.devices.checks import RATES
from raafl.devices.profiles import Profile
from raafl.submodel import Spec


def client_to_json(client: ClientInfo) -> dict[str, Any]:
    """Convert a client's description to plain data; infinite rates become None, since JSON has no infinity."""
    return {
        "client": client.id,
        "incarnation": client.incarnation,
        "num_samples": client.num_samples,
        "own_data": client.own_data,
        "profile": _profile_to_json(client.profile),
    }


_ADDED = {
    one.name: one.default
    for one in fields(Profile)
    if one.name
    in ("launch_s", "link_changes", "repeat_s", "speed_jitter", "link_jitter", "speed_drift", "link_drift", "drift_s")
}


@lru_cache(maxsize=1024)
def _profile_to_json(profile: Profile) -> dict[str, Any]:
    """Convert a device profile to fields of a journal row; the cached result is shared by clients and must not be changed."""
    values = {one.name: getattr(profile, one.name) for one in fields(profile)}
    # leave out fields at their default, which most devices have, to keep rows short
    for name, default in _ADDED.items():
        if values[name] == default:
            del values[name]
    if profile.availability is not None and profile.availability[-1][1] == math.inf:
        values["availability"] = (*profile.availability[:-1], (profile.availability[-1][0], None))
    return {name: None if value == math.inf else value for name, value in values.items()}


def client_from_json(data: Mapping[str, Any]) -> ClientInfo:
    """Restore a client's description from the result of `client_to_json`; unknown fields are ignored."""
    told: Any = data["profile"]
    profile: dict[str, Any] = {n: math.inf if value is None and n in RATES else value for n, value in told.items()}
    if (windows := profile.get("availability")) and windows[-1][1] is None:
        profile["availability"] = [*windows[:-1], (windows[-1][0], math.inf)]
    return ClientInfo(
        data["client"], data["num_samples"], Profile(**profile), data["incarnation"], data["own_data"] is True
    )


def event_to_json(event: Event) -> dict[str, Any]:
    """Convert an event to a row of the journal.

    For an update, the row has metadata and a digest of the tensors, not the tensors.
    """
    match event:
        case Joined(client):
            return {"event": "joined", **client_to_json(client)}
        case Arrived(update):
            return {
                "event": "arrived",
                "assignment": update.assignment,
                "client": update.client,
                "incarnation": update.incarnation,
                "num_samples": update.num_samples,
                "refusal": update.refusal,
                "fingerprint": update.fingerprint,
                **_group_to_json(update.group),
            }
        case Sending(client, incarnation, assignment):
            return {"event": "sending", "client": client, "incarnation": incarnation, "assignment": assignment}
        case Lost(client, reason, incarnation):
            counts = {"counts": True} if event.counts else {}
            return {"event": "lost", "client": client, "reason": reason, "incarnation": incarnation, **counts}
        case Timer(id):
            return {"event": "timer", "id": id}
        case Stop(reason):
            return {"event": "stop", "reason": reason}


def _group_to_json(group: SumGroup | None) -> dict[str, Any]:
    """Convert a group of secure aggregation to fields of the journal row; empty without a group."""
    if group is None:
        return {}
    return {"group": list(group.members), "scale": group.scale, **({"masked": True} if group.masked else {})}


def group_from_json(data: Mapping[str, Any]) -> SumGroup | None:
    """Restore an update's group (updates read only as a sum, in secure aggregation) from its journal row; None = no group."""
    return SumGroup(tuple(data["group"]), data["scale"], data.get("masked") is True) if "group" in data else None


def event_from_json(data: Mapping[str, Any]) -> Event:
    """Restore an event from a row of the journal. `Arrived` cannot be restored, since the journal lacks its tensors.

    Raises:
        ValueError: the row holds no such event.
        KeyError: a field is missing.
    """
    match data["event"]:
        case "joined":
            return Joined(client_from_json(data))
        case "lost":
            return Lost(data["client"], data["reason"], data["incarnation"], counts=data.get("counts") is True)
        case "sending":
            return Sending(data["client"], data["incarnation"], data["assignment"])
        case "timer":
            return Timer(data["id"])
        case "stop":
            return Stop(data["reason"])
    raise ValueError(f"'{data['event']}' is not the name of an event: read the journal with the version that wrote it")


_LEFT_OUT = {"lr_scale": 1.0, "next_seed": None, "next_lr_scale": 1.0}
"""Default values of an assignment's fields; a field with its default is not written."""
_ASSIGNED = tuple(one.name for one in fields(Assignment) if one.name not in ("extra", *_LEFT_OUT))


def assignment_to_json(assignment: Assignment) -> dict[str, Any]:
    """Convert an assignment to plain data for the wire and the journal, without later fields that have their defaults."""
    data = {name: getattr(assignment, name) for name in _ASSIGNED}
    extra = {"extra": dict(assignment.extra)} if assignment.extra else {}
    more = {name: getattr(assignment, name) for name in _LEFT_OUT if getattr(assignment, name) != _LEFT_OUT[name]}
    return data | {"spec": assignment.spec.to_json()} | extra | more


def assignment_from_json(data: dict[str, Any]) -> Assignment:
    """Restore an assignment from the result of `assignment_to_json`."""
    return Assignment(**{**data, "spec": Spec.from_json(data["spec"])})
