"""Three levels of real processes: a server, a subfederation with a client beside another subfederation, and its clients."""

from __future__ import annotations

import json
import signal
import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import yaml

from raafl.algorithms import fed_avg
from raafl.commands.subfederation import Bridge
from raafl.config.remote_options import options_below, split
from raafl.core.options import Subfederation
from raafl.core.types import Assignment, Timer, Update
from raafl.local.context import ALONE, Stopped, TaskContext
from raafl.runtime.client.worker import TaskRefused
from raafl.runtime.replay import replay
from raafl.sites.gate import SiteGate
from raafl.sites.policy import SitePolicy
from raafl.submodel import FULL
from tests.helpers.certificates import CertifiedSites
from tests.helpers.forked_command import command, wait_for
from tests.helpers.levels import Level
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment

ENVIRONMENT = {"RAAFL_LOCAL_TOKEN": "5" * 64}


SLOW = {"name": "slow", "flops_per_s": 7e6}
"""A device on which a task takes 0.3 s, so that the run above goes on while a subfederation starts again."""


def config(path, **fields):
    made = {
        "model": {"class_path": "model_zoo.MLP", "init_args": {"in_features": 64, "hidden": [24], "lr": 0.05}},
        "data": {"class_path": "raafl.data.Digits", "init_args": {"batch_size": 64}},
        "algorithm": {"class_path": "raafl.fed_avg"},
        "clients": 4,
        "train": {"num_epochs": None, "num_steps": 3},
        "checkpoint_every": 1,
        "progress": "verbose",
        "waits": {"alone_s": 30},
        **fields,
    }
    path.write_text(yaml.safe_dump(made))
    return str(path)


def address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def sites_of(folder, **clients):
    """Return the options of the server of a federation with certificates of its own, and those of each of its sites.

    A site's options name a policy, too, which allows what `config` asks for.
    """
    made, found = CertifiedSites(folder, folder.name), {}
    (folder / "sites.yaml").write_text("".join(f"{name}: {{clients: [{n}]}}\n" for name, n in clients.items()))
    for name in clients:
        files, policy = made.site(name), folder / f"{name} policy.yaml"
        policy.write_text("models: [MLP]\ndata: [Digits]\nalgorithms: [fed_avg]\nmin_samples: 20\n")
        found[name] = (*certificates(files), "--policy", str(policy))
    return ("--certs", str(folder)), found


def certificates(files):
    return ("--tls_ca", str(files.ca), "--tls_cert", str(files.cert), "--tls_key", str(files.key))


def rows(folder, kind):
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in found if row["event"] == kind]


def above(task, **fields):
    return Assignment(
        task, 1, 0, 0, 7, FULL, 0, **{"num_epochs": None, "num_steps": None, **fields}, seed=1, assigned_s=0.0
    )


def bridge_to(level):
    """Return what joins a level to a server above."""
    bridge = Bridge(Namespace(client=1), level.parts.experiment)
    folder = SimpleNamespace(head="b0b")
    bridge.begin(SimpleNamespace(parts=level.parts, record=SimpleNamespace(folder=folder)))
    level.hooks = bridge
    return bridge


@pytest.fixture
def level(tmp_path):
    made = experiment(tmp_path, fed_avg(), max_updates=None, subfederation=Subfederation(merges=1))
    return Level(made, dict.fromkeys((1, 2, 3, 4)))


def test_a_task_of_the_server_above_is_answered_by_the_merge_that_ends_it(level):
    bridge, values = bridge_to(level), level.values.clone()
    level.tell(Timer(10**9))  # the clients are here
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(bridge.train, above(3), values, "delta", ALONE)
        level.tell(bridge.inbox.get(10.0))
        update = level.run() and answer.result(10.0)
    change = level.values.clone()
    for dtype, buffer in change.buffers.items():
        buffer.sub_(values.buffers[dtype])
    layout = update.tensors.layout
    assert all(torch.equal(update.tensors[entry.name], change[entry.name]) for entry in layout.entries)
    sizes = [client.num_samples for client in level.parts.clients]
    assert update.num_samples == sum(sizes)
    assert update.extra == {"contributions": [[{}, 4.0, sum(sizes), 12]], "journal": "b0b"}


