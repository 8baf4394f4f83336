"""Supervise stand-in ranks in a process of its own: `python tests/helpers/stand_in_ranks.py FOLDER PLAN.json`.

The plan holds Python code for the server and for each client. Each runs with `note(text)`, which appends a line to its file in
FOLDER; `until(condition)`, which waits for one; `lines(name)`, what a rank has noted so far; `gone(line)`, whether the process of a
`pid N` line has ended and been reaped; `state(line)`, a letter for what that does now; and `signals(name)`, which notes each
signal by its name and does nothing else about it.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

PRELUDE = """
import os, pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def note(text):
    with (folder / name).open("a") as file:
        file.write(f"{text}\\n")
def lines(name):
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []
def until(condition):
    while not condition():
        time.sleep(0.01)
def gone(pid_line):
    return not pathlib.Path("/proc", pid_line.removeprefix("pid ")).exists()
def state(pid_line):
    return pathlib.Path("/proc", pid_line.removeprefix("pid "), "stat").read_text().rpartition(") ")[2][0]
def signals(*names):
    for number in (getattr(signal, n) for n in names):
        signal.signal(number, lambda n, frame: note(signal.Signals(n).name))
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def command(code: str, folder: Path, name: str) -> list[str]:
    """Return the command that starts a stand-in, which first records `pid N`, then runs ``code``."""
    return [sys.executable, "-S", "-c", f"{PRELUDE}\nnote(f'pid {{os.getpid()}}')\n{code}", str(folder), name]


def supervisor(folder: Path, plan: dict[str, Any], say: Any) -> Any:
    """Return the supervisor of a plan, which has the code of each process; ``say`` is called with each message."""
    from raafl.runtime.supervisor import Child, RestartPolicy, Supervisor

    def child(name: str, code: str, log: Path | None) -> Child:
        return Child(name, partial(command, code, folder, name.replace(" ", "-")), {"PATH": "/usr/bin:/bin"}, log)

    clients = {
        number: child(f"client {number}", code, folder / f"log-{number}")
        for number, code in enumerate(plan["clients"], start=1)
    }
    policy = RestartPolicy(
        **{"first_s": 0.02, "longest_s": 0.05, "leave_s": 30.0, "stop_s": 30.0, **plan.get("policy", {})}
    )
    begun = (folder / "begun").exists if plan.get("watch_begun") else lambda: True
    joined, needed = plan.get("joined", list(clients)), plan.get("needed", 0)
    server = child("the server", plan["server"], None)
    return Supervisor(server, clients, policy, say, begun=begun, joined=lambda: joined, needed=needed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    plan = json.loads(Path(sys.argv[2]).read_text())
    made = supervisor(Path(sys.argv[1]), plan, lambda text: print(text, file=sys.stderr, flush=True))
    assert "torch" not in sys.modules
    sys.exit(made.run())
