"""Print a benchmark's rows with the hardware, the date and the versions of libraries."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from raafl.runtime.lifecycle.environment import processor

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600.0
_NVIDIA_SMI = ["nvidia-smi", "--id=0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]


def hardware() -> dict[str, Any]:
    """Describe this machine: CPU model, usable cores, RAM in bytes, and names of the GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def versions() -> dict[str, str | None]:
    """Return the versions on which figures may depend; None for a package that is not installed."""
    import raafl

    found: dict[str, str | None] = {"python": platform.python_version(), "raafl": raafl.__version__}
    for name in ("torch", "lightning"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def report(rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """Return the object that a benchmark prints."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"hardware": hardware(), "date": date, "versions": versions(), "rows": list(rows), **more}


def paper_file(name: str) -> tuple[str, str | None]:
    """Find the comparison file of a result, and its variant if the result is named FILE-VARIANT."""
    folder, words = "configs/papers", name.split("-")
    for place in range(len(words), 0, -1):
        file = f"{folder}/{'-'.join(words[:place])}.yaml"
        if (ROOT / file).is_file():
            return file, "-".join(words[place:]) or None
    return f"{folder}/{name}.yaml", None


def table(rows: Sequence[Row]) -> str:
    """Format rows as text in aligned columns, with numbers to four significant digits."""
    if not rows:
        return "(no rows)"
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def in_process(name: str, arguments: list[str], threads: int) -> Any:
    """Run a part of a benchmark in a process of its own with ``threads`` threads; return the JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--threads", str(threads)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.{name} {' '.join(arguments)} failed with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def gpu_busy(*command: str) -> Iterator[list[tuple[float, float]]]:
    """Sample the share of time in which the first GPU is busy; yield pairs (`time.monotonic`, per cent), one each 0.2 s.

    Without nvidia-smi nothing is yielded.
    """
    seen: list[tuple[float, float]] = []
    try:
        looking = subprocess.Popen(command or _NVIDIA_SMI, stdout=subprocess.PIPE, text=True)
    except OSError:
        yield seen
        return
    assert looking.stdout is not None
    lines = looking.stdout

    def read() -> None:
        seen.extend((time.monotonic(), float(line)) for line in lines if line.strip().isdecimal())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield seen
    finally:
        looking.terminate()
        looking.wait()
        reader.join()
        lines.close()


def status_bytes(field: str) -> int:
    """Read a figure of this process from the kernel in bytes: ``VmRSS``, its resident memory, or ``VmHWM``, the peak of that."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def forget_peak() -> int:
    """Reset the peak of this process's memory; return its present memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def machine_of(result: Mapping[str, Any]) -> str:
    """Return the name of what measured a result: its GPUs, else its CPU."""
    return ", ".join(result["hardware"].get("gpus", [])) or str(result["hardware"]["cpu"])


def replace_rows(file: Path, part: str, rows: Sequence[Row]) -> None:
    """Write the rows of one part of a benchmark in place of those that a file has of it; others keep their date and machine.

    Args:
        file: an earlier measurement.
        part: name of the part, which each of its rows has as ``part``.
        rows: what was measured now.
    """
    before, now = json.loads(file.read_text(encoding="utf-8")), report([])
    kept = {"date": before["date"], "machine": machine_of(before)}
    others = [kept | row for row in before["rows"] if row.get("part") != part]
    now["rows"] = others + [{"part": part, "date": now["date"], **row} for row in rows]
    file.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


def main(
    name: str, rows_fn: Callable[[], Sequence[Row]], argv: Sequence[str] | None = None, of: Path | None = None
) -> None:
    """Run a benchmark from the command line: ``--json`` prints only one object, ``--out FILE`` saves it.

    `rows_fn`: measures. `of`: report to whose measurements the rows belong, so that they have its hardware, date and
    versions; None = those of this machine.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(argv)
    result = report(rows_fn())
    if of is not None:
        before = json.loads(of.read_text(encoding="utf-8"))
        result |= {field: before[field] for field in ("hardware", "date", "versions")}
    text = json.dumps(result, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
        return
    machine = result["hardware"]
    ram = f"{machine['ram_bytes'] / 2**30:.0f} GiB"
    print(f"{name}: {machine['cpu']}, {machine['cores']} cores, {ram}, {', '.join(machine['gpus']) or 'no GPU'}")
    print(f"{result['date']}  " + "  ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(table(result["rows"]))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
