"""Record when, where and with which code a result was made.

Imports no torch, so that whoever needs one of these alone pays for nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import raafl
from raafl.rules import CURRENT

_PACKAGES = ("torch", "lightning", "numpy")
_GPUS = Path("/proc/driver/nvidia/gpus")


def provenance() -> dict[str, Any]:
    """Return the date, hardware, versions, commit and rules of this process, to be stored with a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "code_digest": code_digest(),
        "rules": CURRENT,
        "hardware": {
            "processor": processor(),
            "gpus": gpus(),
            "system": platform.system(),
            "machine": platform.machine(),
        },
        "versions": {"python": platform.python_version(), "raafl": raafl.__version__}
        | {name: metadata.version(name) for name in _PACKAGES},
    }


def processor() -> str:
    """Return the model name of this machine's processor, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpus(folder: Path = _GPUS) -> list[str]:
    """Return the model names of this machine's NVIDIA GPUs, which the driver keeps in files below a folder."""
    found = []
    for path in sorted(folder.glob("*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def machine_name(hardware: Mapping[str, Any]) -> str:
    """Return the processor and the GPUs of a result's machine in words, as "Intel(R) Xeon(R) Processor, NVIDIA H200"."""
    return ", ".join([hardware["processor"], *hardware.get("gpus", [])])


@cache
def _commit() -> str | None:
    """Return the commit of the checkout that raafl is imported from, with `+` where files differ; None outside of one."""
    git = ["git", "-C", str(Path(raafl.__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed.strip() else "")


@cache
def code_digest() -> str:
    """Return a digest of the source files of raafl and, if installed, of its model zoo (the package `model_zoo`)."""
    package = Path(raafl.__file__).parent
    digest = hashlib.sha256()
    for folder in (package, package.parent / "model_zoo"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file's contents, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
