"""A task begins with the module as it was made: the second of two is the plain loop on a new module, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import types
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.evaluate import Evaluator
from raafl.submodel import FULL
from raafl.submodel.module_state import ModuleState
from raafl.submodel.module_state.containers import ClassData, Glance, reach
from raafl.submodel.module_state.state import LARGE_BYTES
from raafl.submodel.module_state.state import _ids as ids_of
from tests.local.bench import Bench, Net, assignment, plain_loop, same, samples


class Stateful(Net):
    """Scales its loss by what `factor` makes of the module's state, which it changes in each step."""

    def __init__(self):
        super().__init__()
        self.set_up()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * self.factor(float(loss.detach()))


class Counter(Stateful):
    def set_up(self):
        self.n = 0

    def factor(self, loss):
        self.n += 1
        return self.n / 20


class Late(Stateful):
    """Makes its attribute in the first step."""

    def set_up(self):
        pass

    def factor(self, loss):
        self.n = getattr(self, "n", 0) + 1
        return self.n / 20


class Hidden(Stateful):
    """A hidden state that is replaced, one that changes in place, and one that changes past torch's counter of changes."""

    def set_up(self):
        self.h, self.g, self.data_ = None, torch.zeros(3), torch.ones(2)

    def factor(self, loss):
        self.h = torch.full((2,), loss) if self.h is None else 0.5 * self.h + loss
        self.g.add_(loss)
        self.data_.data[0] += 1
        return float(self.h[0] + self.g[0]) / float(self.data_.sum())


class Grown(Stateful):
    def set_up(self):
        self.outputs = []

    def factor(self, loss):
        self.outputs.append(loss)
        return 1 / len(self.outputs)


class Nested(Stateful):
    def set_up(self):
        self.memory = {"a": [OrderedDict(x=1), (deque([1.0], 4), {0})], "t": {"inner": torch.zeros(2)}}

    def factor(self, loss):
        first, (queue, seen) = self.memory["a"]
        first["x"] += 1
        first.move_to_end("x")
        queue.append(loss)
        seen.add(len(seen))
        self.memory["t"]["inner"] += 1
        self.memory.setdefault("new", []).append(loss)
        return (
            first["x"] + len(queue) + len(seen) + float(self.memory["t"]["inner"][0]) + len(self.memory["new"])
        ) / 20


@dataclasses.dataclass
class Average:
    n: int = 0
    values: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int = 0


class Unset:
    """Has a slot that nothing is in yet."""

    __slots__ = ("late",)


class Objects(Stateful):
    """Objects of the user's, two attributes for one object, and a module that is hidden in a list."""

    def set_up(self):
        self.average = self.alias = Average()
        self.slotted, self.array, self.hidden = Slotted(), np.zeros(2), [nn.Linear(2, 1)]
        nn.init.zeros_(self.hidden[0].weight)

    def factor(self, loss):
        self.average.n += 1
        assert self.alias is self.average
        self.average.values.append(loss)
        self.slotted.n += 1
        self.array += 1
        with torch.no_grad():
            self.hidden[0].weight += 1
        return (self.average.n + self.slotted.n + self.array.sum() + float(self.hidden[0].weight.sum().detach())) / 20


class Empty(Stateful):
    """Objects in which nothing is before the first step."""

    def set_up(self):
        self.space, self.unset = types.SimpleNamespace(), Unset()

    def factor(self, loss):
        self.space.n = getattr(self.space, "n", 0) + 1
        self.unset.late = getattr(self.unset, "late", 0) + 1
        return (self.space.n + self.unset.late) / 20


class Bytes(Stateful):
    """Bytes that are changed in place, and grow."""

    def set_up(self):
        self.seen = bytearray(b"\x01")

    def factor(self, loss):
        self.seen[0] += 1
        self.seen.append(1)
        return sum(self.seen) / 20


class Drawing(Stateful):
    def set_up(self):
        self.torchs, self.pythons = torch.Generator().manual_seed(3), random.Random(1)
        self.numpys, self.olds = np.random.default_rng(4), np.random.RandomState(5)

    def factor(self, loss):
        drawn = float(torch.rand((), generator=self.torchs)) + self.pythons.random()
        return drawn + self.numpys.random() + self.olds.rand()


class Transient(Stateful):
    """A buffer that is not persistent, once changed in place and once replaced."""

    def set_up(self):
        self.register_buffer("t", torch.zeros(()), persistent=False)
        self.register_buffer("u", torch.zeros(()), persistent=False)

    def factor(self, loss):
        self.t += 1
        self.u = self.u + 1
        return (self.t + self.u) / 20


