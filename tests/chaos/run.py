"""Torment a federation, let it end, and check its books: `python -m tests.chaos.run --seconds 60 --seed 0 --out DIR`.

Server and clients are real processes; between them is a proxy that delays, holds, cuts and corrupts. A script that follows from
the seed kills, stops and restarts them, and sends strangers. When it is over, the run ends by itself, and what it left is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos import accounting
from tests.chaos.faults import Fault, script
from tests.chaos.federation import Federation, Undo, exit_codes, leaks

_REPLAY_S = 3600  # half a minute of one core's time, on a machine that may be busy with more
ACCURACY = 0.90
_UPDATES_PER_FAULT = (
    15  # more than can come between two faults, 8.2 a second, so that the run does not end before the script
)
_FAULTS_PER_KILL = 1.4
_CALM_S = 180.0  # for the run to begin
_MOVE_S = 300.0  # for the run to move again after a fault; a busy machine takes minutes to start three clients


class Injector(threading.Thread):
    """Follows the script until time is up or enough has been killed; then lets the run be."""

    def __init__(self, federation: Federation, options: argparse.Namespace) -> None:
        super().__init__(name="faults")
        self.federation, self.options = federation, options
        self.over = threading.Event()  # the run has ended
        self.done: list[dict[str, Any]] = []
        self._undo: list[tuple[float, Undo]] = []
        self._began = 0.0

    @property
    def num_kills(self) -> int:
        """Processes killed so far."""
        return sum(row["killed"] for row in self.done)

    def run(self) -> None:
        deadline = time.monotonic() + _CALM_S
        while not self.federation.merged() and time.monotonic() < deadline and not self.over.is_set():
            self._wait(0.1)
        self._began = time.monotonic()
        for fault in script(self.options.seed, len(self.federation.supervisor.clients)):
            if self._enough():
                break
            before = self.federation.merged()
            self._inject(fault)
            self._wait(fault.gap * self.options.gap)
            self._wait(_MOVE_S, lambda: self.federation.merged() > before)  # noqa: B023
        for _, undo in self._undo:
            undo()
        patience = time.monotonic() + 180 + self.options.updates
        while not self.over.wait(0.5):
            if time.monotonic() > patience:  # as a user would, who has lost it
                os.kill(os.getpid(), signal.SIGTERM)  # SIGINT is ignored in the background

    def _enough(self) -> bool:
        wanted, spent_s = self.options, time.monotonic() - self._began
        return (
            self.over.is_set()
            or (wanted.seconds is not None and spent_s > wanted.seconds)
            or (wanted.kills is not None and self.num_kills >= wanted.kills)
            or (wanted.faults is not None and len(self.done) >= wanted.faults)
        )

    def _inject(self, fault: Fault) -> None:
        done = self.federation.inject(fault)
        for _ in range(50):  # until there is somebody to do it to
            if done is not None or self.over.is_set():
                break
            self._wait(0.1)
            done = self.federation.inject(fault)
        if done is None:
            return
        text, seconds, undo = done
        self._undo.append((time.monotonic() + seconds, undo))
        killed = text.count("SIGKILL") if fault.kind != "vanish" else int(text.split()[2])
        row = {"at_s": round(time.monotonic() - self._began, 2), "fault": fault.kind, "what": text, "killed": killed}
        self.done.append({**row, "updates": self.federation.merged()})

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until() and not self.over.wait(0.05):
            for entry in [entry for entry in self._undo if entry[0] <= time.monotonic()]:
                self._undo.remove(entry)
                entry[1]()


def torment(options: argparse.Namespace) -> dict[str, Any]:
    """Run the federation under faults; return the report."""
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with Federation(
        options.out, options.clients, options.updates, options.seed, tls=options.tls, restart_s=options.restart
    ) as federation:
        injector = Injector(federation, options)
        injector.start()
        try:
            code = federation.supervisor.run()
        finally:
            injector.over.set()
            injector.join()
        strange = exit_codes(federation.strangers, 60.0)
        checks = {
            "the run ended by itself": [] if code == 0 else [f"exit code {code}, see {options.out}/server.log"],
            "strangers were turned away, twins replaced": strange,
            "no thread or file is held for clients that are gone": leaks(federation.quiet),
            "no process is left": federation.orphans(),
            "the port is free": _free(federation.port),
        }
    if code == 0:
        checks |= accounting.audit(federation.folder) | _replayed(federation.folder) | _learnt(federation.folder)
    if (options.kills or 0) > injector.num_kills or (options.faults or 0) > len(injector.done):
        checks["all that was asked for was done"] = [f"{injector.num_kills} kills, {len(injector.done)} faults"]
    return report(options, injector, federation, checks, time.monotonic() - began)


def _free(port: int) -> list[str]:
    with socket.socket() as probe:
        return [f"something still listens at {port}"] if probe.connect_ex(("127.0.0.1", port)) == 0 else []


def _replayed(folder: Path) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "raafl", "replay", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=_REPLAY_S,
    )
    try:
        equal = json.loads(done.stdout)["equal"] is True and done.returncode == 0
    except ValueError:
        equal = False
    said = (done.stdout + done.stderr)[-2000:]
    return {"a replay gives the same model, to the last bit": [] if equal else [f"exit code {done.returncode}: {said}"]}


def _learnt(folder: Path) -> dict[str, list[str]]:
    accuracy = json.loads((folder / "summary.json").read_text())["final"]["accuracy"]
    return {f"accuracy is at least {ACCURACY:g}": [] if accuracy >= ACCURACY else [f"it is {accuracy:.4f}"]}


def report(
    options: argparse.Namespace, injector: Injector, federation: Federation, checks: dict[str, list[str]], wall_s: float
) -> dict[str, Any]:
    """What was done, what came of it, and what is wrong with that."""
    path = federation.folder / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    resumed = [row for row in _journal(federation.folder) if row["event"] == "resumed"]
    killed = Counter({row["fault"]: 0 for row in injector.done})
    for row in injector.done:
        killed[row["fault"]] += row["killed"]
    names = (
        "finished",
        "versions",
        "updates_merged",
        "updates_refused",
        "updates_lost_by_reason",
        "connections_refused",
        "participation",
        "final",
        "time_s",
    )
    return {
        "command": _command(options),
        "seed": options.seed,
        "clients": options.clients,
        "wall_s": round(wall_s, 1),
        "faults": dict(Counter(row["fault"] for row in injector.done)),
        "kills": injector.num_kills,
        "kills_of_the_server": killed["kill server"],
        "resumed": len(resumed),
        "restarts_of_clients_and_server": federation.supervisor.num_restarts,
        "server_without_clients": [
            dict(zip(("pid", "threads", "open_files", "rss_bytes"), sample, strict=True)) for sample in federation.quiet
        ],
        "run": {name: summary.get(name) for name in names},
        "checks": {name: problems[:20] for name, problems in checks.items()},
        "passed": not any(checks.values()),
        "script": injector.done,
    }


def _command(options: argparse.Namespace) -> str:
    """The command line that makes such a report, without this machine's folders."""
    given = [
        (name, getattr(options, name)) for name in ("seconds", "kills", "faults", "gap", "clients", "updates", "seed")
    ]
    words = " ".join(f"--{name} {value:g}" for name, value in given if value is not None)
    return f"python -m tests.chaos.run {words}{' --tls' if options.tls else ''} --out DIR"


