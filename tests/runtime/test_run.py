"""Runs that fail: soon, with a reason, and so that they can be resumed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace

import pytest

import raafl
from model_zoo import MLP
from raafl.algorithms import fed_async, fed_avg
from raafl.core.hooks import RunHooks
from raafl.errors import RunFailed
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from raafl.runfolder.events import read_run
from raafl.runfolder.journal import RunFolder
from raafl.runtime.replay import Replay
from raafl.runtime.run import simulate
from raafl.runtime.setup import build, make_executor
from tests.helpers.small_runs import digits, experiment, finish, small_mlp, unequal

pytestmark = pytest.mark.timeout(120)


def exploding():
    return MLP(64, (8,), 10, lr=1e38)


def test_a_model_that_is_never_finite_is_found_after_three_refusals_of_each_client(tmp_path):
    made = experiment(tmp_path / "run", fed_async(), model=exploding)
    run = finish(made)
    assert run.summary["finished"].startswith("failed: the last 3 updates of every client were refused, those of")
    assert 12 <= run.summary["updates_refused"]["non-finite"] <= 12 + 4  # fast clients may come back on probation
    assert set(run.summary["clients_kept_out"]) == {"1", "2", "3", "4"}
    again = finish(replace(made, resume=str(run.folder)))  # nothing has changed, so it fails again
    assert again.summary["finished"].startswith("failed: the last 3 updates")
    refused, more = (one.summary["updates_refused"]["non-finite"] for one in (run, again))
    assert refused < more <= refused + 4


class Stopping(RunHooks):
    """Ends the run once so many updates have settled."""

    def __init__(self, num: int, why: str) -> None:
        self.num, self.why, self.seen = num, why, 0

    def on_settled(self, settled, now):
        self.seen += 1

    def stop_asked(self):
        return self.why if self.seen >= self.num else None


class Killing(RunHooks):
    """Sends this process the signal of a time limit, once its first update has settled."""

    def on_settled(self, settled, now):
        if settled.assignment.id == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_the_tests_does_not_pass_for_another_end_of_a_run(tmp_path):
    made = experiment(tmp_path / "run", fed_async())
    with pytest.raises(KeyboardInterrupt, match="a signal to the tests has ended the run in"):
        finish(made, lambda made: simulate(made, observer=Killing()))


@pytest.mark.quick_cases("fed_async-failed: of something", "fed_buff-stopped")
@pytest.mark.parametrize("why", ["failed: of something", "stopped"])
@pytest.mark.parametrize("name", ["fed_async", "fed_avg", "fed_buff"])
def test_a_run_that_ended_otherwise_goes_on_as_if_it_had_not(tmp_path, name, why):
    whole = finish(experiment(tmp_path / "whole", name, max_updates=30))
    made = experiment(tmp_path / "cut", name, max_updates=30)
    summary, folder = simulate(made, observer=Stopping(13, why))
    assert summary["finished"] == why and list((folder / "checkpoints").iterdir())
    resumed = finish(replace(made, resume=str(folder)))
    assert resumed.digest == whole.digest and resumed.text("clients.csv") == whole.text("clients.csv")
    assert resumed.summary["coverage"] == whole.summary["coverage"]
    assert whole.summary["coverage"]["mean"] == whole.summary["coverage"]["min"] == 1.0  # all train the whole model
    assert resumed.summary["peak_memory"] == whole.summary["peak_memory"]
    assert whole.summary["peak_memory"]["predicted_bytes"] > 0


def test_a_client_that_is_kept_out_in_a_simulation_comes_back_and_the_run_replays(tmp_path, monkeypatch, capsys):
    """Client 2's first four answers come out wrong; the run is cut while it is kept out, and goes on the same."""
    from raafl.runtime import executors as pool

    result = pool.Inline.result

    def wrong(self, number):
        update = result(self, number)
        if update.client == 2 and broken[0] > 0:
            broken[0] -= 1
            update.refusal = "bad-scores"
        return update

    monkeypatch.setattr(pool.Inline, "result", wrong)
    fields = {"clients": 2, "devices": unequal((2e6, 1e6)), "max_updates": 70}
    broken = [4]
    whole = finish(experiment(tmp_path / "whole", fed_async(), progress="plain", **fields))
    assert whole.summary["updates_refused"] == {"bad-scores": 4} and whole.summary["clients_kept_out"] == {"2": 2}
    said = capsys.readouterr().out
    assert "client 2 is suspended for 10.0 s: its last 3 updates were refused (bad-scores)" in said
    assert "client 2 is suspended for 20.0 s: its last 4 updates were refused (bad-scores)" in said
    assert whole.summary["participation"]["2"] > 0
    broken = [4]
    # one checkpoint after the other is being written while the run goes on: what is saved must not change under the writer
    made = experiment(tmp_path / "cut", fed_async(), checkpoint_s=1e-9, **fields)
    _, folder = simulate(made, observer=Stopping(12, "failed: of something"))
    resumed = finish(replace(made, resume=str(folder)))
    trained, again = (
        [(row["assignment"], row["fingerprint"]) for row in run.events("arrived")] for run in (whole, resumed)
    )
    assert again == trained  # the first task that came out otherwise, if any
    assert resumed.digest == whole.digest and resumed.text("clients.csv") == whole.text("clients.csv")
    broken = [0]
    parts = build(made, pace=False)
    with closing(make_executor(parts, 1)) as executor:
        played = Replay(parts.coordinator, executor)
        played.run(read_run(folder)[0])
    assert played.first_difference is None and parts.coordinator.state.values.model_digest() == whole.digest


