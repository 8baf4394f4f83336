"""Run each command of the tour in docs/sites.md, in a folder that was empty: a refusal, a revocation, an audit."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest

from raafl.commands.cli import main
from tests.docs.blocks import ROOT, blocks
from tests.helpers.forked_command import command, wait_for

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow("a server and two clients, from the docs")
def test_from_an_empty_folder_to_an_audit(tmp_path, monkeypatch, free_port, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lines = [
        line.replace("29500", str(free_port))
        for block in blocks(ROOT / "docs" / "sites.md")
        if block.language == "bash"
        for line in block.text.splitlines()
    ]
    started, stack = [], ExitStack()

    def run(line):
        program, *words = shlex.split(line)
        if program in ("echo", "python"):
            subprocess.run(["bash", "-c", line], check=True, timeout=60)
        elif program == "cp":
            for file in words[:-1]:
                shutil.copy(file, words[-1])
        elif words[0] in ("serve", "join"):
            extra = ["--max_updates", "1000000"] if words[0] == "serve" else []
            started.append(stack.enter_context(command(tmp_path / "out" / str(len(started)), *words, *extra)))
        else:
            assert program == "raafl", line
            return main(words)
        return 0

    def outcomes(client):
        path = tmp_path / "runs" / "tour" / "clients.csv"
        rows = list(csv.DictReader(path.open())) if path.exists() else []
        return [row["outcome"] for row in rows if row["client"] == str(client)]

    revoking, auditing = lines.index("raafl certs revoke south"), lines.index("raafl audit runs/tour")
    with stack:
        for line in lines[:revoking]:
            assert run(line) == 0, line
            if "--policy" in line:
                refusing = started.pop()
                assert refusing.end() == 1
                assert "the site's policy refuses this run: its algorithm is raafl.fed_raa" in refusing.err
        server, north, south = started
        wait_for(lambda: "merged" in outcomes(1) and "merged" in outcomes(2), "updates of both")
        assert run(lines[revoking]) == 0
        since = time.monotonic()
        wait_for(lambda: "client 2 was lost: disconnected: revoked" in server.out, "the cut of the revoked site")
        assert time.monotonic() - since < 5.0  # one second, and what a busy machine adds
        before = outcomes(1).count("merged")
        assert south.end() == 1
        assert "revoked: " in south.err and "the certificate of site 'south' was revoked" in south.err
        wait_for(lambda: outcomes(1).count("merged") > before + 2, "updates of the other")
        for line in lines[revoking + 1 : auditing]:
            assert run(line) == 0, line
        server.send(signal.SIGINT)  # a person ends the run; after SIGTERM clients wait for a server that resumes it
        assert server.end() == 130 and north.end() == 0
        texts = [one.err for one in started]
    for line in lines[auditing:]:
        assert run(line) == int("--books_only" in line), line
    said = capsys.readouterr().out
    assert "books: signed" in said and re.search(r"FOUND: events.jsonl: row \d+ was altered", said)
    assert {one for one in outcomes(2) if one.startswith("lost")} <= {"lost:disconnected"}, texts
    assert not any(one.startswith("lost") for one in outcomes(1)), texts
