"""The records of parts: made once, saved by key in plain form, restored when their part asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raafl.core import restoring, saving
from raafl.core.state import Memory, MergeMemory, OneValue


@dataclass
class Sums(MergeMemory):
    key = "sums"
    total: torch.Tensor
    names: list[str] = field(default_factory=list)
    last: int | None = None


@dataclass
class Seen(OneValue[list[int]]):
    key = "seen"
    value: list[int] = field(default_factory=list)


def filled() -> Memory:
    memory = Memory()
    memory.of(Sums, lambda: Sums(torch.tensor([1.0, 2.0]))).names.append("a")
    memory.of(Sums, lambda: Sums(torch.tensor([3.0])), "sums of b")
    memory.of(Seen).value.append(4)
    return memory


def test_a_record_is_made_once():
    memory = filled()
    assert memory.of(Sums, lambda: Sums(torch.zeros(1))).names == ["a"]
    assert memory.of(Seen) is memory.find(Seen)


def test_the_plain_form_has_the_fields_that_are_not_none_by_key():
    plain = filled().to_plain()
    assert list(plain) == ["sums", "sums of b", "seen"]
    assert sorted(plain["sums"]) == ["names", "total"] and plain["seen"] == [4]


def test_a_checkpoint_restores_records_also_those_that_no_part_has_asked_for_yet():
    memory = Memory()
    memory.load(restoring.from_plain(saving.to_plain(filled().to_plain())))
    assert memory.to_plain().keys() == filled().to_plain().keys()
    assert memory.of(Sums).total.tolist() == [1.0, 2.0] and memory.of(Sums).last is None
    found = memory.find(Sums, "sums of b")
    assert found is not None and found.total.tolist() == [3.0]
    assert memory.of(Seen).value == [4]


def test_a_record_that_is_removed_or_was_never_made_is_not_found():
    memory = filled()
    assert memory.pop(Seen) == Seen([4])
    assert memory.find(Seen) is None and memory.pop(Seen) is None and "seen" not in memory.to_plain()
    memory.put(Seen([5]))
    assert memory.of(Seen).value == [5]


def test_loading_replaces_all_records_but_one():
    memory, before = filled(), filled().to_plain()
    memory.of(Seen).value.append(5)
    memory.of(Sums).names.append("b")
    memory.load(before, but="seen")
    assert memory.of(Seen).value == [4, 5] and memory.of(Sums).names == ["a"]