class Freezing(Stateful):
    """Freezes a layer, and adds a hook, from the third step on."""

    def set_up(self):
        self.n = 0

    def factor(self, loss):
        self.n += 1
        if self.n == 3:
            self.fc1.weight.requires_grad_(False)
            self.fc2.register_forward_hook(lambda layer, args, output: output / 2)
        return 1.0


class References(Stateful):
    """Attributes that refer to the module's own parameters, layers and methods go on to do so."""

    def set_up(self):
        self.own, self.bound, self.n = {"p": self.fc1.weight, "layers": [self.fc2]}, self.fc1.forward, [0]

    def factor(self, loss):
        assert self.own["p"] is self.fc1.weight and self.own["layers"][0] is self.fc2
        assert self.bound.__self__ is self.fc1
        self.n[0] += 1
        return self.n[0] / 20


STATES = [Counter, Late, Hidden, Grown, Nested, Objects, Empty, Bytes, Drawing, Transient, Freezing, References]


@pytest.mark.parametrize("make", STATES)
def test_what_a_step_changes_is_restored_before_the_next_task(make):
    bench, first, second = Bench.of(make), assignment(seed=5, steps=7), assignment(seed=11, steps=4)
    assert same(bench.run(first)[1], plain_loop(bench, first))
    assert same(bench.run(second)[1], plain_loop(bench, second))


class Validated(Counter):
    """Keeps in `validation_step` what `training_step` reads."""

    def set_up(self):
        self.n = self.num_validated = 0

    def factor(self, loss):
        return 1.0 + self.num_validated

    def validation_step(self, batch, index):
        self.num_validated += 1
        return {"n": float(self.num_validated)}


def test_an_evaluation_begins_alike_and_leaves_nothing_to_the_next_task():
    bench, task = Bench.of(Validated), assignment(steps=3)
    bench.data.test = ClientData(samples(), torch.arange(10), batch_size=5)
    for _ in range(2):
        update, tensors = bench.run(task)
        assert same(tensors, plain_loop(bench, task))
        assert update.metrics["test/n"] == 1.5  # of two batches, the first and the second
    evaluator = Evaluator(bench.submodels, lambda: [(samples()[:2], 2)] * 2, seed=0)
    assert evaluator(bench.values, 0) == evaluator(bench.values, 0) == {"n": 1.5}


# ---- what cannot be restored ----


class Still(Stateful):
    """Things that cannot be copied, and merely are there, beside one that is restored."""

    def set_up(self):
        self.lock, self.event, self.rows = threading.Lock(), threading.Event(), (i for i in range(3))
        self.inside, self.n = {"lock": [threading.Lock(), self.fc1]}, 0

    def factor(self, loss):
        with self.lock, self.inside["lock"][0]:
            self.n += 1
        assert self.inside["lock"][1] is self.fc1
        return self.n / 20


def test_what_cannot_be_copied_and_stays_as_it_is_is_allowed():
    bench, task = Bench.of(Still), assignment(steps=4)
    for _ in range(2):
        assert same(bench.run(task)[1], plain_loop(bench, task))
    assert bench.trainer.built(FULL).module.lock is bench.module.lock


class Advanced(Stateful):
    def set_up(self):
        self.rows = (float(i) for i in range(100))

    def factor(self, loss):
        return next(self.rows)


class Counted(Advanced):
    def set_up(self):
        self.rows = itertools.count()


class ReadFile(Stateful):
    def set_up(self):
        self.file = open(__file__)  # noqa: SIM115

    def factor(self, loss):
        next(self.file)
        return 1.0


class Guarded:
    """Cannot be copied, since it has a lock."""

    def __init__(self):
        self.lock, self.n = threading.Lock(), 0

    def __deepcopy__(self, memo):
        raise TypeError


class InAnObject(Stateful):
    def set_up(self):
        self.guarded = Guarded()

    def factor(self, loss):
        self.guarded.n += 1
        return 1.0


class OfTheClass(Stateful):
    outputs: list = []  # noqa: RUF012

    def set_up(self):
        pass

    def factor(self, loss):
        self.outputs.append(loss)
        return 1.0


class NumberOfTheClass(OfTheClass):
    num = 0

    def factor(self, loss):
        type(self).num += 1
        return 1.0


class Bank(Stateful):
    def set_up(self):
        self.bank = torch.zeros(LARGE_BYTES // 4 + 1)

    def factor(self, loss):
        self.bank[0] += 1
        return 1.0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Advanced, "'rows'"),
        (Counted, "'rows'"),
        (ReadFile, "'file'"),
        (InAnObject, "'guarded.n'"),
        (OfTheClass, "'OfTheClass.outputs' of the class"),
        (NumberOfTheClass, "'NumberOfTheClass.num' of the class"),
        (Bank, "'bank'"),
    ],
)
def test_what_changes_and_cannot_be_restored_is_refused_by_name_in_the_first_task(make, name):
    with pytest.raises(BadInput, match=f"attribute {name} .*changes in a step"):
        Bench.of(make).run(assignment(steps=1))


