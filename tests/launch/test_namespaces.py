"""Two nodes on one machine: network namespaces joined by a slow link; across it torchrun, fit and simulate, and serve and join.

The link is made by tc: netem (rate and delay) where the kernel has it, else a token bucket (rate alone).
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from raafl.config.parse import load_experiment
from raafl.runtime.run import simulate
from tests.helpers import forkserver
from tests.helpers.certificates import CertifiedSites
from tests.helpers.forked_command import command

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
RATE_MBIT, DELAY_MS, BURST_BYTES = 2, 20, 16384
BYTES_PER_S = RATE_MBIT * 1e6 / 8
WAIT_S = 400
MODEL = ["--model.hidden", "[1000]"]  # 75010 parameters, 300 kB: 1.2 s each way
RUN = [
    *(
        "--config",
        str(ROOT / "configs" / "quickstart.yaml"),
        *MODEL,
        "--devices",
        "null",
        "--clients",
        "2",
        "--algorithm",
        "fed_avg",
    ),
    *("--train.num_epochs=null", "--train.num_steps", "2", "--max_updates", "4", "--progress", "quiet"),
]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Node:
    """A namespace, with one end of the link."""

    name: str
    interface: str
    address: str

    def start(self, *command, **more):
        """Start a program on this node."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": self.interface,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **more,
        }
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def enter(self):
        """Move this process here."""
        with open(f"/var/run/netns/{self.name}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) == 0, "CLONE_NEWNET"

    def close(self):
        """End what runs here, and remove it; its end of the link goes with it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in ip("netns", "pids", self.name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", self.name)


@dataclass(frozen=True)
class Link:
    """Two nodes, and the least time that bytes take from one to the other."""

    near: Node
    far: Node
    delay_s: float
    burst_bytes: int

    def least_s(self, num_bytes):
        """Seconds that so many bytes take at the least."""
        return max(num_bytes - self.burst_bytes, 0) / BYTES_PER_S + self.delay_s


def slow(node):
    """Slow an end of the link down; return its delay in seconds, and how many bytes pass it at once."""
    tc = ["netns", "exec", node.name, "tc", "qdisc", "add", "dev", node.interface, "root"]
    try:
        ip(*tc, "netem", "delay", f"{DELAY_MS}ms", "rate", f"{RATE_MBIT}mbit")
        return DELAY_MS / 1000, 0
    except subprocess.CalledProcessError:  # a kernel without sch_netem
        ip(*tc, "tbf", "rate", f"{RATE_MBIT}mbit", "burst", str(BURST_BYTES), "latency", "2s")
        return 0.0, BURST_BYTES


@pytest.fixture
def link():
    """Two namespaces, joined by a slow link; whatever runs in them at the end is killed."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("network namespaces need root, and the commands ip and tc")
    ends = [
        Node(f"raafl{os.getpid()}{side}", f"rl{os.getpid() % 10**6}{side}", f"10.213.77.{i}")
        for i, side in ((1, "a"), (2, "b"))
    ]
    near, far = ends
    try:
        try:
            for node in ends:
                ip("netns", "add", node.name)
            peer = ("type", "veth", "peer", "name", far.interface, "netns", far.name)
            ip("-n", near.name, "link", "add", near.interface, *peer)
            for node in ends:
                ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.interface)
                ip("-n", node.name, "link", "set", "lo", "up")
                ip("-n", node.name, "link", "set", node.interface, "up")
            slow(far)
            delay_s, burst_bytes = slow(near)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces or tc do not work here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield Link(near, far, delay_s, burst_bytes)
    finally:
        for node in ends:
            node.close()


def end(processes):
    """Wait for all of them; return what they said."""
    words = []
    for name, process in processes.items():
        try:
            said, _ = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + "\n... and then it hung"
        words.append(f"--- {name}, exit code {process.returncode}\n{said}")
    assert all(process.returncode == 0 for process in processes.values()), "\n".join(words)
    return words


def check(folder, link, far_client):
    """All took part, and what went over the link took the time that it takes."""
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["participation"]) == ("max_updates", {"1": 2, "2": 2})
    with (folder / "clients.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["merged_version"]]
    far = [row for row in rows if row["client"] == str(far_client)]
    assert len(far) == 2
    for row in far:
        down, up = int(row["bytes_down"]), int(row["bytes_up"])
        assert min(down, up) > 4 * 75010
        assert float(row["train_s"]) >= link.least_s(down) + link.least_s(up) > 2.0


@pytest.mark.long
def test_torchrun_meets_and_trains_across_two_nodes(link, tmp_path):
    """Ranks 0 and 1 are on the near node, whose address comes first; rank 2 is on the far one."""
    options = ("launch/multi-node.sh", *RUN[1:], "--output", str(tmp_path / "run"))
    common = {"HEAD": link.near.address, "NODES": "2"}
    processes = {
        name: node.start(*options, **common, RANKS_PER_NODE=ranks, LOCAL_ADDRESS=node.address)
        for name, node, ranks in (("near", link.near, "2"), ("far", link.far, "1"))
    }
    end(processes)
    check(tmp_path / "run", link, far_client=2)


@pytest.mark.long("test_clients_join_across_the_link")
def test_a_simulation_over_two_nodes_leaves_the_bits_of_one_process(link, tmp_path):
    options = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--max_updates=12", "--progress=quiet"]
    one, _ = simulate(load_experiment(*options[1:], f"--output={tmp_path / 'one'}"))

    def node(number, where):
        def before():
            where.enter()
            forkserver.start()

        argv = (
            *("--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", f"--master-addr={link.near.address}"),
            *("--master-port=29600", "-m", "raafl", "simulate", *options, f"--output={tmp_path / 'two'}"),
        )
        more = {"GLOO_SOCKET_IFNAME": where.interface}
        return command(tmp_path / where.name, *argv, before=before, entry=forkserver.torchrun, **more)

    with node(0, link.near) as near, node(1, link.far) as far:
        assert [near.end(), far.end()] == [0, 0], [near.err, far.err]
    two = json.loads((tmp_path / "two" / "summary.json").read_text())
    alike = ("model_digest", "finished", "participation", "final", "time_s", "bytes_up", "warnings")
    assert [two[name] for name in alike] == [one[name] for name in alike]


def test_clients_join_across_the_link(link, tmp_path):
    CertifiedSites(tmp_path / "certs", hosts=(link.near.address,)).site()
    address = ("--address", f"{link.near.address}:29500", "--certs", str(tmp_path / "certs"))
    serve = ("serve", *RUN, *address, "--progress", "plain", "--output", str(tmp_path / "run"))
    with (
        command(tmp_path / "server", *serve, before=link.near.enter) as server,
        command(tmp_path / "near", "join", *address, "--client", "1", before=link.near.enter) as near,
        command(tmp_path / "far", "join", *address, "--client", "2", before=link.far.enter) as far,
    ):
        everyone = (server, near, far)
        assert [one.end() for one in everyone] == [0, 0, 0], [one.err for one in everyone]
    assert all("the run has ended: " in one.out + one.err for one in (near, far))
    assert ", TLS 1.3" in server.out + server.err
    check(tmp_path / "run", link, far_client=2)
