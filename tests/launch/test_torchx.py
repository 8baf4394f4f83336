"""The component of torchx: what it asks a scheduler to start is a command of raafl's."""

from __future__ import annotations

import shlex

import pytest

from tests.habits.source import ROOT
from tests.launch.command_lines import check

COMPONENT = f"{ROOT / 'launch' / 'torchx_component.py'}:fit"


def test_torchx_starts_ranks_of_raafl(tmp_path):
    runner = pytest.importorskip("torchx.runner")
    words = ["--config", "quickstart", "--j", "2x4", "--gpu", "4", "--", "--max_updates", "20"]
    with runner.get_runner() as torchx:
        asked = torchx.dryrun_component(COMPONENT, words, scheduler="local_cwd", cfg={"log_dir": str(tmp_path)})
    (role,) = asked.app.roles
    assert role.num_replicas == 2 and role.resource.gpu == 4
    line = shlex.split(" ".join([role.entrypoint, *role.args]).replace("'", " "))
    start = line.index("raafl")
    assert line[start - 1] == "-m" and line[start + 1] == "fit"
    assert line[line.index("--nproc_per_node") + 1] == "4"
    options = line[start + 2 :]
    assert options[:4] == ["--config", "quickstart", "--clients", "7"] and options[-2:] == ["--max_updates", "20"]
    check("fit", options)