def test_a_policy_above_counts_the_samples_of_all_clients_below(level, tmp_path):
    """Four clients share 1,438 images; the first one has 360 of them."""
    bridge = bridge_to(level)
    level.tell(Timer(10**9))
    site = bridge.setup(experiment(tmp_path / "above", fed_avg()), "")
    assert site.data.num_samples == site.info.num_samples == 1438
    gate = SiteGate(SitePolicy(min_samples=1000))
    gate.check_parts(site.submodels, site.trainer, site.data, {"model": "m", "data": "d", "algorithm": "a"})
    with pytest.raises(TaskRefused, match=r"it trains on 960 samples, but policy\.min_samples is 1000"):
        gate.after(above(1), Update(1, 1, 0, level.values, 1438, num_steps=15), level.values)  # 15 batches of 64
    gate.after(above(1), Update(1, 1, 0, level.values, 1438, num_steps=16), level.values)


def test_a_task_that_nobody_wants_any_more_is_given_up(level):
    bridge, stop = bridge_to(level), Event()
    stop.set()
    with pytest.raises(Stopped):
        bridge.train(above(3), level.values, "delta", TaskContext(stop))
    bridge.close()
    with pytest.raises(TaskRefused, match="the run below has ended"):
        bridge.train(above(4), level.values, "delta", ALONE)
    with pytest.raises(TaskRefused, match="sets a client's steps"):
        bridge.train(above(5, num_steps=2), level.values, "delta", ALONE)


test_options_below_are_checked = refuses(
    lambda options: split("join", ["--address", "127.0.0.1:1", "--client", "1", *options]),
    ({"options": ["--below_min_clients", "2"]}, "--below_min_clients is about the clients of a subfederation"),
    ({"options": ["--subfederation", "f", "--below_min_clients", "x"]}, "below_min_clients is 'x'"),
    ({"options": ["--subfederation", "f", "--dry-run"]}, "leave --subfederation out"),
)


def test_a_task_has_one_merge_unless_the_config_or_an_option_says_more(tmp_path):
    file = tmp_path / "below.yaml"
    own, one = Namespace(subfederation=str(file)), "--subfederation.merges=1"
    assert options_below(own, ["--seed", "1"]) == [f"--config={file}", "--seed", "1"]  # the config's reader says more
    file.write_text("seed: 1\n")
    assert options_below(own, []) == [f"--config={file}", one]
    assert options_below(own, ["--subfederation.seconds=5"]) == [f"--config={file}", "--subfederation.seconds=5"]
    assert options_below(own, ["--resume", "run"]) == ["--resume", "run"]
    file.write_text("subfederation: {merges: 2}\n")
    assert options_below(own, []) == [f"--config={file}"]


@pytest.mark.long("test_a_task_of_the_server_above_is_answered_by_the_merge_that_ends_it")
def test_three_levels_of_processes_with_one_subfederation_killed(tmp_path):
    top, middle, bottom = address(), address(), address()
    guard = {"max_below": 8, "max_weight": None}
    highest = config(tmp_path / "top.yaml", guard=guard, max_updates=60, devices=[SLOW])
    between = config(tmp_path / "middle.yaml", guard=guard)
    below = config(tmp_path / "bottom.yaml", subfederation={"merges": 1})
    folders = {name: tmp_path / name for name in ("top", "middle", "bottom")}

    def start(name, *argv):
        return stack.enter_context(command(tmp_path / f"{name} output", *argv, **ENVIRONMENT))

    def subfederation(name, server, file, own, *more):
        return start(
            name,
            *("join", "--address", server, "--client", "1", "--subfederation", file),
            *("--below_address", own, "--below_min_clients", "2", *more),
        )

    with ExitStack() as stack:
        server = start(
            "top",
            *("serve", "--config", highest, "--address", top, "--min_clients", "2"),
            "--output",
            str(folders["top"]),
        )
        first = subfederation("middle", top, between, middle, "--output", str(folders["middle"]))
        lowest = subfederation("bottom", middle, below, bottom, "--output", str(folders["bottom"]))
        for client, where in ((4, top), (3, middle), (1, bottom), (2, bottom)):
            start(f"client {client}", "join", "--address", where, "--client", str(client), "--receipts", "false")
        wait_for(
            lambda: (folders["middle"] / "events.jsonl").is_file() and len(rows(folders["middle"], "received")) > 3,
            "a fourth task",
        )
        first.send(signal.SIGKILL)
        first.process.join()
        again = subfederation("middle again", top, between, middle, "--resume", str(folders["middle"]))
        assert [process.end() for process in (server, again, lowest)] == [0, 0, 0]
    for name, folder in folders.items():
        assert replay(folder)["equal"] is True, name
    answered = [row for row in rows(folders["top"], "arrived") if row["client"] == 1 and "contributions" in row]
    assert len(answered) > 3 and all(row["contributions"][0][1] == 3 for row in answered)
    heads = {json.loads(line)["chain"] for line in (folders["middle"] / "events.jsonl").read_text().splitlines()}
    assert {row["journal"] for row in answered} <= heads
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders.values()]
    assert [summary["finished"] for summary in summaries] == ["max_updates"] * 3