def _journal(folder: Path) -> list[dict[str, Any]]:
    return accounting.journal(folder) if (folder / "events.jsonl").is_file() else []


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    run = found["run"]
    lines = [f"{found['kills']} kills ({found['kills_of_the_server']} of the server) in {found['wall_s']} s; injected:"]
    lines += [f"  {n:5d}  {kind}" for kind, n in sorted(found["faults"].items())]
    lines.append(f"run: {run['finished']}, {run['updates_merged']} updates merged, resumed {found['resumed']} times")
    for name in ("final", "updates_lost_by_reason", "updates_refused", "connections_refused"):
        lines.append(f"  {name}: {json.dumps(run[name])}")
    for name, problems in found["checks"].items():
        lines.append(f"  {'ok    ' if not problems else 'FAILED'}  {name}")
        lines += [f"            {problem}" for problem in problems[:5]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 0 = every check passed."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run")
    parser.add_argument(
        "--seconds", type=float, help="inject faults for so long (60 unless one of the next two is given)"
    )
    parser.add_argument("--kills", type=int, help="until so many processes were killed")
    parser.add_argument("--faults", type=int, help="until there were so many")
    parser.add_argument("--gap", type=float, default=1.75, help="mean seconds between two")
    parser.add_argument(
        "--restart", type=float, default=0.3, help="seconds from a process's first death to its next life"
    )
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--updates", type=int, help="max_updates of the run; default: 15 for each fault expected")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="a new folder: run, logs, report.json")
    parser.add_argument("--keep", type=Path, help="also write the report, with date and hardware, to this file")
    options = parser.parse_args(argv)
    if options.seconds is None and options.kills is None and options.faults is None:
        options.seconds = 60.0
    if options.updates is None:
        expected = [
            (options.faults or 0),
            (options.kills or 0) * _FAULTS_PER_KILL,
            (options.seconds or 0) / options.gap,
        ]
        options.updates = round(_UPDATES_PER_FAULT * max(expected))
    found = torment(options)
    (options.out / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    if options.keep is not None:
        from benchmarks.common import report as dated

        rows = [{"fault": kind, "times": times} for kind, times in sorted(found["faults"].items())]
        kept = {name: value for name, value in found.items() if name not in ("script", "faults")}
        options.keep.write_text(json.dumps(dated(rows, **kept), indent=2) + "\n")
    print(text(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
