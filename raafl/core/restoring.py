"""Restore clients, events, assignments and the coordinator's state from what `raafl.core.saving` has made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from raafl.core.coordinator import Coordinator
from raafl.core.saving import CPU, books, counters
from raafl.core.state import PendingUpdate
from raafl.core.types import (
    Assignment,
    ClientInfo,
    Event,
    Joined,
    Lost,
    Sending,
    Stop,
    SumGroup,
    Timer,
    Update,
)
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.submodel import FlatTensors, Layout, Spec
from raafl.submodel.flat import DTYPES


def from_plain(data: object, device: torch.device = CPU) -> Any:
    """Restore a value from the result of `to_plain`; tensors that were not on the CPU are placed on ``device``."""
    if isinstance(data, list):
        return [from_plain(item, device) for item in data]
    if not isinstance(data, dict):
        return data
    if "__on_device__" in data:
        return from_plain(data["__on_device__"]).to(device)
    if "__flat__" in data:
        layout = layout_from_json(data["__flat__"])
        return FlatTensors(layout, dict(zip(layout.dtypes, data["buffers"], strict=True)))
    if "__spec__" in data:
        return Spec.from_json(data["__spec__"])
    if "__tuple__" in data:
        return tuple(from_plain(item, device) for item in data["__tuple__"])
    return {from_plain(key): from_plain(value, device) for key, value in data["__pairs__"]}


def restore(coordinator: Coordinator, data: dict[str, Any]) -> None:
    """Load the result of `save` into a new coordinator, in place; the model's values are restored separately."""
    roster, state = coordinator.roster, coordinator.state
    for name, owner in counters(coordinator).items():
        setattr(owner, name, data.get(name, getattr(owner, name)))  # "spacings" is missing in older checkpoints
    for name, book in books(coordinator).items():
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


def _waiting_from_plain(item: list[Any], arrived_s: float) -> PendingUpdate:
    assignment, data, staleness = assignment_from_json(item[0]), dict(item[1]), item[2]
    data["metrics"] = dict(data["metrics"])
    update = Update(tensors=FlatTensors.empty(Layout(())), **data)
    return PendingUpdate(update, assignment.spec.without_base, staleness, assignment, arrived_s)


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


def assignment_from_json(data: dict[str, Any]) -> Assignment:
    """Restore an assignment from the result of `assignment_to_json`."""
    return Assignment(**{**data, "spec": Spec.from_json(data["spec"])})


def layout_from_json(data: object) -> Layout:
    """Restore a layout from the result of `Layout.to_json`; raises `BadInput` if ``data`` has another form."""
    tensors = data.get("tensors") if isinstance(data, dict) else None
    if not isinstance(tensors, list):
        raise BadInput(f"layout is {str(data)[:80]!r}: give {{'tensors': [[name, shape, dtype], ...]}}")
    return Layout.pack(_checked(item) for item in tensors)


def _checked(item: Any) -> tuple[str, list[int], torch.dtype]:
    good = isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and isinstance(item[1], list)
    if good:
        good = all(type(size) is int and 0 <= size < 2**48 for size in item[1])
        good = good and isinstance(item[2], str) and item[2] in DTYPES
    if not good:
        raise BadInput(
            f"layout has the tensor {str(item)[:80]!r}: give [name, shape, dtype], with a dtype of {', '.join(DTYPES)}"
        )
    return item[0], item[1], DTYPES[item[2]]