@pytest.mark.long("test_a_task_of_the_server_above_is_answered_by_the_merge_that_ends_it")
@pytest.mark.parametrize(
    "more", [{"secure_aggregation": {"min_cover": 2}}, {"privacy": {"clip_norm": 1.0, "noise_multiplier": 0.1}}]
)
def test_a_level_has_secure_aggregation_or_privacy_of_its_own(tmp_path, more):
    top, own = address(), address()
    above = config(tmp_path / "top.yaml", guard={"max_below": 8, "max_weight": None}, max_updates=3)
    below = config(tmp_path / "below.yaml", **more)
    folders = tmp_path / "top", tmp_path / "below"
    options = ("--below_address", own, "--below_min_clients", "3", "--output", str(folders[1]))
    with ExitStack() as stack:

        def start(name, *argv):
            return stack.enter_context(command(tmp_path / f"{name} output", *argv, **ENVIRONMENT))

        started = [
            start(
                "top", "serve", "--config", above, "--address", top, "--min_clients", "1", "--output", str(folders[0])
            ),
            start("below", "join", "--address", top, "--client", "1", "--subfederation", below, *options),
        ]
        for client in "123":
            start(f"client {client}", "join", "--address", own, "--client", client, "--receipts", "false")
        assert [process.end() for process in started] == [0, 0]
    assert [replay(folder)["equal"] for folder in folders] == [True, True]
    assert [row["contributions"][0][1] for row in rows(folders[0], "arrived")] == [3.0, 3.0, 3.0]


@pytest.mark.long("test_a_task_of_the_server_above_is_answered_by_the_merge_that_ends_it")
def test_each_level_has_certificates_and_policies_of_its_own(tmp_path):
    """One region of two clients, killed and resumed, beside a client of the server above, all over TLS."""
    top, own = address(), address()
    serve_above, above = sites_of(tmp_path / "above", region=1, north=2)
    serve_below, below = sites_of(tmp_path / "below", east=1, west=2)
    guard = {"max_below": 8, "max_weight": None}
    highest = config(tmp_path / "top.yaml", guard=guard, clients=2, max_updates=40, devices=[SLOW])
    lower = config(tmp_path / "region.yaml", clients=2)
    folders = tmp_path / "top", tmp_path / "region"

    with ExitStack() as stack:

        def start(name, *argv):
            return stack.enter_context(command(tmp_path / f"{name} output", *argv, XDG_STATE_HOME=str(tmp_path)))

        def region(name, *more):
            return start(
                name,
                *("join", "--address", top, "--client", "1", *above["region"], "--subfederation", lower, *more),
                *("--below_address", own, "--below_certs", serve_below[1], "--below_min_clients", "2"),
            )

        def join(name, client, where, options):
            return start(name, "join", "--address", where, "--client", str(client), *options, "--receipts", "false")

        output = ("--output", str(folders[0]))
        server = start(
            "top", "serve", "--config", highest, "--address", top, "--min_clients", "2", *serve_above, *output
        )
        first = region("region", "--output", str(folders[1]))
        join("north", 2, top, above["north"])
        strangers = [
            join("north below", 1, own, above["north"]),  # certified by the authority of the other level
            join("west as east", 1, own, below["west"]),  # a site that may be another client
        ]
        assert [one.end() for one in strangers] == [1, 1], [one.err for one in strangers]
        for name, client in (("east", 1), ("west", 2)):
            join(name, client, own, below[name])
        wait_for(
            lambda: (folders[1] / "events.jsonl").is_file() and len(rows(folders[1], "received")) > 3, "a fourth task"
        )
        first.send(signal.SIGKILL)
        first.process.join()
        again = region("region again", "--resume", str(folders[1]))
        assert [process.end() for process in (server, again)] == [0, 0]
    assert [replay(folder)["equal"] for folder in folders] == [True, True]
    answered = [row for row in rows(folders[0], "arrived") if "contributions" in row]
    assert len(answered) > 3 and all(row["contributions"][0][1] == 2 for row in answered)
    heads = {json.loads(line)["chain"] for line in (folders[1] / "events.jsonl").read_text().splitlines()}
    assert {row["journal"] for row in answered} <= heads