class Broken(Full):
    """Raises from a version on where the test says: as it chooses, as it is told of an answer or of a round."""

    at, bad, since = "call", (2,), 2

    def __call__(self, client, fleet):
        if client.id in self.bad:
            self._raise("call", fleet)
        return super().__call__(client, fleet)

    def on_update(self, client, assignment, took_s, fleet):
        if client.id in self.bad:
            self._raise("on_update", fleet)

    def on_round_start(self, clients, fleet):
        self._raise("on_round_start", fleet)

    def _raise(self, at, fleet):
        if at == self.at and fleet.state.version >= self.since:
            raise AttributeError("no share")


def broken(folder, **more):
    return experiment(folder, replace(fed_avg(), select=Broken()), max_updates=16, **more)


@pytest.mark.parametrize(
    ("at", "bad", "said"),
    [
        ("call", (2,), "the server, for client 2: AttributeError: no share"),
        ("call", (1, 2, 3, 4), "the server, for client "),
        ("on_update", (3,), "the server, for client 3: AttributeError: no share"),
        ("on_round_start", (), "the server: AttributeError: no share"),
    ],
)
def test_a_part_that_raises_ends_a_simulation_as_a_task_does(tmp_path, monkeypatch, at, bad, said, capsys):
    monkeypatch.setattr(Broken, "at", at)
    monkeypatch.setattr(Broken, "bad", bad)
    run = finish(broken(tmp_path / "run", progress="plain", checkpoint_every=1))
    reason = run.summary["finished"]
    assert reason.startswith(f"failed: {said}") and "(tests/runtime/test_run.py:" in reason
    told = run.text("failure.txt")
    assert told.startswith(reason) and f"in {'__call__' if at == 'call' else at}" in told
    assert "caused an error" not in capsys.readouterr().out
    monkeypatch.setattr(Broken, "at", "nowhere")
    mended, whole = finish(broken(None, resume=str(run.folder))), finish(broken(tmp_path / "whole"))
    assert mended.digest == whole.digest and mended.text("clients.csv") == whole.text("clients.csv")


