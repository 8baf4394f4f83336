"""Play a federation of four hospitals on this machine: real processes, TLS over 127.0.0.1, six minutes on two idle cores.

    python examples/hospitals/play.py [OUT] [--short]       # RAAFL_DATA has cifar100 and sst2; OUT is build/hospitals

Each hospital has a folder with its data, its key and certificate, its policy, its receipts. Three runs follow one another, since
secure aggregation wants sums, which a merge of each update by itself is not, and epsilon wants few numbers:

1. images: a ViT-Tiny, asynchronous, submodels by device. One site is killed and comes back; one runs its clients as an array of
   jobs (launch/slurm-array.sbatch, with bash in SLURM's place).
2. texts: BERT with LoRA adapters of unequal rank, asynchronous by buffers, under secure aggregation.
3. probe: one layer on the frozen BERT, under secure aggregation and differential privacy.

At the end each run is audited, the first two are reported, and OUT/result.json has the figures of docs/hospitals.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import folders
import picture

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RAAFL = [sys.executable, "-m", "raafl"]
CLIENTS = {"north": (1,), "east": (2,), "south": (3,), "west": (4, 5)}
KILLED = "south"
UPDATES = 120
"""Updates of the run on images, as images.yaml says; the site is killed after 0.2 of them, and started again after 0.4."""
SHORT = {
    "images": ["--max_updates", "100", "--eval_every", "20", "--train.num_steps", "2", "--samples.every", "2"],
    "texts": ["--max_updates", "6", "--eval_every", "2", "--train.num_steps", "2"],
    "probe": ["--max_updates", "16"],
}
"""Options of each run's short form, which `make test-long` plays."""


Process = subprocess.Popen[bytes]


