"""`raafl serve` and `raafl join`: clients that come late, die, hang, come back, come twice, or do not belong here."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from raafl.config.options import Timeouts
from raafl.config.parse import parse
from raafl.core.types import Arrived, Joined, Lost, Stop
from raafl.runfolder.books import check_books
from raafl.runtime.replay import replay
from raafl.sites.receipts import SiteReceipts, compare, server_keys
from tests.helpers.certificates import federation
from tests.helpers.joining_clients import SITE, remote
from tests.helpers.real_ranks import Watched

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
WAITS = Timeouts(join_s=60.0, task_s=60.0, idle_s=60.0, stop_s=5.0, alone_s=60.0, resume_s=0.5)
SEEN = "stopped: seen"
SLOW = 0.3  # seconds a task of the second client takes at least


def parsed(tmp_path, *options, waits=WAITS, second_s=SLOW):
    """The quick start, its tasks short but for the second client's."""
    flops = 15010 * 6 * 32  # of the whole model's task, about
    devices = [{"name": f"d{i}", "flops_per_s": flops / (second_s if i == 2 else 0.02)} for i in range(1, 5)]
    found = parse(
        "serve",
        [
            "--config",
            QUICKSTART,
            "--progress=quiet",
            f"--output={tmp_path / 'run'}",
            "--train.num_epochs=null",
            "--train.num_steps=1",
            f"--devices={yaml.safe_dump(devices, default_flow_style=True, width=10000).strip()}",
            *options,
        ],
    )
    return replace(found.experiment, waits=waits), found.config_yaml


ENDLESS = "--max_updates=100000"


class On:
    """Does something when the server takes an event that a test waits for; once each, in order. After the last the run ends."""

    def __init__(self, *steps):
        self.steps, self.inbox = [*steps[:-1], (steps[-1][0], steps[-1][1] or self.stop)], Watched(self.look)

    def look(self, event):
        while self.steps and self.steps[0][0](event):
            self.steps.pop(0)[1]()

    def stop(self):
        self.inbox.put(Stop(SEEN))


def nothing():
    pass


def arrived(client, incarnation=0):
    return lambda event: (
        isinstance(event, Arrived) and (event.update.client, event.update.incarnation) == (client, incarnation)
    )


def joined(client, incarnation=0):
    return lambda event: (
        isinstance(event, Joined) and (event.client.id, event.client.incarnation) == (client, incarnation)
    )


def lost(client):
    return lambda event: isinstance(event, Lost) and event.client == client


def after(number, matches):
    count = iter(range(10**6))
    return lambda event: matches(event) and next(count) >= number - 1


def settled(run):
    """Every assignment handed out has exactly one row."""
    numbers = sorted(int(row["assignment"]) for row in run.rows() if row["assignment"])
    assert numbers == sorted(row["id"] for row in run.events("assigned"))
    assert len(set(numbers)) == len(numbers)


def test_a_client_killed_in_a_task_is_back_under_a_new_incarnation(tmp_path):
    experiment, config = parsed(tmp_path, "--clients=3", ENDLESS, "--logger=csv")
    with remote(experiment, config, tmp_path, [1, 2, 3, 2], held_back=[3]) as fleet:
        first, second = fleet.joiners[1], fleet.joiners[3]
        on = On(
            (after(2, arrived(1)), lambda: first.send(signal.SIGKILL)), (lost(2), second.begin), (arrived(2, 1), None)
        )
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, -signal.SIGKILL, 0, 0]
    assert run.summary["finished"] == SEEN
    (row,) = [row for row in run.rows() if row["outcome"].startswith("lost")]
    assert (row["client"], row["incarnation"], row["outcome"]) == ("2", "0", "lost:disconnected")
    assert {row["incarnation"] for row in run.rows() if row["client"] == "2"} == {"0", "1"}
    assert run.summary["participation"]["2"] > 0
    assert run.summary["loggers"]["CSVLogger"]["logged"] == len(run.rows("metrics.csv"))
    settled(run)
    assert replay(run.folder)["equal"] is True


