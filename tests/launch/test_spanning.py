"""One client in two real processes: the update of one, and the end of all when one dies."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raafl.algorithms import ALGORITHMS
from raafl.errors import BadInput, RunFailed
from raafl.local.client_group import num_processes
from raafl.runtime.client.multiprocess import ClientGroup, _hello, refuse
from tests.habits.source import ROOT
from tests.helpers import forkserver
from tests.helpers.certificates import CertifiedSites
from tests.helpers.forked_command import command, wait_for
from tests.launch.one_task import METHODS, site, tasks

TORCHRUN = ("--standalone", "--nproc-per-node=2")
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
pytestmark = pytest.mark.timeout(480)


def in_two_processes(folder, name):
    """Updates of one client in two processes, and by how much memory the last task has made each grow at its peak."""
    argv = (*TORCHRUN, str(ROOT / "tests" / "launch" / "one_task.py"), str(folder), name)
    with command(folder / "c", *argv, before=forkserver.start, entry=forkserver.torchrun) as started:
        assert started.end() == 0, started.err
    return torch.load(folder / "found.pt"), [int((folder / f"peak-{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.quick_cases("fed_raa", "diloco, sharded")
@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("deep")])
def test_two_processes_come_to_the_update_of_one(tmp_path, name):
    """Batches of 64 in float32: 32 and 32 rows summed apart; the last batch is of another size, whose halves may differ."""
    found, _ = in_two_processes(tmp_path, name)
    expected = tasks(site(tmp_path, name))
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name]["num_steps"] == one["num_steps"] > 1
        assert found[name]["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
        assert found[name]["tensors"].keys() == one["tensors"].keys()
        for key, tensor in one["tensors"].items():
            torch.testing.assert_close(found[name]["tensors"][key], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.long("test_two_processes_come_to_the_update_of_one")
def test_a_sharded_client_needs_less_memory_in_each_process(tmp_path):
    """Each has values, gradients, Adam's moments and sums of gradients; sharded, half of them, the leader also what came."""
    peaks = []
    for name in ("deep", "deep, sharded"):
        (tmp_path / name).mkdir()
        found, grown = in_two_processes(tmp_path / name, name)
        peaks.append(grown)
    whole_bytes = sum(tensor.nbytes for tensor in found[2]["tensors"].values())
    (leader, follower), (sharded_leader, sharded_follower) = peaks
    assert min(leader, follower) > 4 * whole_bytes
    assert sharded_leader < 0.75 * leader and sharded_follower < 0.75 * follower


@pytest.mark.quick_cases("whole")
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_when_a_process_dies_the_client_ends_with_a_line_and_is_lost(tmp_path, free_port, kind):
    folder, notes = tmp_path / "run", tmp_path / "started"
    notes.mkdir()
    address = ("--address", f"127.0.0.1:{free_port}", "--certs", str(tmp_path / "certs"))
    CertifiedSites(tmp_path / "certs").site()
    options = ("--config", QUICKSTART, "--clients", "1", "--max_updates", "1000000", "--progress", "quiet")
    options += ("--waits.resume_s", "1")  # how long the server waits for the same process to come back
    if kind == "sharded":
        options += ("--algorithm", "diloco", "--fabric.shard", "true")

    def events(kind):
        journal = folder / "events.jsonl"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if row["event"] == kind]

    join = (*TORCHRUN, "-m", "raafl", "join", *address, "--client", "1")
    with (
        command(tmp_path / "server", "serve", *options, *address, "--output", str(folder)) as server,
        command(
            tmp_path / "c",
            *join,
            before=forkserver.start,
            entry=forkserver.torchrun,
            **{forkserver.STARTED: str(notes)},
        ) as client,
    ):
        wait_for(lambda: len(events("arrived")) > 2, "updates")
        ranks = {one.rank: one.process for one in forkserver.started(notes)}
        ranks["1"].send_signal(signal.SIGKILL)
        assert client.end() == 1
        assert "raafl, client 1: process 1 of this client is gone: the client ends" in client.err.splitlines()
        assert not ranks["0"].is_running()
        wait_for(lambda: events("lost"), "the loss of the client")
        server.send(signal.SIGINT)
        assert server.end() == 130, server.err
    assert [row["client"] for row in events("lost")] == [1]
    assert events("lost")[0]["reason"].startswith("disconnected")


@pytest.mark.long("test_two_processes_come_to_the_update_of_one")
def test_when_processes_are_unlike_none_waits_for_the_others(tmp_path):
    """A follower that waited to be joined would have to be killed by torchrun, half a minute later."""
    argv = (*TORCHRUN, str(ROOT / "tests" / "launch" / "unlike.py"), str(tmp_path))
    with command(tmp_path / "c", *argv, before=forkserver.start, entry=forkserver.torchrun) as started:
        assert started.end() == 1
    assert "client 1: its processes differ in config" in started.out
    assert "SIGKILL" not in started.err


@pytest.mark.parametrize("missing", [None, "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"])
def test_only_what_torchrun_has_started_spans(monkeypatch, missing):
    """Other launchers set some of these variables for programs that are clients of their own."""
    given = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.delenv(name, raising=False)
        if name != missing:
            monkeypatch.setenv(name, value)
    assert num_processes() == (3 if missing is None else 1)


@pytest.mark.parametrize("algorithm", ["fed_mezo", "split_fed"])
def test_an_algorithm_that_cannot_span_is_refused_before_anything_is_sent(tmp_path, algorithm):
    here = site(tmp_path, "fed_raa")
    here.experiment = replace(here.experiment, algorithm=ALGORITHMS[algorithm]())
    with pytest.raises(BadInput, match=f"algorithm is '{algorithm}', whose clients cannot have several processes"):
        refuse(here)


def test_processes_must_be_alike_and_the_one_with_least_memory_counts(tmp_path):
    here, leader = site(tmp_path, "fed_raa"), SimpleNamespace(_client=2)
    assert ClientGroup._compared(leader, here, 1, _hello(here)).info == here.info
    less = ClientGroup._compared(leader, here, 1, replace(_hello(here), memory_bytes=5e6))
    assert less.info.profile == replace(here.info.profile, memory_bytes=5e6)
    with pytest.raises(
        RunFailed, match=r"client 2: its processes differ in num_samples: .* in process 0, 7 in process 1"
    ):
        ClientGroup._compared(leader, here, 1, replace(_hello(here), client={"num_samples": 7}))
