"""Run a command, wait for every process that it started, and write their CPU seconds to a file.

python -m benchmarks.peers.counted FILE COMMAND...

It is a program of its own because it waits for all of its children.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main(file: str, command: list[str]) -> int:
    """Run ``command``, write the CPU seconds to ``file``, and return the exit code once all descendants have ended."""
    # orphans become children of this process, so that the kernel adds up their seconds
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    code = subprocess.run(command, check=False).returncode
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(file).write_text(str(used.ru_utime + used.ru_stime))
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