@pytest.mark.long("test_a_client_killed_in_a_task_is_back_under_a_new_incarnation")
def test_a_client_that_hangs_is_lost_at_its_deadline_and_comes_back(tmp_path):
    experiment, config = parsed(tmp_path, "--clients=3", ENDLESS, waits=replace(WAITS, task_s=5.0))
    with remote(experiment, config, tmp_path, [1, 2, 3]) as fleet:
        second = fleet.joiners[1]
        on = On(
            (arrived(2), lambda: second.send(signal.SIGSTOP)),
            (lost(2), lambda: second.send(signal.SIGCONT)),
            (joined(2, 1), None),
        )
        run = fleet.serve(on.inbox)
        assert not on.steps
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0]
    assert "trying again" in second.words()
    (row,) = [row for row in run.rows() if row["outcome"].startswith("lost")]
    assert (row["client"], row["outcome"]) == ("2", "lost:timeout")
    settled(run)
    assert replay(run.folder)["equal"] is True


def test_of_two_clients_with_one_id_the_newer_takes_part_and_the_older_is_told(tmp_path):
    experiment, config = parsed(tmp_path, "--clients=2", ENDLESS)
    with remote(experiment, config, tmp_path, [1, 2, 2], held_back=[2]) as fleet:
        older, newer = fleet.joiners[1:]
        on = On((arrived(2), newer.begin), (joined(2, 1), nothing), (arrived(2, 1), None))
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 3, 0]
    assert older.words().splitlines()[-1] == "client 2: replaced: client 2 has joined from elsewhere"
    assert [row["outcome"] for row in run.rows() if row["outcome"].startswith("lost")] == ["lost:replaced"]
    settled(run)
    assert replay(run.folder)["equal"] is True


def test_work_starts_with_few_and_a_late_client_takes_part(tmp_path):
    experiment, config = parsed(tmp_path, "--clients=3", ENDLESS)
    with remote(experiment, config, tmp_path, [1, 3], held_back=[1]) as fleet:
        late = fleet.joiners[1]
        on = On((after(5, arrived(1)), late.begin), (arrived(3), None))
        run = fleet.serve(on.inbox, min_clients=1)
        assert not on.steps
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    assert sorted(run.summary["participation"]) == ["1", "3"]
    assert replay(run.folder)["equal"] is True


def test_clients_that_do_not_belong_here_are_told_why_in_one_line_and_counted(tmp_path):
    experiment, config = parsed(tmp_path, "--clients=3", "--max_updates=300")
    other = config.replace("momentum: 0.5", "momentum: 0.4")
    assert other != config
    strangers = [
        (2, {"config_yaml": other}),
        (2, {"protocol": 9}),
        (2, {"credentials": replace(federation("strangers").site(), ca=SITE.ca)}),
        (7, {}),
    ]
    with remote(experiment, config, tmp_path, [1, *strangers], held_back=[1, 2, 3, 4]) as fleet:
        begin = [joiner.begin for joiner in fleet.joiners[1:]]
        on = On((arrived(1), lambda: [let() for let in begin]), (lambda event: done.is_set(), stop_serving))
        waiting = threading.Thread(target=lambda: [j.exit_code() for j in fleet.joiners[1:]] and done.set())
        done = threading.Event()
        waiting.start()
        endless = replace(experiment, max_updates=None, max_time=3600.0)
        run = fleet.serve(on.inbox, experiment=endless, min_clients=1)
        waiting.join()
        codes = [joiner.exit_code() for joiner in fleet.joiners]
    words = [joiner.words().strip().splitlines()[-1] for joiner in fleet.joiners]
    assert codes == [0, 1, 1, 1, 1]
    assert words[1] == "client 2: refused: different config: 'model' differs from the server's config.yaml"
    assert words[2] == "client 2: refused: different protocol: the server has 1, client 2 has 9"
    assert "bad-certificate" in words[3]
    assert words[4] == "client is 7: this run has clients 1 to 3" or "clients 1 to 3" in words[4]
    refused = run.summary["connections_refused"]
    assert refused["incompatible"] == 2 and refused["bad-certificate"] >= 2
    assert run.summary["finished"] == "interrupted"
    assert run.summary["updates_lost"] == 0 and sorted(run.summary["participation"]) == ["1"]


