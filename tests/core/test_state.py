"""A merge that left numbers which are not finite is undone: values, memory and tensors of clients are as before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from raafl.core.state import RUINED, ClientState, OneValue, is_ruined
from raafl.parts.protect.trial import copied, is_sound, restore
from raafl.submodel import Layout
from raafl.submodel.tensor_files import is_in_files
from tests.helpers.coordinators import line_state

LAYOUT = Layout.pack([("w", (2,), torch.float32), ("n", (1,), torch.int64)])


@dataclass
class Sums(OneValue[Any]):
    key: ClassVar[str] = "sums"
    value: Any = field(default_factory=list)


@dataclass
class Norms(OneValue[Any]):
    key: ClassVar[str] = "guard"
    value: Any = field(default_factory=list)


@dataclass
class New(OneValue[Any]):
    key: ClassVar[str] = "new"
    value: Any = field(default_factory=list)


def test_restore_brings_back_values_memory_and_tensors_of_clients():
    state = line_state(value=1.0)
    state.memory.put(Sums([torch.ones(2)]))
    state.memory.put(Norms([1.0]))
    state.clients.of("c", 1, LAYOUT)["w"].fill_(2.0)
    saved = copied(state, but="guard")
    with state.clients.recording(saved["clients"]):
        state.values["fc1.weight"].fill_(math.nan)
        state.memory.of(Sums).value[0].fill_(7.0)
        state.memory.put(New())
        state.memory.of(Norms).value.append(2.0)
        state.clients.of("c", 1, LAYOUT)["w"].fill_(9.0)
        state.clients.of("c", 2, LAYOUT)
    state.scratch["sum"] = torch.ones(2)
    assert not is_sound(state, saved, but="guard")
    restore(state, saved, but="guard")
    assert state.values["fc1.weight"].eq(1.0).all() and state.memory.of(Sums).value[0].tolist() == [1.0, 1.0]
    assert state.memory.find(New) is None and state.memory.of(Norms).value == [1.0, 2.0], "`but` is not undone"
    assert state.clients.find("c", 1)["w"].tolist() == [2.0, 2.0] and state.clients.find("c", 2) is None
    assert state.scratch == {}


def test_a_merge_is_sound_if_all_is_finite_and_clients_hold_no_infinity():
    state = line_state()
    saved = copied(state, but="guard")
    with state.clients.recording(saved["clients"]):
        state.clients.of("c", 1, LAYOUT, fill=math.nan)  # elements that it has never trained
    assert is_sound(state, saved, but="guard")
    state.memory.put(Sums([torch.tensor([math.inf])]))
    assert not is_sound(state, saved, but="guard") and is_sound(state, saved, but="sums")
    state.clients.find("c", 1)["w"].fill_(math.inf)
    assert not is_sound(state, saved, but="sums")


def test_a_model_is_ruined_beyond_a_magnitude():
    assert not is_ruined(line_state(value=RUINED)) and is_ruined(line_state(value=2 * RUINED))
    assert is_ruined(line_state(value=math.nan))


def test_an_entry_is_made_once_and_changed_in_place():
    clients = ClientState()
    assert clients.find("c", 1) is None
    first = clients.of("c", 1, LAYOUT, fill=3.0)
    assert first["w"].tolist() == [3.0, 3.0] and first["n"].tolist() == [0], "integers start at 0"
    first["w"].add_(1.0)
    assert clients.of("c", 1, LAYOUT, fill=3.0) is first and clients.find("c", 1)["w"].tolist() == [4.0, 4.0]
    assert clients.everyone("c") == {1: first} and clients.everyone("other") == {}
    clients.forget("c", 1)
    assert clients.find("c", 1) is None


def test_entries_that_a_checkpoint_has_brought_to_memory_are_moved_to_files_once(tmp_path):
    clients = ClientState()
    assert clients.everyone("c", str(tmp_path)) == {}
    for client in (1, 2):
        clients.of("c", client, LAYOUT)["w"].fill_(float(client))
    moved = dict(clients.everyone("c", str(tmp_path)))
    assert all(map(is_in_files, moved.values()))
    assert {client: flat["w"].tolist() for client, flat in moved.items()} == {1: [1.0, 1.0], 2: [2.0, 2.0]}
    again = clients.everyone("c", str(tmp_path))
    assert all(again[client] is flat for client, flat in moved.items())
    assert is_in_files(clients.of("c", 3, LAYOUT, folder=str(tmp_path), fill=1.0))
    assert not is_in_files(clients.of("d", 3, LAYOUT))


def test_recording_copies_an_entry_before_its_first_change_alone():
    clients = ClientState()
    clients.of("c", 1, LAYOUT)["w"].fill_(1.0)
    clients.of("c", 2, LAYOUT)
    changed = {}
    with clients.recording(changed):
        clients.of("c", 1, LAYOUT)["w"].fill_(5.0)
        clients.of("c", 1, LAYOUT)["w"].fill_(6.0)
        clients.of("c", 3, LAYOUT)
        clients.forget("c", 2)
    clients.of("c", 4, LAYOUT)
    assert changed["c", 1]["w"].tolist() == [1.0, 1.0] and changed["c", 3] is None
    assert set(changed) == {("c", 1), ("c", 2), ("c", 3)}, "nothing after the recording"