class Federation:
    """The folders and processes of a federation on one machine."""

    def __init__(self, out: Path, *, short: bool) -> None:
        self.out, self.short = out, short
        self.killed: dict[str, int] = {}
        for name in ("server", *folders.SITES):
            (out / name).mkdir(parents=True, exist_ok=True)
        self._shim()

    def _shim(self) -> None:
        """Put a `raafl` on the path of the array's script, which a cluster's environment would have."""
        (self.out / "bin").mkdir(exist_ok=True)
        script = self.out / "bin" / "raafl"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m raafl "$@"\n')
        script.chmod(0o755)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a site's processes: caches, receipts and books of its own."""
        place = self.out / name
        paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "XDG_STATE_HOME": str(place / "state"),
            "RAAFL_DATA": str(place / "cache"),
            "HF_HOME": str(place / "cache" / "hf"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
        }

    def raafl(self, name: str, *words: str, codes: Sequence[int] = (0,)) -> str:
        """Run a command as the operator or a site, in its folder, and return what it prints."""
        done = subprocess.run(
            [*RAAFL, *words],
            cwd=self.out / name,
            env=self.environment(name),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in codes:
            raise SystemExit(
                f"[hospitals] raafl {' '.join(words)} has failed ({done.returncode}):\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def certify(self) -> None:
        """Make the authority and the server's certificate, and have each site's request signed."""
        self.raafl("server", "certs", "init", "--federation", "hospitals")
        self.raafl("server", "certs", "server", "localhost", "127.0.0.1")
        authority = self.out / "server" / "certs"
        for site, clients in CLIENTS.items():
            self.raafl(site, "certs", "request", site, "--folder", "certs")
            request = self.out / site / "certs" / f"{site}.csr"
            self.raafl("server", "certs", "sign", str(request), "--clients", ",".join(map(str, clients)))
            for file in ("ca.crt", f"{site}.crt"):
                shutil.copy(authority / file, self.out / site / "certs")
            shutil.copy(HERE / "policies" / f"{site}.yaml", self.out / site / "site.yaml")

    @contextmanager
    def started(self, name: str, log: str, words: Sequence[str], **more: str) -> Iterator[Process]:
        """Run a process of the operator or a site, whose output goes to NAME/LOG.log; end it at the end."""
        with (self.out / name / f"{log}.log").open("ab") as file:
            process = subprocess.Popen(
                words,
                cwd=self.out / name,
                env=self.environment(name) | more,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=30)

    def join(self, site: str, client: int, address: str, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command and the variables with which a client of a site takes part."""
        if site != "west":
            own = ["--client", str(client), "--address", address, "--certs", "certs"]
            return [*RAAFL, "join", *own, "--policy", "site.yaml", *options], {}
        array = ["bash", str(ROOT / "launch" / "slurm-array.sbatch"), address, "--policy", "site.yaml", *options]
        job = {"SLURM_SUBMIT_DIR": str(self.out / site), "SLURM_ARRAY_TASK_ID": str(client), "SLURM_ARRAY_JOB_ID": "1"}
        return array, job | {"PATH": f"{self.out / 'bin'}:{os.environ['PATH']}"}

    def run(self, name: str, clients: Mapping[str, Sequence[int]], data: Callable[[int], str]) -> Path:
        """Play one run: a server, and its clients with data of their own; return the run folder.

        Everybody has the config: it names folders, which no client takes from a server.

        Args:
            name: name of the config, without ending.
            clients: clients of each site.
            data: path of a client's data within its site's folder.
        """
        folder, config = self.out / "server" / "runs" / name, str(HERE / f"{name}.yaml")
        kind = "images" if name == "images" else "texts"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        serve = [
            *RAAFL,
            "serve",
            "--config",
            config,
            "--address",
            address,
            "--output",
            str(folder),
            "--progress",
            "plain",
        ]
        serve += ["--data.path", str(self.out / "server" / kind), *(SHORT[name] if self.short else [])]
        with ExitStack() as stack:
            server = stack.enter_context(self.started("server", name, serve))
            processes = {}
            for site, ids in clients.items():
                for client in ids:
                    options = ["--config", config, *(SHORT[name] if self.short else []), "--data.path", data(client)]
                    words, more = self.join(site, client, address, options)
                    processes[client] = (site, words, more)
            running = {
                client: stack.enter_context(self.started(site, f"{name}-{client}", words, **more))
                for client, (site, words, more) in processes.items()
            }
            if name == "images":
                (lost,) = CLIENTS[KILLED]
                site, words, more = processes[lost]
                self._lose(folder, running, lost, server)
                running[lost] = stack.enter_context(self.started(site, f"{name}-{lost}", words, **more))
            self._until(lambda: server.poll() is not None, running, server)
            until = time.monotonic() + 60
            while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
                time.sleep(0.2)  # one that came back too late waits for a server, and is ended with the others
            self._until(lambda: True, running, server)
        return folder

    def _lose(self, folder: Path, running: dict[int, Process], lost: int, server: Process) -> None:
        """Kill a client in the middle of the run, and wait until the others have gone on without it for a while."""
        goal = int(SHORT["images"][1]) if self.short else UPDATES
        self._until(lambda: num_merged(folder) >= goal * (0.1 if self.short else 0.2), running, server)
        process = running.pop(lost)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.killed = {"client": lost, "after_updates": num_merged(folder)}
        self._until(lambda: num_merged(folder) >= goal * (0.12 if self.short else 0.4), running, server)
        self.killed["started_again_after_updates"] = num_merged(folder)

    def _until(self, condition: Callable[[], bool], running: Mapping[int, Process], server: Process) -> None:
        """Wait for a condition, 20 minutes at most; end with a message if a process has failed meanwhile."""
        until = time.monotonic() + 1200
        while time.monotonic() < until:
            done = condition()
            for what, process in {"server": server, **running}.items():
                if process.poll() not in (None, 0):
                    raise SystemExit(
                        f"[hospitals] {what} has ended with {process.returncode}: read the logs in {self.out}"
                    )
            if done:
                return
            time.sleep(0.2)
        raise SystemExit(f"[hospitals] nothing has ended for 20 minutes: read the logs in {self.out}")


def num_merged(folder: Path) -> int:
    """Return how many updates a run has merged so far."""
    path = folder / "clients.csv"
    return sum(row["outcome"] == "merged" for row in csv.DictReader(path.open())) if path.is_file() else 0


def merged_after(folder: Path, killed: Mapping[str, int]) -> int:
    """Return how many updates of the killed client were merged after it had come back, with a new process."""
    rows = list(csv.DictReader((folder / "clients.csv").open()))
    mine = [row for row in rows if row["client"] == str(killed["client"]) and row["outcome"] == "merged"]
    first = min((int(row["incarnation"] or 0) for row in mine), default=0)
    return sum(int(row["incarnation"] or 0) > first for row in mine)


def facts(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of a run that the page shows."""
    summary = json.loads((folder / "summary.json").read_text())
    row = {
        "run": name,
        "algorithm": summary["algorithm"],
        "accuracy": summary["final"]["accuracy"],
        "updates": summary["updates_merged"],
        "lost": summary["updates_lost"],
        "versions": summary["versions"],
        "seconds": summary["time_s"],
        "megabytes_up": summary["bytes_up"] / 1e6,
        "megabytes_down": summary["bytes_down"] / 1e6,
        "staleness": summary["staleness"]["mean"],
        "epsilon": f"{privacy['epsilon']:.1f}" if (privacy := summary.get("privacy")) else "none",
        "participation": summary["participation"],
    }
    return row


def audit(federation: Federation, folder: Path, sites: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Audit a run: the operator its records, and sites their own tasks, of which they train again those with kept inputs.

    Sites call it before they take part in another run, so that all of their receipts are of this one.
    """
    said = json.loads(federation.raafl("server", "audit", str(folder), "--books_only", "--json", codes=(0, 1)))
    rows = [{"who": "operator", "run": folder.name, "findings": len(said["findings"]), "rows": said["signed_rows"]}]
    for site in sites:
        for receipts in sorted((federation.out / site / "state" / "raafl" / "receipts").iterdir()):
            words = ["audit", str(folder), "--site", str(receipts), "--share", "1", "--json"]
            said = json.loads(federation.raafl(site, *words, codes=(0, 1)))
            counts = {name: sum(one[name] for one in said["sites"]) for name in ("receipts", "trained_again")}
            rows.append({"who": site, "run": folder.name, "findings": len(said["findings"]), **counts})
    return rows


def play(out: Path, data: Path, *, short: bool) -> dict[str, Any]:
    """Make the folders, play the three runs, audit and report them; return the figures."""
    began = time.monotonic()
    steps: list[dict[str, Any]] = []

    def step(name: str, work: Callable[[], Any]) -> Any:
        print(f"[hospitals] {name} ...", flush=True)
        since, cpu = time.monotonic(), cpu_s()
        found = work()
        steps.append({"step": name, "seconds": time.monotonic() - since, "cpu_seconds": cpu_s() - cpu})
        print(f"[hospitals] {name}: {steps[-1]['seconds']:.0f} s", flush=True)
        return found

    federation = Federation(out, short=short)
    sizes = {"num_images": 16, "num_texts": 96, "num_test": 50} if short else {}
    step("folders", lambda: folders.make(data, out, **sizes))
    step("certificates", federation.certify)
    one_each = {site: ids[:1] for site, ids in CLIENTS.items()}
    images = step(
        "images",
        lambda: federation.run("images", CLIENTS, lambda client: f"images-{client}" if client > 3 else "images"),
    )
    audits = step("audit of images", lambda: audit(federation, images, ["north", KILLED]))
    texts = step("texts", lambda: federation.run("texts", one_each, lambda client: "texts"))
    probe = step("probe", lambda: federation.run("probe", one_each, lambda client: "texts"))
    runs = {"images": images, "texts": texts, "probe": probe}
    audits += step("audit of texts and probe", lambda: [*audit(federation, texts), *audit(federation, probe)])
    pages = out / "pages"
    pages.mkdir(exist_ok=True)

    def report() -> None:
        for name, folder in runs.items():
            federation.raafl("server", "report", str(folder), "--output", str(pages / f"{name}.html"))
        labels = {client: f"{site}, {client}" for site, ids in CLIENTS.items() for client in ids}
        picture.draw(images, pages / "hospitals-images.svg", labels)
        shutil.copy(images / "model" / "README.md", pages / "model-card.md")

    step("report", report)
    return {
        "short": short,
        "seconds": time.monotonic() - began,
        "cpu_seconds": sum(one["cpu_seconds"] for one in steps),
        "steps": steps,
        "rows": [facts(name, folder) for name, folder in runs.items()],
        "killed": {**federation.killed, "merged_after": merged_after(images, federation.killed)},
        "audits": audits,
    }


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all that it has waited for."""
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Play from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "build" / "hospitals")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RAAFL_DATA", "~/.cache/raafl")).expanduser())
    parser.add_argument("--short", action="store_true", help="a few updates of each run, to see that all of it works")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        print(f"[hospitals] {out} is not empty: name another folder, or remove it", file=sys.stderr)
        return 2
    missing = [name for name in ("cifar100", "sst2") if not (options.data / name).is_dir()]
    if missing:
        print(
            f"[hospitals] {options.data} has no {' and no '.join(missing)}: set RAAFL_DATA, or give --data",
            file=sys.stderr,
        )
        return 2
    result = play(out, options.data, short=options.short)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"[hospitals] {result['seconds']:.0f} s, {result['cpu_seconds']:.0f} CPU s; pages in {out / 'pages'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
