"""A hook of a user's own part that returns something else than raafl uses is named in the error."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from raafl.algorithm import EachArrival, Full, Hook, Local, Mean, Merge, RateSelect, Sample, Select, Spec, Work
from raafl.core.types import Part
from raafl.errors import WrongReturn
from raafl.runfolder import checkpoint_reader
from raafl.runtime.lifecycle.resume import check_state
from raafl.runtime.run import simulate
from tests.helpers.small_runs import experiment


def overriding(base: type, name: str, value: object) -> type:
    """A class of a user, derived from ``base``, one hook of which always returns ``value``."""

    def hook(self, *args, **named):
        return value

    return type("Own", (base,), {name: property(hook) if isinstance(getattr(base, name, None), property) else hook})


def with_part(tmp_path, **parts):
    planned = experiment(tmp_path / "run", "fed_async")
    return replace(planned, algorithm=replace(planned.algorithm, **parts))


@dataclass(frozen=True)
class OwnHook(Local):
    kind: type = Hook

    def hook(self, task):
        return self.kind(task)


KINDS = {"sample": Sample, "select": Full, "trigger": EachArrival, "merge": Mean, "local": Local, "hook": Hook}


def own_part(part, name, value):
    """A part with one hook that always returns ``value``."""
    own = overriding(KINDS[part], name, value)
    if part == "hook":
        return OwnHook(kind=own)
    return own(alpha=0.5) if part == "merge" else own()


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("sample", "draw", None, "returned None: let it return `list[int]`"),
        ("sample", "draw", [1, "two"], "returned [1, 'two']: let it return `list[int]`"),
        ("select", "__call__", Spec(), "returned an object of Spec: let it return `Work`"),
        ("select", "__call__", Work(spec="full"), "returned Work(..., spec='full'): let that be `Spec`"),
        ("select", "__call__", Work(num_steps=1.5), "returned Work(..., num_steps=1.5): let that be `int | None`"),
        ("select", "__call__", Work(extra={1: 2}), "returned Work(..., extra={1: 2}): let that be `Mapping[str, Any]`"),
        ("select", "check", "wrong", "returned 'wrong': let it return `list[str]`"),
        ("trigger", "due", None, "returned None: let it return `bool`"),
        ("trigger", "on_update", True, "returned True: let it return `Adjusted | None`"),
        ("merge", "ends_run", False, "returned False: let it return `str | None`"),
        ("merge", "numbers", ["many"], "returned ['many']: let it return `Sequence[float]`"),
        ("merge", "figures", {"a": "b"}, "returned {'a': 'b'}: let it return `dict[str, float | None]`"),
        ("local", "prepare", None, "returned None: let it return `torch.nn.Module`"),
        ("local", "traits", None, "returned None: let it return `Traits`"),
        ("hook", "loss", 0.5, "returned 0.5: let it return `torch.Tensor`"),
    ],
)
def test_a_hook_that_returns_another_type_is_named(part, name, value, says):
    made = own_part(part, name, value)
    with pytest.raises(WrongReturn) as error:
        hook = getattr(made.kind(None) if part == "hook" else made, name)
        hook(*[()] * 3, **{"rolling": True} if name == "draw" else {})
    assert str(error.value) == f"Own.{name} {says}"


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("sample", "draw", [99], "returned client 99, which is not idle: let it return clients of `idle`, each once"),
        ("sample", "draw", [1, 1], "returned a client twice: let it return clients of `idle`, each once"),
        ("select", "__call__", None, "returned None: let it return `Work`"),
        ("select", "notes", None, "returned None: let it return `list[str]`"),
        ("merge", "reject_reason", False, "returned False: let it return `str | None`"),
        ("hook", "finish", None, "returned None: let it return `dict[str, Any]`"),
    ],
)
def test_a_run_ends_with_the_name_of_the_hook(tmp_path, part, name, value, says):
    try:
        parts = {"local" if part == "hook" else part: own_part(part, name, value)}
        summary, folder = simulate(with_part(tmp_path, **parts))
    except WrongReturn as error:  # before the run
        assert (name, str(error)) == ("notes", f"Own.notes {says}")
        assert not (tmp_path / "run").exists()
    else:
        assert summary["finished"].startswith("failed: ")
        assert summary["finished"].endswith(f"WrongReturn: Own.{name} {says}")
        assert (folder / "failure.txt").is_file()


def test_numbers_and_containers_of_other_libraries_are_as_good():
    class Own(Mean):
        def numbers(self, update):
            return np.array([0.5])

        def figures(self, state):
            return {"of_numpy": np.float32(1), "of_torch": torch.tensor(2.0), "none": None}

        def reject_reason(self, state, update, spec, staleness):
            return None

    merge = Own(0.5)
    assert merge.numbers(None) == [0.5] and len(merge.figures(None)) == 3
    assert merge.reject_reason(None, None, None, 0) is None
    assert overriding(EachArrival, "due", np.bool_(True))().due(None)
    assert overriding(Sample, "draw", (1, np.int64(2)))().draw({1, 2}, 0, None, rolling=True) == [1, 2]
    with pytest.raises(WrongReturn, match="returned <genexpr>: let it"):  # it would be used up
        overriding(Mean, "numbers", (number for number in (0.5,)))(0.5).numbers(None)
    # what the outermost class promises counts: EachArrival.needed returns a number, and Trigger's may return None
    assert overriding(EachArrival, "needed", None)().needed(1, 0) is None


def test_only_a_users_classes_are_checked_once_and_still_override():
    assert not hasattr(RateSelect.__call__, "__wrapped__") and not hasattr(Mean.weigh, "__wrapped__")

    @dataclass(frozen=True, slots=True)  # builds the class a second time
    class Own(Sample):
        def draw(self, idle, num_busy, rng, *, rolling):
            "Draw nobody."
            return []

    assert not hasattr(Own.draw.__wrapped__, "__wrapped__") and Own.draw.__doc__ == "Draw nobody."
    assert OwnHook.hook is not Local.hook and not OwnHook(kind=Hook).steps_are_plain


def test_every_public_hook_of_a_part_promises_a_type_that_is_known():
    unknown = []
    for kind in (Sample, Select, Local, EachArrival.__mro__[1], Merge, Hook):
        for name, value in vars(kind).items():
            is_hook = callable(value) or isinstance(value, property)
            if name.startswith("_") or not is_hook or isinstance(value, staticmethod | classmethod):
                continue
            function = value.fget if isinstance(value, property) else value
            if function.__annotations__["return"] == "None":
                continue
            own = vars(overriding(kind, name, object()))[name]
            if not hasattr(own.fget if isinstance(own, property) else own, "__wrapped__"):
                unknown.append(f"{kind.__name__}.{name}")
    # the class of an exchange is imported by the methods that have one
    assert unknown == ["Local.exchange"]
    assert issubclass(Hook, Part)


def test_a_trigger_that_names_no_waiting_update_ends_the_run(tmp_path):
    class Nobody(EachArrival):
        def merged_now(self, waiting):
            return [99]

    merge = overriding(Mean, "merges_some", None)(0.5)
    object.__setattr__(merge, "merges_some", True)
    summary, _ = simulate(with_part(tmp_path, trigger=Nobody(), merge=merge))
    assert "WrongReturn: Nobody.merged_now returned no update that waits: let it name some" in summary["finished"]


def test_what_a_merge_reports_wrongly_at_the_end_does_not_cost_the_summary(tmp_path):
    plain, _ = simulate(experiment(tmp_path / "plain", "fed_async"))
    mean = experiment(tmp_path, "fed_async").algorithm.merge

    class Own(Mean):
        def report(self, state):
            raise KeyError("missing")

    for number, kind in enumerate((Own, overriding(Mean, "report", {"a": {1}}))):
        merge = kind(mean.alpha, mean.staleness, mean.by_samples)
        summary, folder = simulate(with_part(tmp_path / str(number), merge=merge))
        assert summary["model_digest"] == plain["model_digest"] and summary["finished"] == "max_updates"
        assert "the summary lacks what the merge reports: " in summary["warnings"][-1]
        assert json.loads((folder / "summary.json").read_text())["model"]


def test_figures_that_fail_in_the_middle_end_a_simulation_with_its_summary(tmp_path):
    class Own(Mean):
        def figures(self, state):
            return {"inverse": 1 / (state.version == 0)}

    summary, folder = simulate(with_part(tmp_path, merge=Own(0.5)))
    assert summary["finished"].startswith("failed: the server: ZeroDivisionError: division by zero")
    assert json.loads((folder / "summary.json").read_text())["traceback"] == "failure.txt"


def test_a_merge_that_ends_the_run_for_a_reason_of_its_own_keeps_the_model(tmp_path):
    class Own(Mean):
        def ends_run(self, state):
            return "converged" if state.version == 4 else None

    summary, folder = simulate(with_part(tmp_path, merge=Own(0.5)))
    assert summary["finished"] == "converged" and summary["model"] == "checkpoints/version-000004.ckpt"
    section = checkpoint_reader.load(folder / summary["model"]).raafl
    assert section["finished"] == "converged"
    check_state(section)
    for end in ("", "interrupted", "failed: x"):  # at such an end no checkpoint says so
        with pytest.raises(ValueError, match="finished is"):
            check_state({**section, "finished": end})
