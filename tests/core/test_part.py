"""A part's method that is almost a hook, and called by nobody, is refused where the class is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from raafl.algorithms import fed_avg, fed_compass
from raafl.core.algorithm import Hook, Local, Merge, Select, Trigger
from raafl.core.sample import Sample
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (Mean, "weight", "weigh"),
        (Merge, "recieve", "receive"),
        (Merge, "reject_reasons", "reject_reason"),
        (Select, "on_joined", "on_join"),
        (Trigger, "wakes_at", "wake_at"),
        (Local, "hooks", "hook"),
        (Hook, "backwards", "backward"),
        (Sample, "concurency", "concurrency"),
    ],
)
def test_a_misspelt_override_is_refused(base, name, meant):
    message = (
        f"^Own has a method '{name}', which nothing calls: {base.__name__} has no '{name}', did you mean '{meant}'?"
    )
    with pytest.raises(BadInput, match=message.replace("?", r"\?")):
        type("Own", (base,), {name: lambda self: None})


@pytest.mark.parametrize("base", [Mean, Merge, Select, Trigger, Local, Hook, Sample])
@pytest.mark.parametrize("name", ["_weight", "_recieve", "helper", "normalised", "scores", "mean_of_losses"])
def test_helpers_of_its_own_are_allowed(base, name):
    assert type("Own", (base,), {name: lambda self: None})


def test_a_dataclass_with_slots_may_override():
    @dataclass(frozen=True, slots=True)
    class Never(Trigger):
        weight: float = 0.0

        def due(self, waiting):
            return False

    assert not Never().due(None)


def test_a_trigger_that_merges_some_needs_a_merge_that_does():
    """A merge that sums what it receives would merge the rest, too, and the coordinator would count it as waiting."""
    compass, average = fed_compass(), fed_avg()
    message = "its merge Mean all of them: give a merge that has merges_some"
    with pytest.raises(BadInput, match=message):
        replace(compass, merge=average.merge)
    assert replace(compass, name="mine").merge is compass.merge
    assert replace(average, merge=compass.merge).trigger is average.trigger