class AddsAParameter(Stateful):
    def set_up(self):
        pass

    def factor(self, loss):
        self.scale = nn.Parameter(torch.ones(()))
        return 1.0


class ReplacesALayer(AddsAParameter):
    def factor(self, loss):
        self.fc2 = nn.Linear(8, 3)
        return 1.0


@pytest.mark.parametrize(("make", "name"), [(AddsAParameter, "scale"), (ReplacesALayer, "fc2")])
def test_a_parameter_that_would_be_lost_is_refused(make, name):
    with pytest.raises(BadInput, match=f"'{name}' is added or replaced in a step"):
        Bench.of(make).run(assignment(steps=1))


class Cached(Stateful):
    """A class may have a cache."""

    cache: dict = {}  # noqa: RUF012

    def set_up(self):
        pass

    def factor(self, loss):
        return self.cache.setdefault(2, 2.0)


def test_a_cache_of_the_class_may_fill_and_a_program_may_set_the_class_between_tasks():
    bench = Bench.of(Cached)
    bench.run(assignment(steps=1))
    Cached.dropout = 0.5
    try:
        bench.run(assignment(steps=1))
    finally:
        del Cached.dropout


def test_what_has_changed_is_named():
    bench = Bench.of(Nested)
    module = bench.submodels.shrink().module
    state = ModuleState(module, bench.submodels)
    assert state.changed() == []
    module.memory["t"]["inner"] += 1
    module.fc1.scale = 3
    assert state.changed() == ["fc1.scale", "memory"]
    state.restore()
    assert state.changed() == [] and not hasattr(module.fc1, "scale")


@pytest.mark.parametrize(
    ("thing", "change"),
    [
        ([1], lambda thing: thing.append(2)),
        (deque([1, 2], 2), lambda thing: thing.rotate()),
        ({1: 2}, lambda thing: thing.update({1: 3})),
        ({1}, lambda thing: thing.add(2)),
        (bytearray(b"a"), lambda thing: thing.extend(b"b")),
        (Slotted(), lambda thing: setattr(thing, "n", 1)),
        (Unset(), lambda thing: setattr(thing, "late", 1)),
        (Average(), lambda thing: setattr(thing, "n", 1)),
        (types.SimpleNamespace(), lambda thing: setattr(thing, "n", 1)),
        (np.zeros(2), lambda thing: thing.fill(1.0)),
        (random.Random(1), lambda thing: thing.random()),
        (torch.zeros(2), lambda thing: thing.add_(1.0)),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else "",
)
def test_a_thing_of_each_kind_is_named_once_it_has_changed(thing, change):
    bench = Bench.of(Counter)
    module = bench.submodels.shrink().module
    module.thing = thing
    state = ModuleState(module, bench.submodels)
    assert state.changed() == []
    change(module.thing)
    (name,) = state.changed()
    assert name.partition(".")[0] == "thing"
    state.restore()
    assert state.changed() == []


def test_what_copies_share_is_known_by_objects_that_stay_alive():
    """The id of one that does not is soon that of an attribute, which would then be refused as shared."""
    found = list(reach(Counter(), ()))
    assert any(isinstance(reached.thing, ClassData) for reached in found)
    assert ids_of(found) == {id(reached.thing) for reached in found if not isinstance(reached.thing, ClassData)}


def test_a_glance_sees_each_gain_loss_exchange_and_new_order():
    values, names, queue = {"a": 1000.5}, {"x": None}, deque([[]])
    glance = Glance([values.keys(), values.values(), names.keys(), names.values(), queue])
    assert glance.is_same()
    for change, undo in (
        (lambda: values.update(a=float("1000.5")), None),  # equal, but another object
        (lambda: values.update(b=1), lambda: values.pop("b")),
        (lambda: queue.append(queue[0]), queue.pop),
        (lambda: (names.pop("x"), names.update(y=None)), None),
    ):
        change()
        assert not glance.is_same()
        undo() if undo else glance.take()
        assert glance.is_same()
    glance.forget()
    assert not glance.is_same()
    glance.take()
    assert glance.is_same()


def test_a_metric_that_a_restore_leaves_alone_is_restored_by_the_next():
    bench = Bench.of(Net)
    bench.module.seen = SumOfSeen()
    state = ModuleState(bench.module, bench.submodels)
    bench.module.seen.total = 3
    state.restore(metrics=False)
    assert bench.module.seen.total == 3
    state.restore()
    assert bench.module.seen.total == 0


class SumOfSeen:
    """Has a method `compute`, as metrics have."""

    def __init__(self):
        self.total = 0

    def compute(self):
        return self.total