def stop_serving():
    signal.raise_signal(signal.SIGINT)


def test_a_client_may_train_on_data_that_only_it_has(tmp_path):
    experiment, config = parsed(tmp_path, "--clients=2", "--max_updates=20")
    own = parse(
        "join",
        [
            "--config",
            QUICKSTART,
            "--clients=2",
            "--train.num_epochs=null",
            "--train.num_steps=1",
            "--data.test_share=0.5",
            "--progress=quiet",
        ],
    )
    mine = replace(own.experiment, devices=experiment.devices, waits=WAITS)
    with remote(experiment, config, tmp_path, [1, (2, {"own": mine, "config_yaml": own.config_yaml})]) as fleet:
        run = fleet.serve()
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    assert {row["client"]: row["own_data"] for row in run.events("joined")} == {1: False, 2: True}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"data": yaml.safe_load(own.config_yaml)["data"]}))
    with pytest.raises(ValueError, match="client 2 trained on its own data: give --client_data 2=FILE"):
        replay(run.folder)
    assert replay(run.folder, client_data={2: file})["equal"] is True


@pytest.mark.long(
    "tests/distributed/test_fit_local.py::test_a_run_lives_through_the_death_of_its_server_and_of_a_client"
)
def test_rank_0_is_killed_and_resumed_and_its_clients_come_back_by_themselves(tmp_path, free_port):
    experiment, config = parsed(tmp_path, "--clients=3", "--max_updates=80", "--checkpoint_every=5")
    resumed = replace(experiment, resume=str(tmp_path / "run"))
    with remote(experiment, config, tmp_path, [1, 2, 3], servers=[experiment, resumed], port=free_port) as fleet:
        killed_and_followed(fleet, tmp_path / "run", after_updates=40)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0]
    assert all("trying again" in joiner.words() for joiner in fleet.joiners)
    run = fleet.finished(tmp_path / "run")
    assert run.summary["finished"] == "max_updates"
    assert run.summary["updates_lost_by_reason"]["restart"] >= 1
    (row,) = run.events("resumed")
    assert row["version"] % 5 == 0 and row["version"] >= 5
    settled(run)
    assert replay(run.folder)["equal"] is True


def test_a_resumed_server_that_needs_one_client_starts_with_one_that_has_come_back(tmp_path):
    """It is stopped when one of two clients has reported: what waits is merged, and measured, once one is there again."""
    options = ("--clients=2", "--algorithm=fed_avg", "--eval_every=1", "--max_updates=3")
    experiment, config = parsed(tmp_path, *options, second_s=1.0)
    soon = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])  # once the update is taken in
    with remote(experiment, config, tmp_path, [1, 2]) as fleet:
        run = fleet.serve(On((arrived(1), soon.start)).inbox)
    assert run.summary["finished"] == "interrupted" and run.summary["updates_unused"] == 2
    resumed = replace(experiment, output=None, resume=str(run.folder))
    with remote(experiment, config, tmp_path, [1, 2]) as fleet:
        run = fleet.serve(experiment=resumed, min_clients=1)
    kinds = [row["event"] for row in run.events()]
    assert kinds[kinds.index("resumed") + 1 :][:4] == ["lost", "lost", "joined", "assigned"]
    assert [int(row["version"]) for row in run.rows("metrics.csv")] == list(range(run.summary["versions"] + 1))
    assert run.summary["updates_merged"] >= 3
    settled(run)
    assert replay(run.folder)["equal"] is True