def test_a_merge_that_raises_leaves_the_checkpoint_before_it_the_last(tmp_path, monkeypatch):
    apply = Mean.apply

    def fails(self, state):
        apply(self, state)
        if state.version == 2:
            raise ZeroDivisionError("share")

    whole = finish(experiment(tmp_path / "whole", fed_avg(), max_updates=16))
    with monkeypatch.context() as patch:
        patch.setattr(Mean, "apply", fails)
        run = finish(experiment(tmp_path / "run", fed_avg(), max_updates=16, checkpoint_every=1))
    assert run.summary["finished"].startswith("failed: the server: ZeroDivisionError: share (tests/runtime/")
    resumed = finish(experiment(None, fed_avg(), max_updates=16, resume=str(run.folder)))
    assert resumed.digest == whole.digest and resumed.text("clients.csv") == whole.text("clients.csv")


def test_python_raises_run_failed_for_a_part_that_raises_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Broken, "since", 0)
    settings = {"devices": unequal(), "max_updates": 8, "num_steps": 1, "progress": "quiet", "output": tmp_path / "run"}
    with pytest.raises(
        RunFailed, match=r"^the server, for client 2: AttributeError: no share \(.*run folder: "
    ) as raised:
        raafl.Federation(replace(fed_avg(), select=Broken()), **settings).simulate(small_mlp, digits())
    assert type(raised.value.__cause__) is AttributeError
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_cannot_be_closed_gives_the_interrupt_back(tmp_path):
    class Away(RunHooks):
        def close(self):
            raise OSError("the tracking server is away")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="is away"):
        simulate(experiment(tmp_path / "run"), "x: 1\n", Away())
    assert signal.getsignal(signal.SIGINT) is before
    assert finish(experiment(tmp_path / "next")).summary["finished"] == "max_updates"


@pytest.mark.parametrize("was_there", [False, True])
def test_a_run_that_cannot_begin_leaves_its_folder_as_it_was_and_unlocked(tmp_path, was_there):
    """An observer fails once the folder is there, such as a logger without its server."""

    class Unready(RunHooks):
        def opened(self):
            assert (tmp_path / "run" / "config.yaml").is_file()
            raise OSError("the tracking server is away")

    if was_there:
        (tmp_path / "run").mkdir()
    with pytest.raises(OSError, match="is away") as raised:  # whose traceback keeps the run
        simulate(experiment(tmp_path / "run"), "x: 1\n", Unready())
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"] * was_there
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    assert finish(experiment(tmp_path / "run")).summary["finished"] == "max_updates"
    del raised


def test_a_run_without_an_output_takes_another_name_where_one_of_the_same_second_was_faster(tmp_path, monkeypatch):
    """A shell may start many runs at once: a name that is free when it is chosen may be taken when the folder is made."""
    taken = tmp_path / "a"
    chosen = iter([taken, taken, tmp_path / "b", tmp_path / "b"])
    monkeypatch.setattr("raafl.runtime.run.default_run_folder", lambda name: next(chosen))
    with closing(RunFolder(taken, "")):
        run = finish(replace(experiment(tmp_path), output=None))
    assert run.folder == tmp_path / "b" and run.summary["finished"] == "max_updates"


def test_a_run_that_cannot_go_on_keeps_its_files_and_gives_its_folder_back(tmp_path):
    class Unready(RunHooks):
        def opened(self):
            raise OSError("the tracking server is away")

    class Stopped(RunHooks):
        def stop_asked(self):
            return "interrupted"

    made = {"checkpoint_every": 1, "max_updates": 4}
    whole = finish(experiment(tmp_path / "whole", **made))
    simulate(experiment(tmp_path / "run", **made), "", Stopped())
    again = experiment(None, **made, resume=str(tmp_path / "run"))
    with pytest.raises(OSError, match="is away"):
        simulate(again, "", Unready())
    resumed = finish(again)
    assert resumed.digest == whole.digest and resumed.rows() == whole.rows()
