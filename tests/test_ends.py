"""How runs end before their time: Ctrl-C once and twice, SIGTERM, a kill, a disk without room."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from model_zoo import MLP
from raafl.commands.cli import main
from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.events import JournalReader
from raafl.runtime.lifecycle import signals
from raafl.runtime.replay import replay
from tests.helpers import forkserver
from tests.helpers.forked_command import command, wait_for

CONFIG = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
pytestmark = pytest.mark.timeout(240)
STOPPED = "raafl: stopped at once, without a summary; --resume RUN goes on from the last checkpoint"
ENDLESS = ("--config", CONFIG, "--max_updates", "1000000", "--progress", "quiet")


NUM_VALIDATED = [0]


class SlowToValidate(MLP):
    """Hangs in every validation but the first two, which come before the run and at one of its first versions."""

    def validation_step(self, batch, batch_idx):
        if hang := os.environ.get("HANG"):
            NUM_VALIDATED[0] += batch_idx == 0
            if NUM_VALIDATED[0] > 2:
                Path(hang).touch()
                time.sleep(1000)
        return super().validation_step(batch, batch_idx)


class SlowToTrain(MLP):
    """Hangs in every training step but the trial before the run, where a file says so."""

    def training_step(self, batch, batch_idx):
        if (hang := os.environ.get("HANG")) and Path(hang).exists():
            Path(f"{hang}-{os.getpid()}").touch()
            time.sleep(1000)
        return super().training_step(batch, batch_idx)


def hang_while_saving():
    """Let checkpoints after the second version hang with half a file written."""
    save = checkpoint.torch.save

    def slow(content, file):
        if content["raafl"]["version"] > 2:
            file.write(b"half")
            file.flush()
            Path(os.environ["HANG"]).touch()
            time.sleep(1000)
        save(content, file)

    checkpoint.torch.save = slow


def resumable(folder):
    """Go on with a run for a few updates, and check that it ends and replays."""
    version = checkpoint_reader.load(folder).version
    assert (
        main(
            [
                "simulate",
                "--resume",
                str(folder),
                "--trust_config",
                "--max_updates",
                str(version + 8),
                "--progress",
                "quiet",
            ]
        )
        == 0
    )
    assert replay(folder, trust_config=True)["equal"] is True


def events(folder):
    journal = folder / "events.jsonl"
    return [row["event"] for row in JournalReader(folder).written()] if journal.exists() else []


# ---- once ----


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize(("workers", "number"), [("1", signal.SIGINT), ("3", signal.SIGTERM)])
def test_once_ends_with_checkpoint_and_summary_and_can_be_resumed(tmp_path, number, workers):
    run = tmp_path / "run"
    with command(tmp_path / "c", "simulate", *ENDLESS, "--workers", workers, "--json", "--output", str(run)) as started:
        wait_for(lambda: events(run).count("arrived") > 5, "work")
        children = started.children()
        started.send_all(number)  # the workers have it too
        assert started.end() == 130, started.err
    summary = json.loads(started.out)
    assert summary["finished"] == "interrupted" and summary == json.loads((run / "summary.json").read_text())
    assert summary["warnings"] == [] and started.err == ""
    assert len(children) == int(workers) - 1 and psutil.wait_procs(children, timeout=30)[1] == []
    assert checkpoint_reader.load(run).version == summary["versions"]
    if workers == "1":
        resumable(run)


# ---- twice ----


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("where", "second"), [("validating", signal.SIGTERM), ("saving", signal.SIGINT)])
def test_twice_stops_at_once(tmp_path, where, second):
    run, hang = tmp_path / "run", tmp_path / "hang"
    options = {
        "validating": ["--model", f"{__name__}.SlowToValidate", "--checkpoint_every=1"],
        "saving": ["--checkpoint_every=2"],
    }[where]
    before = hang_while_saving if where == "saving" else None
    arguments = ("simulate", *ENDLESS, *options, "--output", str(run))
    with command(tmp_path / "c", *arguments, before=before, HANG=str(hang)) as started:
        wait_for(hang.exists, "the hanging place")
        started.send(signal.SIGINT)
        assert started.process.is_alive()  # it is asked, and cannot heed it
        started.send(second)
        assert started.end() == 130
    assert started.err.splitlines() == [STOPPED] and started.out == ""
    assert not (run / "summary.json").exists()
    assert list(run.rglob(".*.tmp")) == []
    assert checkpoint_reader.load(run).raafl["finished"] is None
    if where == "saving":
        resumable(run)


@pytest.mark.long("test_twice_stops_at_once")
def test_twice_leaves_no_worker_behind(tmp_path):
    run, hang = tmp_path / "run", tmp_path / "hang"
    options = ("--model", f"{__name__}.SlowToTrain", "--workers", "3", "--checkpoint_every=2", "--output", str(run))
    with command(tmp_path / "c", "simulate", *ENDLESS, *options, HANG=str(hang)) as started:
        wait_for(lambda: checkpoint.newest(run), "a checkpoint")
        hang.touch()
        wait_for(lambda: list(tmp_path.glob("hang-*")), "a process that hangs")
        children = started.children()
        assert len(children) == 2
        started.send_all(signal.SIGINT)
        started.send_all(signal.SIGINT)
        assert started.end() == 130
        assert psutil.wait_procs(children, timeout=30)[1] == []
    assert started.err.splitlines() == [STOPPED]
    resumable(run)


@pytest.fixture
def ranks(tmp_path, free_port):
    """Start rank 0 and two clients by hand."""
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "LOCAL_WORLD_SIZE": "3"}
    common |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    options = ("fit", *ENDLESS, "--clients=2", "--emulate=false", "--algorithm=fed_async", "--waits.stop_s=1000")

    def rank(number, *more, **environment):
        return command(tmp_path / f"c{number}", *options, *more, RANK=str(number), **common, **environment)

    return rank


def test_once_and_twice_in_rank_0_while_a_client_hangs(tmp_path, ranks):
    run = tmp_path / "run"
    with ranks(0, "--checkpoint_s=0.1", f"--output={run}") as server, ranks(1), ranks(2) as client:
        wait_for(lambda: events(run).count("arrived") > 5 and checkpoint.newest(run), "work and a checkpoint")
        client.send(signal.SIGSTOP)
        server.send(signal.SIGINT)
        wait_for(lambda: "stop" in events(run), "the end of the loop")
        assert server.process.is_alive()  # it waits for the client
        server.send(signal.SIGTERM)
        assert server.end() == 130
    assert server.err.splitlines() == [STOPPED]
    assert checkpoint_reader.load(run).raafl["finished"] is None


def test_an_evaluation_that_hangs_at_the_end_is_given_up(tmp_path, ranks):
    run, hang = tmp_path / "run", tmp_path / "hang"
    options = (f"--output={run}", "--model", f"{__name__}.SlowToValidate")
    ends = ("--max_updates=20", "--waits.eval_s=0.5", "--json")
    with ranks(0, *options, *ends, HANG=str(hang)) as server, ranks(1, *options[1:]), ranks(2, *options[1:]):
        assert server.end() == 0, server.err
    summary = json.loads(server.out)
    assert summary["finished"] == "max_updates" and summary["updates_merged"] == 20
    assert summary["warnings"] == ["the last evaluation did not end within waits.eval_s = 0.5 s"]
    assert server.err.splitlines() == [f"raafl: warning: {summary['warnings'][0]}"]


def short_echo():
    """Have ranks take what comes two seconds after the first signal for another."""
    signals._ECHO_S = 2.0
    forkserver.start()


@pytest.mark.long("test_once_and_twice_in_rank_0_while_a_client_hangs")
def test_under_torchrun_once_and_twice(tmp_path):
    """As from a terminal: every process has the signal, and torchrun passes it on once more."""
    run, hang, notes = tmp_path / "run", tmp_path / "hang", tmp_path / "started"
    notes.mkdir()
    argv = (
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "raafl",
        "fit",
        *ENDLESS,
        "--clients=2",
        "--model",
        f"{__name__}.SlowToValidate",
        f"--output={run}",
        "--checkpoint_s=0.1",
    )
    more = {"HANG": str(hang), forkserver.STARTED: str(notes)}
    with command(tmp_path / "c", *argv, before=short_echo, entry=forkserver.torchrun, **more) as torchrun:
        wait_for(lambda: hang.exists() and checkpoint.newest(run), "an evaluation that hangs")
        ranks = forkserver.started(notes)
        assert {one.rank for one in ranks} == {"0", "1", "2"}
        torchrun.send_all(signal.SIGINT)
        wait_for(lambda: "stop" in events(run), "the end of the loop")
        time.sleep(2.5)  # what comes sooner may be torchrun's echo of the first
        torchrun.send_all(signal.SIGINT)
        assert torchrun.end() != 0 and STOPPED in torchrun.err
        assert psutil.wait_procs([one.process for one in ranks], timeout=30)[1] == []
    assert not (run / "summary.json").exists() and checkpoint_reader.load(run).raafl["finished"] is None


# ---- killed without a word ----


@pytest.mark.long("test_once_ends_with_checkpoint_and_summary_and_can_be_resumed")
def test_a_run_that_is_killed_can_be_resumed_without_asking_for_checkpoints(tmp_path):
    run = tmp_path / "run"
    with command(tmp_path / "c", "simulate", *ENDLESS, "--checkpoint_s=0.2", "--output", str(run)) as started:
        wait_for(lambda: checkpoint.newest(run), "a checkpoint")
        started.send(signal.SIGKILL)
        assert started.end() == -signal.SIGKILL
    resumable(run)


# ---- no room ----


def small_files():
    """From now on no file may grow beyond 16 KiB, which is less than a checkpoint, and than the journal."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))


