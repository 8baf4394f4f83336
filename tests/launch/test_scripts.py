"""The scripts of launch/, with stand-ins for what a cluster has: they run, and what they start ends as it should."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import forkserver
from tests.helpers.tools import tool
from tests.launch.processes import ROOT, WAIT_S, started, until

SCRIPTS = sorted(path for path in (ROOT / "launch").rglob("*") if path.suffix in (".sh", ".sbatch"))
pytestmark = pytest.mark.timeout(480)
SHORT = ["--max_updates", "4", "--train.num_epochs=null", "--train.num_steps", "2", "--progress", "quiet"]

SCONTROL = '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\n127.0.0.2\\n"\n'
SRUN = """#!/bin/bash
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & pids+=("$!"); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""
SSH = """#!/bin/bash
# What sshd does: a clean environment, another folder, and the last argument as a command line for a shell.
printf '%s\\n' "$@" >>"$STAND_IN/ssh-argv"
if rm "$STAND_IN/broken" 2>/dev/null; then exit 255; fi  # one connection, whichever is the first
there="$STAND_IN/${*: -2:1}"
mkdir -p "$there" && cd "$there" || exit 255
exec env -i HOME="$there" PATH="$PATH" PYTHONPATH="$PYTHONPATH" OMP_NUM_THREADS=1 bash -c "${*: -1}"
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder to start from, and the environment with stand-ins first on PATH."""
    here, tools = tmp_path / "here", tmp_path / "tools"
    for folder in (here, tools):
        folder.mkdir()
    for name in ("launch", "configs"):
        (here / name).symlink_to(ROOT / name)
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "ssh": SSH}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "STAND_IN": str(tmp_path),
    }
    return here, environment


@pytest.fixture
def warm_cluster(cluster, tmp_path):
    """The same, with a `raafl` and a `torchrun` that need not start from nothing."""
    with forkserver.stand_ins(tmp_path / "tools"):
        yield cluster


def run(cluster, *command, **more):
    """Run a script to its end."""
    here, environment = cluster
    with started(*command, cwd=here, **{**environment, **more}) as process:
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err


