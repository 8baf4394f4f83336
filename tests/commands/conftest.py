"""`raafl simulate` on the quick start, in the test's own process."""

from __future__ import annotations

import json

import pytest

from raafl.commands.cli import main
from tests.commands.simulated import QUICKSTART
from tests.helpers import cached_models


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs `simulate` on the quick start with options; returns exit code, standard output and error."""

    def simulate(*options, config=QUICKSTART, updates=3):
        numbered = len(list(tmp_path.glob("run*")))
        output = [] if "--output" in options else ["--output", str(tmp_path / f"run{numbered}")]
        limit = ["--max_updates", str(updates)] if updates else []
        argv = ["simulate", "--config", str(config), "--progress", "quiet", *limit, *output, *map(str, options)]
        with cached_models.reuse_findings():
            code = main(argv)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return simulate


@pytest.fixture
def summary(run):
    """A function that runs `simulate --json` and returns its summary."""

    def simulate(*options, **keywords):
        code, out, err = run("--json", *options, **keywords)
        assert code == 0, err
        return json.loads(out)

    return simulate
