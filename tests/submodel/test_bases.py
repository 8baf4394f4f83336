"""A frozen base in several forms: what each takes, who shares it, how long it is held; and who gets which."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raafl.algorithms import fed_async, split_fed
from raafl.core.state import GlobalState
from raafl.core.types import OUT_OF_MEMORY, Arrived, ClientInfo, Dismiss, Joined
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts import RateSelect
from raafl.submodel import FULL, Spec, Submodels
from raafl.submodel.spec import SpecError
from tests.helpers.coordinators import assigned, coordinator_for, update_for

BATCH = torch.arange(6).view(2, 3), torch.tensor([0, 1])
TABLE = 1000 * 8
REST = 2000
"""More bytes than a task takes beside the table: 57 values that train, four times over, and two short texts."""


class Coarse(nn.Module):
    """A table of words in whole multiples of one number."""

    def __init__(self, weight):
        super().__init__()
        unit = weight.detach().abs().amax() / 127
        self.codes = nn.Parameter((weight.detach() / unit).round().to(torch.int8), requires_grad=False)
        self.unit = nn.Parameter(unit, requires_grad=False)

    def forward(self, x):
        return self.codes[x] * self.unit


class Words(nn.Module):
    """A frozen table of a thousand words of 8 numbers, held in 32, 16 or 8 bits each, and two small layers that train."""

    submodel_bases = ("fp32", "bf16", "int8")

    def __init__(self):
        super().__init__()
        self.words, self.hidden, self.last = nn.Embedding(1000, 8), nn.Linear(8, 5), nn.Linear(5, 2)
        self.words.requires_grad_(False)

    def submodel_axes(self):
        return {"hidden": [("hidden.weight", 0), ("hidden.bias", 0), ("last.weight", 1)]}

    def submodel_hold(self, base):
        if base == "bf16":
            self.words.weight.data = self.words.weight.data.bfloat16()
        else:
            self.words = Coarse(self.words.weight)

    def forward(self, x):
        return self.last(self.hidden(self.words(x).float().mean(1)).relu())

    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def on(base, units=5):
    return Spec((("hidden", range(units)),) if units < 5 else (), base=base)


@pytest.fixture
def words():
    torch.manual_seed(0)
    module = Words()
    submodels = Submodels(module, BATCH)
    submodels.attach_base(module)
    return module, submodels


def test_a_form_takes_its_own_bytes_and_what_travels_is_the_same(words):
    _, submodels = words
    before = submodels.layout().num_bytes - 4 * TABLE
    for base, num_bytes in {"fp32": 4 * TABLE, "bf16": 2 * TABLE, "int8": TABLE + 4}.items():
        assert submodels.layout(on(base)).num_bytes == before + num_bytes
        for units in (5, 2):
            for part in ("sent", "trained"):
                assert submodels.layout(on(base, units), part) == submodels.layout(on(None, units), part)
            cost, own = submodels.cost(on(base, units), 2), submodels.cost(on(None, units), 2)
            assert (cost.down_bytes, cost.up_bytes) == (own.down_bytes, own.up_bytes)
            assert num_bytes < cost.peak_bytes < num_bytes + REST
    assert submodels.normal(on("fp32")) == FULL, "the module's own form needs no name"
    with pytest.raises(SpecError, match=r"spec\.base is 'int9', which this model does not have: did you mean 'int8'\?"):
        submodels.normal(on("int9"))
    with pytest.raises(SpecError, match="this model has only one precision: leave base out"):
        Submodels(nn.Linear(2, 2)).normal(on("fp32"))


def test_a_spec_says_its_base_on_the_wire_and_to_people():
    for spec in (on("int8", 2), on("bf16"), FULL):
        assert Spec.from_json(spec.to_json()) == spec and spec.without_base == on(None, 2 if spec.kept else 5)
    assert [str(on("int8", 2)), str(on("bf16")), str(FULL)] == ["hidden[0:2] on int8", "full on bf16", "full"]
    assert on("int8", 2).leading.base == "int8" and on("int8") != on("bf16")
    with pytest.raises(SpecError, match=r"spec\.base is '3': give the name of a precision"):
        Spec.from_json({"base": 3})


def test_a_small_module_computes_with_the_form_and_all_who_have_it_share_one(words):
    module, submodels = words
    state = submodels.state(module)
    table = {"fp32": module.words.weight, "bf16": module.words.weight.bfloat16().float()}
    unit = module.words.weight.abs().amax() / 127
    table["int8"] = (module.words.weight / unit).round() * unit
    for base, weight in table.items():
        made = []
        for units in (5, 2):
            small = submodels.shrink(on(base, units), base=submodels.base_of(on(base, units)))
            submodels.plan(on(base, units), "sent").gather(state, small.present)
            made.append(small.module)
        hidden = F.linear(F.embedding(BATCH[0], weight).mean(1), module.hidden.weight, module.hidden.bias).relu()
        torch.testing.assert_close(made[0](BATCH[0]), module.last(hidden))
        first, second = ([p.data_ptr() for n, p in one.named_parameters() if "words" in n] for one in made)
        assert first == second and first
    assert torch.equal(submodels.state(module)["words.weight"], state["words.weight"])
    digests = [submodels.bases.digest(base) for base in table]
    assert len(set(digests)) == 3 and digests[0] == submodels.base.digest
    assert digests[2] == submodels.base_of(on("int8")).digest


def test_a_client_holds_one_form_at_a_time_and_before_its_first_task_none(words):
    module, kept = words
    submodels, made = Submodels(module, BATCH), []

    def again():
        made.append(Words())
        made[-1].load_state_dict(module.state_dict())
        return made[-1]

    submodels.attach_base(module, again)
    assert submodels.base.digest == kept.base.digest and not made
    assert {tensor.device.type for tensor in submodels.base.tensors.values()} == {"meta"}
    for number, base in enumerate(("int8", "bf16", "fp32"), start=1):
        held = submodels.base_of(on(base))
        assert submodels.base_of(on(base, 2)) is held and len(made) == number
        assert submodels.bases.digest(base) == held.digest == kept.bases.digest(base)
        assert len(submodels.bases._made) == 1
    assert submodels.cost(on("bf16"), 2) == kept.cost(on("bf16"), 2)


def test_what_changes_more_than_the_base_is_refused(words):
    class Wrong(Words):
        def submodel_hold(self, base):
            self.half()

    submodels = Submodels(Wrong(), BATCH)
    with pytest.raises(BadInput, match=r"submodel_hold\('bf16'\) of \w+ must change only frozen"):
        submodels.layout(on("bf16"))


# ---- who gets which ----


def coordinator_of():
    torch.manual_seed(0)
    module = Words()
    submodels = Submodels(module, BATCH)
    state = GlobalState(submodels, submodels.state(module))
    submodels.attach_base(state.values)
    return coordinator_for(fed_async(submodel=RateSelect()), state, min_clients=1)


def given(coordinator, memory_bytes, client=1):
    """What a client with so much memory is asked to train, or why nothing is."""
    (action,) = coordinator.handle(Joined(ClientInfo(client, 1, Profile(memory_bytes=memory_bytes))), 0.0)
    return action.reason if isinstance(action, Dismiss) else action.assignment.spec


def test_three_devices_have_the_most_precise_form_that_fits_each():
    """The table takes 32,000, 16,000 or 8,004 bytes, and all else less than 2,000."""
    coordinator, budgets = coordinator_of(), {"fp32": 4 * TABLE, "bf16": 2 * TABLE, "int8": TABLE + 4}
    for client, (base, num_bytes) in enumerate(budgets.items(), start=1):
        assert given(coordinator, num_bytes + REST, client) == on(base)
    assert given(coordinator, float("inf"), 4) == on("fp32")
    assert "memory_bytes is 8000, too little for any submodel" in given(coordinator, 8000, 5)


def test_to_the_byte_and_the_form_goes_down_before_the_width():
    peaks = {base: coordinator_of().fleet.cost(on(base)).peak_bytes for base in Words.submodel_bases}
    assert given(coordinator_of(), peaks["fp32"]) == on("fp32")
    assert given(coordinator_of(), peaks["fp32"] - 1) == on("bf16")
    assert given(coordinator_of(), peaks["bf16"] - 1) == on("int8")
    assert given(coordinator_of(), peaks["int8"] - 1) == on("int8", 4)
    select, one = RateSelect(), ClientInfo(1, 1, Profile(memory_bytes=peaks["bf16"] - 1))
    fleet = coordinator_of().fleet.of([one])
    assert select.check(fleet) == [] and select(one, fleet).spec == FULL, "a select need know nothing of forms"


def test_a_client_whose_memory_was_too_small_has_a_less_precise_form_next():
    coordinator = coordinator_of()
    specs, actions = [], coordinator.handle(Joined(ClientInfo(1, 1)), 0.0)
    for _ in range(3):
        task = assigned(actions)[1]
        specs.append(task.spec)
        actions = coordinator.handle(Arrived(update_for(coordinator.state, task, 0.0, refusal=OUT_OF_MEMORY)), 0.0)
    assert specs == [on("fp32"), on("bf16"), on("int8")]


def test_a_merge_sees_what_trained_and_not_on_which_base(monkeypatch):
    coordinator, seen = coordinator_of(), []
    given(coordinator, TABLE + 4 + REST)
    (task,) = coordinator.roster.active.values()
    merge = type(coordinator.algorithm.merge)
    monkeypatch.setattr(merge, "receive", lambda self, state, update, spec, staleness: seen.append(spec))
    monkeypatch.setattr(merge, "apply", lambda self, state: None)
    coordinator.handle(Arrived(update_for(coordinator.state, task, 1.0)), 1.0)
    assert task.spec == on("int8") and seen == [FULL]


def test_a_model_in_two_halves_needs_one_form():
    with pytest.raises(
        BadInput, match="the model's frozen base has several precisions, fp32, bf16, int8, but split_fed needs one"
    ):
        split_fed().local.choose_cut(coordinator_of().state.submodels)
