"""Several observers are called in order; the first reason to stop counts, and metrics pass from one to the next."""

from __future__ import annotations

import pytest

from raafl.core.hooks import HookList, RunHooks


class Adds(RunHooks):
    def __init__(self, name, reason=None, due=False):
        self.name, self.reason, self.due, self.seen = name, reason, due, []

    def on_measured(self, version, now, metrics):
        return {**metrics, self.name: len(metrics)}

    def on_evaluate(self, version, now, metrics):
        self.seen.append((version, now, metrics))

    def stop_asked(self):
        return self.reason

    def checkpoint_due(self):
        return self.due


def test_each_is_called_in_order():
    first, second = Adds("a"), Adds("b", reason="enough", due=True)
    both = HookList(first, second, Adds("c", reason="later"))
    assert both.on_measured(1, 2.0, {"loss": 0.5}) == {"loss": 0.5, "a": 1, "b": 2, "c": 3}
    both.on_evaluate(1, 2.0, {"loss": 0.5})
    assert first.seen == second.seen == [(1, 2.0, {"loss": 0.5})]
    assert both.stop_asked() == "enough" and both.checkpoint_due()


def test_an_observer_that_overrides_nothing_asks_for_nothing():
    nothing = HookList(RunHooks())
    assert nothing.on_measured(0, 0.0, {"loss": 1.0}) == {"loss": 1.0}
    assert nothing.stop_asked() is None and not nothing.checkpoint_due()


ANSWERS = {"on_measured", "figures", "stop_asked", "checkpoint_due"}
"""Hooks whose results of several observers become one; the others return nothing."""
HOOKS = sorted(
    name
    for name, value in vars(RunHooks).items()
    if callable(value) and name[0] != "_" and name not in (*ANSWERS, "close")
)


def test_a_hook_that_answers_is_written_out():
    """The loop that passes on the others would drop an answer."""
    hooks = {name: value for name, value in vars(RunHooks).items() if callable(value) and name[0] != "_"}
    assert {name for name, value in hooks.items() if value.__annotations__["return"] != "None"} == ANSWERS


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_reaches_each_observer_with_its_arguments(name, monkeypatch):
    calls = []
    monkeypatch.setattr(RunHooks, name, lambda self, *args, **kwargs: calls.append((self, args, kwargs)))
    first, second = RunHooks(), RunHooks()
    getattr(HookList(first, second), name)(1, 2.0, more=3)
    assert calls == [(one, (1, 2.0), {"more": 3}) for one in (first, second)]


def test_one_that_cannot_be_closed_keeps_no_other_open():
    closed = []

    class Away(RunHooks):
        def close(self):
            raise OSError("the tracking server is away")

    class Closed(RunHooks):
        def close(self):
            closed.append(self)

    first, last = Closed(), Closed()
    with pytest.raises(OSError, match="is away"):
        HookList(first, Away(), last).close()
    assert closed == [first, last]