def merged_of(folder):
    return json.loads((folder / "summary.json").read_text())["participation"]


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_shellcheck_finds_nothing(script):
    if (program := tool("shellcheck")) is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run([program, str(script)], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_without_arguments_a_script_says_what_it_takes(script):
    found = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode != 0
    assert "usage: " in found.stderr


def test_one_node_runs_as_many_ranks_as_asked_for(cluster, tmp_path):
    """With a stand-in for torchrun; what that does with such a line is in tests/distributed/test_torchrun.py."""
    (tmp_path / "tools" / "torchrun").write_text(TORCHRUN)
    (tmp_path / "tools" / "torchrun").chmod(0o755)
    code, _, err = run(cluster, "launch/one-node.sh", "configs/quickstart.yaml", "--clients", "1", RANKS="2")
    assert code == 3, err  # torchrun's
    raafl = "-m raafl fit --config configs/quickstart.yaml --clients 1"
    assert (tmp_path / "calls").read_text() == f"|--standalone --nproc-per-node 2 {raafl}\n"


def slurm(cluster, number):
    here, _ = cluster
    return {
        "SLURM_SUBMIT_DIR": str(here),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(number),
        "RANKS_PER_NODE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_a_slurm_job_runs_on_all_its_nodes(warm_cluster):
    """Both nodes are this machine: the ranks of each meet over the store that the first one holds."""
    first = 20100 + os.getpid() % 12000  # two runs of the tests beside each other look from different places
    port = next(port for port in range(first, 40000) if _is_free(port))
    script = ("bash", "launch/slurm.sbatch", "configs/quickstart.yaml", "--clients", "1", *SHORT)
    code, _, err = run(warm_cluster, *script, **slurm(warm_cluster, port - 20000))
    assert code == 0, err
    assert merged_of(warm_cluster[0] / f"runs/slurm-{port - 20000}") == {"1": 4}


def test_a_slurm_job_that_is_requeued_says_what_it_said_first(cluster, tmp_path):
    """It goes on where it can, see tests/commands/test_stored_runs.py."""
    (tmp_path / "tools" / "srun").write_text(
        '#!/bin/sh\necho "$HEAD $PORT $NODES $RANKS_PER_NODE"; shift 3; echo "$@"\n'
    )
    _, out, _ = run(cluster, "bash", "launch/slurm.sbatch", "c.yaml", "--seed", "1", **slurm(cluster, 20007))
    options = "raafl c.yaml --output runs/slurm-20007 --resume auto --seed 1"
    assert out.splitlines() == ["127.0.0.1 20007 2 1", options]


def array(cluster, **more):
    here, _ = cluster
    return {"SLURM_SUBMIT_DIR": str(here), "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3", **more}


JOIN = """#!/bin/bash
echo "$*" >>"$STAND_IN/calls"
trap 'exit "$CODE"' TERM
[ -z "$HANGS" ] || while :; do sleep 0.05; done
exit "$CODE"
"""


@pytest.fixture
def array_cluster(cluster, tmp_path):
    """With stand-ins for a client, which ends with CODE, and for scontrol, which notes what it is asked."""
    for name, text in {"raafl": JOIN, "scontrol": '#!/bin/sh\necho "$*" >>"$STAND_IN/calls"\n'}.items():
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o755)
    return cluster


CALL = "join --address server:29500 --client 3 --certs certs --seed 1"


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_client_of_an_array_that_ends_by_itself_is_not_queued_again(array_cluster, tmp_path, code):
    script = ("bash", "launch/slurm-array.sbatch", "server:29500", "--seed", "1")
    found, _, err = run(array_cluster, *script, **array(array_cluster, CODE=str(code)))
    assert found == code, err
    assert (tmp_path / "calls").read_text().splitlines() == [CALL]


@pytest.mark.parametrize(
    ("number", "code", "queued"),
    [(signal.SIGUSR1, "130", True), (signal.SIGUSR1, "0", False), (signal.SIGTERM, "130", False)],
)
def test_a_client_of_an_array_whose_time_is_up_leaves_and_is_queued_again(
    array_cluster, tmp_path, number, code, queued
):
    """SIGUSR1 comes before the time limit; SIGTERM by scancel, or by a preemption, after which SLURM itself queues it again."""
    here, environment = array_cluster
    script, calls = ("bash", "launch/slurm-array.sbatch", "server:29500", "--seed", "1"), tmp_path / "calls"
    more = array(array_cluster, CODE=code, HANGS="1")
    with started(*script, cwd=here, **{**environment, **more}) as process:
        until(lambda: calls.exists() and calls.read_text(), process)
        time.sleep(0.2)  # the trap of the stand-in
        os.kill(process.pid, number)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == int(code)
    assert calls.read_text().splitlines() == [CALL, *(["requeue 77_3"] if queued else [])]


def _is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_ssh_starts_clients_with_keys_of_their_own_and_again_when_they_fail(warm_cluster, tmp_path, free_port):
    here, _ = warm_cluster
    (here / "hosts").write_text("# the lab\nme@one ~/\n\ntwo  ~/some where\n")
    (tmp_path / "two" / "some where").mkdir(parents=True)
    (tmp_path / "broken").touch()  # the first connection fails
    options = ("configs/quickstart.yaml", "hosts", "--output", str(tmp_path / "run"), *SHORT)
    code, _, err = run(
        warm_cluster,
        "launch/ssh.sh",
        *options,
        ADDRESS=f"127.0.0.1:{free_port}",
        PAUSE_S="0.1",
        SSH_OPTIONS="-p 22",
    )
    logs = "".join(file.read_text() for file in sorted((here / "ssh-logs").iterdir()))
    assert code == 0, err + logs
    assert sum(merged_of(tmp_path / "run").values()) == 4
    assert logs.count("has ended with exit code 255") == 1
    assert logs.count("the run has ended: ") == 2
    said = (tmp_path / "ssh-argv").read_text()
    assert "me@one" in said
    assert "PRIVATE KEY" not in said + logs


@pytest.mark.long
def test_ctrl_c_ends_a_run_over_ssh_with_its_summary_and_the_clients_with_it(cluster, tmp_path, free_port):
    """In a terminal the signal goes to the script and to all that is in its process group. All start from nothing."""
    here, environment = cluster
    (here / "hosts").write_text("one\n")
    options = (
        "configs/quickstart.yaml",
        "hosts",
        "--output",
        str(tmp_path / "run"),
        *SHORT,
        "--max_updates",
        "1000000",
    )
    journal = tmp_path / "run" / "events.jsonl"
    with started("launch/ssh.sh", *options, cwd=here, **environment, ADDRESS=f"127.0.0.1:{free_port}") as process:
        until(lambda: journal.exists() and '"arrived"' in journal.read_text(), process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"] == "interrupted"
    assert "the run has ended: interrupted" in (here / "ssh-logs" / "client-1.log").read_text()


NVIDIA_SMI = "#!/bin/sh\nprintf '40960\\n81920\\n'\n"
MPS = '#!/bin/sh\n[ "$1" = -d ] || read -r word\necho "mps $CUDA_MPS_PIPE_DIRECTORY ${1:-$word}" >>"$STAND_IN/calls"\n'
TORCHRUN = '#!/bin/sh\necho "$CUDA_MPS_PINNED_DEVICE_MEM_LIMIT|$*" >>"$STAND_IN/calls"; exit 3\n'


@pytest.mark.parametrize("with_mps", [True, False])
def test_clients_that_share_a_gpu_have_its_memory_in_equal_parts(cluster, tmp_path, with_mps):
    tools = {"nvidia-smi": NVIDIA_SMI, "torchrun": TORCHRUN} | ({"nvidia-cuda-mps-control": MPS} if with_mps else {})
    for name, text in tools.items():
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o755)
    command = ("launch/gpu-sharing.sh", "configs/quickstart.yaml", "--seed", "1")
    code, _, err = run(cluster, *command, RANKS_PER_GPU="4", MPS="1" if with_mps else "0", TMPDIR=str(tmp_path))
    assert code == 3, err  # torchrun's
    share = 40960 * 2**20 * 9 // 10 // 4  # of the smaller GPU
    raafl = "-m raafl fit --config configs/quickstart.yaml --clients 8 --fabric.accelerator cuda"
    ranks = f"--standalone --nproc-per-node 9 {raafl} --memory {share} --seed 1"
    calls = (tmp_path / "calls").read_text().splitlines()
    if not with_mps:
        assert calls == [f"|{ranks}"]
        assert "without MPS" in err
        return
    assert calls[1] == f"0={share // 2**20}M,1={share // 2**20}M|{ranks}"
    (_, pipe, first), (_, same, last) = calls[0].split(), calls[2].split()
    assert (first, last, pipe) == ("-d", "quit", same)
    assert not Path(pipe).exists()