def test_a_client_that_sends_beside_its_next_task_is_confirmed_where_no_broken_link_is_waited_for(tmp_path):
    """With ``waits.resume_s`` 0 the server resumes nothing; its clients could, and go on once an update is confirmed."""
    options = ("--clients=2", "--algorithm=fed_async", "--overlap=true", "--emulate=false", "--max_updates=12")
    experiment, config = parsed(tmp_path, *options, waits=replace(WAITS, resume_s=0.0, task_s=5.0))
    with remote(experiment, config, tmp_path, [1, 2]) as fleet:
        run = fleet.serve()
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    assert run.summary["finished"] == "max_updates" and run.summary["updates_lost"] == 0
    assert replay(run.folder)["equal"] is True


@pytest.mark.long("tests/sites/test_receipts.py::test_each_run_of_a_server_that_begins_anew_has_a_folder")
@pytest.mark.parametrize("resumes", [True, False])
def test_receipts_contradict_no_server_that_was_killed(tmp_path, monkeypatch, free_port, resumes):
    """One without a checkpoint begins its run anew, at the same address, where its clients wait for it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    every = 5 if resumes else 1000
    options = ("--clients=2", "--max_updates=40", f"--checkpoint_every={every}", "--checkpoint_s=null")
    experiment, config = parsed(tmp_path, *options)
    last = tmp_path / ("run" if resumes else "anew")
    changed = {"resume": str(last)} if resumes else {"output": str(last)}
    clients = [(number, {"keep_inputs": 1.0}) for number in (1, 2)]
    servers = [experiment, replace(experiment, **changed)]
    with remote(experiment, config, tmp_path, clients, servers=servers, port=free_port) as fleet:
        killed_and_followed(fleet, tmp_path / "run", after_updates=13)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    for number in (1, 2):
        folders = sorted((tmp_path / "state" / "raafl" / "receipts").glob(f"client-{number}-*"))
        assert len(folders) == (1 if resumes else 2)
        site = SiteReceipts.read(folders[-1])
        books = check_books(last, keys=server_keys(site.receipts), heads=True)
        assert site.receipts and (compare(site, last, books)[0], books.findings) == ([], [])


def test_a_server_is_upgraded_and_its_clients_come_back_by_themselves(tmp_path, free_port):
    """SIGTERM, then `--resume` by another version of the package: the protocol's version decides who is admitted."""
    experiment, config = parsed(tmp_path, "--clients=2", "--max_updates=60", second_s=0.02)
    later = (replace(experiment, resume=str(tmp_path / "run"), max_updates=90), "0.2.0")
    endless = replace(experiment, max_updates=100_000)
    with remote(experiment, config, tmp_path, [1, 2], servers=[endless, later], port=free_port) as fleet:
        first, second = fleet.servers
        first.begin()
        journal = tmp_path / "run" / "events.jsonl"
        wait_for(lambda: journal.exists() and journal.read_text().count('"arrived"') >= 20)
        first.send(signal.SIGTERM)
        assert first.exit_code() == 0
        assert fleet.finished(tmp_path / "run").summary["finished"] == "interrupted"
        second.begin()
        assert second.exit_code(60) == 0, second.words()
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    assert all("was interrupted; waiting 60 s for one that resumes" in joiner.words() for joiner in fleet.joiners)
    run = fleet.finished(tmp_path / "run")
    assert run.summary["finished"] == "max_updates" and set(run.summary["participation"]) == {"1", "2"}
    settled(run)
    assert replay(run.folder)["equal"] is True


def killed_and_followed(fleet, folder, after_updates):
    """Kill the first server once so many updates have arrived, and let the second go on to the run's end."""
    first, second = fleet.servers
    first.begin()
    journal = folder / "events.jsonl"
    wait_for(lambda: journal.exists() and journal.read_text().count('"arrived"') >= after_updates)
    first.send(signal.SIGKILL)
    assert first.exit_code() == -signal.SIGKILL
    second.begin()
    assert second.exit_code(60) == 0, second.words()


def wait_for(condition, timeout_s=80.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