@pytest.mark.long("test_a_disk_that_is_full_for_a_while")
def test_a_run_whose_files_may_not_grow_computes_as_any_other_and_has_failed_to_save_its_model(tmp_path):
    arguments = ("simulate", "--config", CONFIG, "--max_updates=40", "--checkpoint_every=10", "--json")
    with command(tmp_path / "plain", *arguments, "--output", str(tmp_path / "free")) as started:
        assert started.end() == 0
    plain = json.loads(started.out)
    with command(tmp_path / "c", *arguments, "--output", str(tmp_path / "run"), before=small_files) as started:
        assert started.end() == 1, started.err
    assert started.err.endswith(f"raafl: the final model could not be saved in {tmp_path / 'run'}: it is lost\n")
    summary = json.loads(started.out)
    assert summary["model_digest"] == plain["model_digest"]
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["unwritten"]) == {"events.jsonl", "checkpoints"}
    num_rows = len(list(JournalReader(tmp_path / "run").written()))
    assert num_rows + summary["unwritten"]["events.jsonl"] == len(list(JournalReader(tmp_path / "free").written()))
    assert summary["unwritten"]["checkpoints"] == 4  # at versions 10, 20, 30 and at the end
    assert len(summary["warnings"]) == 3 and all("File too large" in line for line in summary["warnings"])
    assert [started.err.count(line) for line in summary["warnings"]] == [1, 1, 1]
    assert list((tmp_path / "run").rglob(".*.tmp")) == []
    with pytest.raises(BadInput, match=r"events\.jsonl: its last \d+ rows are missing"):
        replay(tmp_path / "run")
    with pytest.raises(BadInput, match="but there is none"):
        checkpoint_reader.load(tmp_path / "run")
    assert replay(tmp_path / "run", until=5)["parted_at"] is None


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(tmp_path / "disk")]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("to mount a small file system needs root")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


