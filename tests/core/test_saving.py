from __future__ import annotations

import io

import pytest
import torch

from raafl.algorithms import (
    co_s2p,
    diloco,
    fadas,
    fed_async,
    fed_avg,
    fed_buff,
    fed_opt,
    fed_raa,
    prune_fl,
    ram_fed,
    timely_fl,
)
from raafl.core.options import Guard
from raafl.core.restoring import from_plain, restore
from raafl.core.saving import save, to_plain
from raafl.core.types import Evaluate
from raafl.parts import RateSelect
from raafl.parts.protect.robust import guarded
from raafl.submodel import Spec
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, line_state, values_of

ALGORITHMS = {
    "fed_raa": lambda: fed_raa(fragments=2, cohort=3),
    "fed_async": lambda: fed_async(alpha=0.3, staleness="polynomial", concurrency=2),
    "fed_buff": lambda: fed_buff(buffer_size=3),
    "fed_avg": lambda: fed_avg(cohort=3, concurrency=2),
    "fed_opt": lambda: fed_opt(cohort=3),
    "diloco": lambda: diloco(trigger="each", delay=5, submodel=RateSelect(rates=[1.0, 0.5], rate_of="width")),
    "fadas": lambda: fadas(3),
    "prune_fl": lambda: prune_fl(every=2),
    "ram_fed": lambda: ram_fed(mask=[1, 2], regions=2, max_age=2),
    "co_s2p": lambda: co_s2p(rates=[1.0, 0.25], mask_rounds=0, trigger="semi"),
    "co_s2p, asynchronous": lambda: co_s2p(rates=[1.0, 0.25], mask_rounds=0, trigger="async"),
    "timely_fl": lambda: timely_fl(slack=0.0, cohort=3),
    "timely_fl, fixed": lambda: timely_fl(slack=0.0, adaptive=False),
    "timely_fl, yogi": lambda: timely_fl(slack=0.0, server_optimizer="yogi"),
    "centred": lambda: guarded(fed_buff(buffer_size=3), Guard(combine="centred_clip", radius=2.0)),
}


def through_a_file(data):
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def play(coordinator, at_work, begin, end, trace):
    """Answer the longest waiting assignment, again and again; the value tells which answer it was."""
    for step in range(begin, end):
        number = min(at_work)
        actions = answer(coordinator, at_work.pop(number), value=float(step), now=float(step), num_samples=1 + step % 3)
        started = list(assigned(actions).values())
        at_work.update({task.id: task for task in started})
        trace += [*started, *(action for action in actions if isinstance(action, Evaluate))]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("cut", [1, 4, 7, 12])
def test_a_restored_coordinator_goes_on_as_if_nothing_had_happened(name, cut):
    def fresh():
        state = line_state(value=0.5)
        return coordinator_for(ALGORITHMS[name](), state, seed=5, min_clients=6, eval_every=4, eval_unit="samples")

    whole, trace = fresh(), []
    at_work = {task.id: task for task in assigned(join(whole, range(1, 7))).values()}
    play(whole, at_work, 0, cut, trace)
    saved = through_a_file({"values": to_plain(whole.state.values), "rest": save(whole)})
    out_at_cut, trace_before = dict(at_work), len(trace)
    play(whole, at_work, cut, 20, trace)

    second, again = fresh(), []
    second.state.values.copy_(from_plain(saved["values"]))
    restore(second, saved["rest"])
    play(second, out_at_cut, cut, 20, again)
    assert again == trace[trace_before:] and len(again) > 2
    assert torch.equal(values_of(second.state), values_of(whole.state))
    assert second.state.values.model_digest() == whole.state.values.model_digest()
    assert (second.merged, second.state.version, second.state.counts) == (
        whole.merged,
        whole.state.version,
        whole.state.counts,
    )


def test_plain_data_comes_back_as_it_was():
    state = line_state(value=2.0)
    value = {
        (1, "a"): [1.5, None, True, "text"],
        "flat": state.values,
        "spec": Spec.select({"hidden": range(1, 3)}),
        "tensor": torch.arange(3),
    }
    back = from_plain(through_a_file(to_plain(value)))
    assert back[(1, "a")] == [1.5, None, True, "text"] and back["spec"] == value["spec"]
    assert back["flat"].layout == state.values.layout and torch.equal(
        back["flat"]["fc1.weight"], state.values["fc1.weight"]
    )
    assert torch.equal(back["tensor"], torch.arange(3))


def test_what_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match="a set cannot be saved"):
        to_plain({"x": {1, 2}})
