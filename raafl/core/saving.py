"""Convert clients, events, assignments and the coordinator's state to plain data and tensors, and back.

Everything that decides what happens next is saved: clients, assignments, counters, buffers, what the merge remembers, the
random generator. Restored into a new coordinator of the same config, the same events give the same actions and the same model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from raafl.core.coordinator import Coordinator
from raafl.core.state import PendingUpdate
from raafl.core.types import (
    Arrived,
    Assignment,
    ClientInfo,
    Event,
    Joined,
    Lost,
    Received,
    Sending,
    Stop,
    SumGroup,
    Timer,
    Update,
)
from raafl.devices.profiles import Profile
from raafl.submodel import FlatTensors, Layout, Spec

_CPU = torch.device("cpu")


def to_plain(value: object) -> object:
    """Convert ``value`` to dicts, lists, numbers, text and tensors; tensors are copied to the CPU."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return value.clone() if value.device == _CPU else {"__on_device__": value.cpu()}
        case FlatTensors():
            flat = {"__flat__": value.layout.to_json()}
            if value.device == _CPU:
                return {**flat, "buffers": [b.clone() for b in value.buffers.values()]}
            return {"__on_device__": {**flat, "buffers": [b.cpu() for b in value.buffers.values()]}}
        case Spec():
            return {"__spec__": value.to_json()}
        case dict():
            return {"__pairs__": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
        case tuple():
            return {"__tuple__": [to_plain(item) for item in value]}
        case list():
            return [to_plain(item) for item in value]
    raise TypeError(
        f"a {type(value).__name__} cannot be saved in a checkpoint: use dicts, lists, tuples, numbers, text and tensors"
    )


def from_plain(data: object, device: torch.device = _CPU) -> Any:
    """Restore a value from the result of `to_plain`; tensors that were not on the CPU are placed on ``device``."""
    if isinstance(data, list):
        return [from_plain(item, device) for item in data]
    if not isinstance(data, dict):
        return data
    if "__on_device__" in data:
        return from_plain(data["__on_device__"]).to(device)
    if "__flat__" in data:
        layout = Layout.from_json(data["__flat__"])
        return FlatTensors(layout, dict(zip(layout.dtypes, data["buffers"], strict=True)))
    if "__spec__" in data:
        return Spec.from_json(data["__spec__"])
    if "__tuple__" in data:
        return tuple(from_plain(item, device) for item in data["__tuple__"])
    return {from_plain(key): from_plain(value, device) for key, value in data["__pairs__"]}


def _books(coordinator: Coordinator) -> dict[str, dict[Any, Any]]:
    """Map names in the checkpoint to the coordinator's mutable dicts, which a checkpoint stores and restores."""
    roster, backoff = coordinator.roster, coordinator.admission.backoff
    return {
        "counts": coordinator.state.counts,
        "busy": roster.busy,
        "sending": roster.sending,
        "tasks": roster.tasks,
        "joins": roster.joins,
        "refused": coordinator.admission.refused,
        "clipped": coordinator.admission.clipped,
        "refused_in_a_row": backoff.refused,
        "times_out": backoff.times,
        "out_until": backoff.until,
        "unanswered_s": backoff.unanswered_s,
    }


def _counters(coordinator: Coordinator) -> dict[str, Any]:
    """Map the names of the coordinator's counters, which a checkpoint stores, to the objects that have them."""
    names = dict.fromkeys(("merged", "evaluated", "samples_merged", "spacings", "opened_s", "started"), coordinator)
    return {"version": coordinator.state, "last_id": coordinator.roster, **names}


def save(coordinator: Coordinator) -> dict[str, Any]:
    """Return the coordinator's state as plain data, without the model's values, which are saved separately."""
    roster, state = coordinator.roster, coordinator.state
    version, internal, gauss = coordinator.rng.getstate()
    return {
        **{name: getattr(owner, name) for name, owner in _counters(coordinator).items()},
        **{name: [[key, value] for key, value in book.items()] for name, book in _books(coordinator).items()},
        "memory": to_plain(state.memory.to_plain()),
        "client_state": to_plain(state.clients.values),
        "clients": [client_to_json(client) for client in roster.clients.values()],
        "kept_out": [client_to_json(client) for client in roster.suspended.values()],
        "said_bytes": [[client, None if num == math.inf else num] for client, num in roster.said_bytes.items()],
        "active": [assignment_to_json(assignment) for assignment in roster.active.values()],
        "idle": list(roster.idle),
        "drawn": list(roster.drawn),
        "waiting": [_waiting_to_plain(item) for item in state.waiting],
        "arrived_s": [item.arrived_s for item in state.waiting],
        "min_clients": coordinator.limits.min_clients,
        "absent": sorted(coordinator.admission.absent),
        "wake": list(coordinator.wake),
        "rng": [version, list(internal), gauss],
    }


def restore(coordinator: Coordinator, data: dict[str, Any]) -> None:
    """Load the result of `save` into a new coordinator, in place; the model's values are restored separately."""
    roster, state = coordinator.roster, coordinator.state
    for name, owner in _counters(coordinator).items():
        setattr(owner, name, data.get(name, getattr(owner, name)))  # "spacings" is missing in older checkpoints
    for name, book in _books(coordinator).items():
        book.update(dict(data.get(name, ())))  # a checkpoint of an earlier version may lack a dict, such as "sending"
    device = state.values.device
    state.memory.load(from_plain(data["memory"], device))
    state.clients.values.update(from_plain(data["client_state"], device))
    for name, clients in (("clients", roster.clients), ("kept_out", roster.suspended)):
        clients.update({client.id: client for client in map(client_from_json, data[name])})
    for number, num_bytes in data["said_bytes"]:
        roster.said_bytes[number] = math.inf if num_bytes is None else num_bytes
    assignments = [assignment_from_json(item) for item in data["active"]]
    roster.active.update({assignment.id: assignment for assignment in assignments})
    if coordinator.algorithm.trigger.refuses_late:
        roster.late = {assignment.id for assignment in assignments if assignment.version < state.version}
    for client_id in data["idle"]:
        roster.idle.add(client_id)
    roster.drawn.update(dict.fromkeys(data["drawn"]))
    state.waiting[:] = map(_waiting_from_plain, data["waiting"], data["arrived_s"])
    coordinator.admission.absent.update(data["absent"])
    coordinator.wake = (data["wake"][0], data["wake"][1])
    version, internal, gauss = data["rng"]
    coordinator.rng.setstate((version, tuple(internal), gauss))


def _waiting_to_plain(item: PendingUpdate) -> list[Any]:
    """Convert a waiting update to plain data without tensors, which the merge stores itself."""
    assert item.assignment is not None
    without = ("tensors", "extra", "bundles", "refusal", "group", "contributions", "journal")
    data = {one.name: getattr(item.update, one.name) for one in fields(item.update) if one.name not in without}
    data["metrics"] = [[name, value] for name, value in item.update.metrics.items()]
    return [assignment_to_json(item.assignment), data, item.staleness]


def _waiting_from_plain(item: list[Any], arrived_s: float) -> PendingUpdate:
    assignment, data, staleness = assignment_from_json(item[0]), dict(item[1]), item[2]
    data["metrics"] = dict(data["metrics"])
    update = Update(tensors=FlatTensors.empty(Layout(())), **data)
    return PendingUpdate(update, assignment.spec.without_base, staleness, assignment, arrived_s)


def client_to_json(client: ClientInfo) -> dict[str, Any]:
    """Convert a client's description to plain data; infinite rates become None, since JSON has no infinity."""
    return {
        "client": client.id,
        "incarnation": client.incarnation,
        "num_samples": client.num_samples,
        "own_data": client.own_data,
        "profile": _profile_to_json(client.profile),
        **({"below": client.below} if client.below else {}),
    }


_FIRST = "name flops_per_s down_bytes_per_s up_bytes_per_s latency_s memory_bytes availability period_s bytes_per_s speed_changes"
_ADDED = {one.name: one.default for one in fields(Profile) if one.name not in _FIRST.split()}


@lru_cache(maxsize=1024)
def _profile_to_json(profile: Profile) -> dict[str, Any]:
    """Convert a device profile to fields of a journal row, as a cached dict that callers must not change."""
    values = {one.name: getattr(profile, one.name) for one in fields(profile)}
    # leave out fields at their defaults, to keep rows short
    for name, default in _ADDED.items():
        if values[name] == default:
            del values[name]
    if profile.availability is not None and profile.availability[-1][1] == math.inf:
        values["availability"] = (*profile.availability[:-1], (profile.availability[-1][0], None))
    return {name: None if value == math.inf else value for name, value in values.items()}


def client_from_json(data: Mapping[str, Any]) -> ClientInfo:
    """Restore a client's description from the result of `client_to_json`; unknown fields are ignored."""
    from raafl.devices.checks import RATES

    told: Any = data["profile"]
    profile: dict[str, Any] = {n: math.inf if value is None and n in RATES else value for n, value in told.items()}
    if (windows := profile.get("availability")) and windows[-1][1] is None:
        profile["availability"] = [*windows[:-1], (windows[-1][0], math.inf)]
    return ClientInfo(
        data["client"],
        data["num_samples"],
        Profile(**profile),
        data["incarnation"],
        data["own_data"] is True,
        data.get("below", 0),
    )


def event_to_json(event: Event) -> dict[str, Any]:
    """Convert an event to a row of the journal, which has a digest of an update's tensors in their place."""
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
                **_below_to_json(update),
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
        case Received():
            return {
                "event": "received",
                "task": event.task,
                "version": event.version,
                "spec": event.spec.to_json(),
                "fingerprint": event.fingerprint,
            }


def _below_to_json(update: Update) -> dict[str, Any]:
    """Convert an update's list of its subfederation's clients to fields of a journal row; {} without a subfederation."""
    if not update.contributions:
        return {}
    from raafl.core.subfederation import to_json

    return {"num_steps": update.num_steps, "contributions": to_json(update.contributions), "journal": update.journal}


def _group_to_json(group: SumGroup | None) -> dict[str, Any]:
    """Convert an update's group of secure aggregation to fields of a journal row; {} without a group."""
    if group is None:
        return {}
    return {"group": list(group.members), "scale": group.scale, **({"masked": True} if group.masked else {})}


def group_from_json(data: Mapping[str, Any]) -> SumGroup | None:
    """Restore an update's group (updates read only as a sum, in secure aggregation) from its journal row; None = no group."""
    return SumGroup(tuple(data["group"]), data["scale"], data.get("masked") is True) if "group" in data else None


def event_from_json(data: Mapping[str, Any]) -> Event:
    """Restore an event from a row of the journal, but not an `Arrived`, whose tensors the journal lacks."""
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