def test_a_disk_that_is_full_for_a_while(tmp_path, small_disk):
    """What could not be written meanwhile is written later; the run can be replayed, interrupted and resumed."""
    run, ballast = small_disk / "run", small_disk / "ballast"
    options = ("--checkpoint_every=1", "--keep_checkpoints=1", "--output", str(run), "--json")
    with command(tmp_path / "c", "simulate", *ENDLESS, *options) as started:
        wait_for(lambda: checkpoint.newest(run), "a checkpoint")
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        wait_for(lambda: started.err.count("No space left on device") >= 2, "warnings")
        good = checkpoint_reader.load(run).version
        ballast.unlink()
        wait_for(lambda: (checkpoint.newest(run) or Path()).stem > f"version-{good + 5:06d}", "later checkpoints")
        started.send(signal.SIGINT)
        assert started.end() == 130
    summary = json.loads(started.out)
    assert summary["unwritten"] == {} and all("No space left" in line for line in summary["warnings"])
    resumable(run)


def test_a_resumed_run_whose_journal_has_a_hole_is_replayed_by_nobody(tmp_path, capsys):
    """The checkpoint was written, rows before it were not, and then the run was killed."""
    run = tmp_path / "run"
    with command(tmp_path / "c", "simulate", *ENDLESS, "--checkpoint_every=10", "--output", str(run)) as started:
        wait_for(lambda: (checkpoint.newest(run) or Path()).stem >= "version-000020", "a checkpoint")
        started.send(signal.SIGKILL)
        started.end()
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[:30]))
    version = checkpoint_reader.load(run).version
    assert main(["simulate", "--resume", str(run), "--max_updates", str(version + 4), "--progress", "quiet"]) == 0
    assert "events from before the checkpoint are missing in" in capsys.readouterr().err
    assert events(run).count("gap") == 1
    with pytest.raises(BadInput, match=r"events\.jsonl: \d+ rows are missing after event \d+"):
        replay(run)
