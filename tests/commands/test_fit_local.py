"""What `raafl fit --local N` starts: command lines, environments, and where the clients' output is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raafl.commands.fit_local import ServerCommand, child_environment, client_command, clients_joined, read
from raafl.config.argv import values, without
from raafl.errors import BadInput

ROOT = Path(__file__).parents[2]
RAAFL = [sys.executable, "-m", "raafl"]


class Listener:
    def fileno(self):
        return 7


@pytest.fixture
def server(tmp_path):
    """The server's command line, with what the user gave beside it."""

    def make(*options):
        return ServerCommand(options, Listener(), tmp_path / "note")

    return make


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--local"], "--local is '': give a whole number from 1"),
        (["--local", "--config", "c.yaml"], "--local is '--config': give a whole number from 1"),
        (["--local", "0"], "--local is '0': give a whole number from 1"),
        (["--local=2.5"], "--local is '2.5': give a whole number from 1"),
        (["--local", "3", "--clients", "4"], "--clients is 4, but --local 3 starts 3: leave out --clients"),
        (["--local", "3", "--max_restarts", "-1"], "--max_restarts is '-1': give a whole number from 0"),
        (
            ["--local", "3", "--tls_key", "s"],
            "--tls_key cannot be set with fit --local, which chooses it: leave it out, or use ",
        ),
        (
            ["--local", "3", "--address=:80"],
            "--address cannot be set with fit --local, which chooses it: leave it out, or use ",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(argv, complaint):
    with pytest.raises(BadInput) as wrong:
        read(argv)
    assert str(wrong.value).startswith(complaint)


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="leave out --local or torchrun"):
        read(["--local", "3"])


def test_the_number_of_clients_is_an_option_for_all_ranks():
    asked = read(["--config", "c.yaml", "--local=3", "--max_restarts", "7", "--clients", "3", "--seed=1"])
    assert (asked.clients, asked.policy.max_restarts) == (3, 7)
    assert asked.options == ("--config", "c.yaml", "--seed=1", "--clients", "3")


def test_options_in_both_spellings():
    argv = ["--a", "1", "--b=2", "--a=3", "--flag", "--c", "4"]
    assert (values(argv, "--a"), values(argv, "--b"), values(argv, "--d")) == (["1", "3"], ["2"], [])
    assert without(argv, "--a", "--c") == ["--b=2", "--flag"]


def test_a_client_gets_what_decides_its_tasks_and_nothing_of_the_servers():
    options = (
        "--config",
        "c.yaml",
        "--json",
        "--output",
        "runs/x",
        "--progress=quiet",
        "--seed",
        "1",
        "--clients",
        "3",
    )
    where = ["--address", "127.0.0.1:9", "--client", "2", "--receipts", "false"]
    mine = ["--config", "c.yaml", "--seed", "1", "--clients", "3", *where]
    assert client_command(options, 9, 2) == [*RAAFL, "join", *mine]


def test_clients_of_a_resumed_run_take_its_config():
    command = client_command(("--resume", "runs/x", "--clients", "3"), 9, 2)
    assert command[command.index("--resume") + 1] == "runs/x" and "--config" not in command


def test_the_first_server_gets_all_options(server):
    assert server("--config", "c.yaml", "--json").command() == [
        *RAAFL,
        "serve",
        "--config",
        "c.yaml",
        "--json",
        "--address",
        "fd:7",
    ]


def test_a_later_server_goes_on_from_the_last_checkpoint(server, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "version-000003.ckpt").touch()
    (tmp_path / "note").write_text(str(folder))
    options = ("--config", "c.yaml", "--output", str(folder), "--resume=old", "--json", "--seed", "1")
    resumed, rest = ["--resume", str(folder)], ["--min_clients", "1", "--address", "fd:7"]
    expected = [*RAAFL, "serve", "--json", "--seed", "1", *resumed, "--trust_config", *rest]
    assert server(*options).command() == expected
    theirs = server("--resume=old")  # a folder of somebody else's, perhaps
    assert theirs.command() == [*RAAFL, "serve", *resumed, *rest]


def test_a_later_server_begins_anew_where_there_is_no_checkpoint(server, tmp_path):
    """The folder of the attempt that came to nothing is put aside, so that the user's --output holds the run that ends."""
    made, folder = server("--output", str(tmp_path / "run")), tmp_path / "run"
    for attempt in (1, 2):
        folder.mkdir()
        (folder / "attempt").write_text(str(attempt))
        (tmp_path / "note").write_text(f"{folder}\n")
        assert made.command() == [*RAAFL, "serve", "--output", str(folder), "--address", "fd:7"]
        assert not folder.exists()
        assert (tmp_path / f"run-attempt-{attempt}" / "attempt").read_text() == str(attempt)
        assert made.folder() is None


def test_ranks_compute_with_one_thread_unless_told_and_know_nothing_of_torchrun():
    before = {"PATH": "/bin", "RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert child_environment(before, "k") == {"PATH": "/bin", "OMP_NUM_THREADS": "1", "RAAFL_LOCAL_TOKEN": "k"}
    assert child_environment({"OMP_NUM_THREADS": "4"}, "k")["OMP_NUM_THREADS"] == "4"


def test_data_named_on_the_command_line_are_shared_out_among_the_clients():
    command = client_command(("--data.batch_size", "8"), 9, 2)
    assert command[command.index("--share_of_data") + 1] == "true"
    assert "--share_of_data" not in client_command(("--seed", "8"), 9, 2)


def test_the_supervisor_imports_no_torch():
    code = "import raafl.commands.fit_local, raafl.commands.cli, sys, json; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) is False


def test_who_has_joined_is_read_from_the_journal(tmp_path):
    assert clients_joined(None) == clients_joined(tmp_path) == set()
    rows = [{"event": "run", "title": "joined"}, {"event": "joined", "client": 3}, {"event": "arrived", "client": 1}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "events.jsonl").write_text(text + '{"event": "joined", "cli')  # a line that is being written
    assert clients_joined(tmp_path) == {3}
