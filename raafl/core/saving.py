"""Convert clients, events, assignments and the coordinator's state to plain data and tensors, and back.

Everything that decides what happens next is saved: clients, assignments, counters, buffers, what the merge remembers, the
random generator. Restored into a new coordinator of the same config, the same events give the same actions and the same model.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
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
from raafl.submodel import FlatTensors, Spec

CPU = torch.device("cpu")


def to_plain(value: object) -> object:
    """Convert ``value`` to dicts, lists, numbers, text and tensors; tensors are copied to the CPU."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return value.clone() if value.device == CPU else {"__on_device__": value.cpu()}
        case FlatTensors():
            flat = {"__flat__": value.layout.to_json()}
            if value.device == CPU:
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


def books(coordinator: Coordinator) -> dict[str, dict[Any, Any]]:
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


def counters(coordinator: Coordinator) -> dict[str, Any]:
    """Map the names of the coordinator's counters, which a checkpoint stores, to the objects that have them."""
    names = dict.fromkeys(("merged", "evaluated", "samples_merged", "spacings", "opened_s", "started"), coordinator)
    return {"version": coordinator.state, "last_id": coordinator.roster, **names}


def save(coordinator: Coordinator) -> dict[str, Any]:
    """Return the coordinator's state as plain data, without the model's values, which are saved separately."""
    roster, state = coordinator.roster, coordinator.state
    version, internal, gauss = coordinator.rng.getstate()
    return {
        **{name: getattr(owner, name) for name, owner in counters(coordinator).items()},
        **{name: [[key, value] for key, value in book.items()] for name, book in books(coordinator).items()},
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


def _waiting_to_plain(item: PendingUpdate) -> list[Any]:
    """Convert a waiting update to plain data without tensors, which the merge stores itself."""
    assert item.assignment is not None
    without = ("tensors", "extra", "bundles", "refusal", "group", "contributions", "journal")
    data = {one.name: getattr(item.update, one.name) for one in fields(item.update) if one.name not in without}
    data["metrics"] = [[name, value] for name, value in item.update.metrics.items()]
    return [assignment_to_json(item.assignment), data, item.staleness]


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


_LEFT_OUT = {"lr_scale": 1.0, "next_seed": None, "next_lr_scale": 1.0}
"""Default values of an assignment's fields; a field with its default is not written."""
_ASSIGNED = tuple(one.name for one in fields(Assignment) if one.name not in ("extra", *_LEFT_OUT))
_values_of, _further_of = attrgetter(*_ASSIGNED), attrgetter(*_LEFT_OUT)


def assignment_to_json(assignment: Assignment) -> dict[str, Any]:
    """Convert an assignment to plain data for the wire and the journal, without later fields that have their defaults."""
    data: dict[str, Any] = dict(zip(_ASSIGNED, _values_of(assignment), strict=True))
    data["spec"] = assignment.spec.to_json()
    if assignment.extra:
        data["extra"] = dict(assignment.extra)
    for (name, default), value in zip(_LEFT_OUT.items(), _further_of(assignment), strict=True):
        if value != default:
            data[name] = value
    return data
