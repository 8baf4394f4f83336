"""Scripts that use `raafl.Federation`: the docs' examples and one that starts its own ranks, in processes of their own."""

from __future__ import annotations

import json
import os

import pytest

from raafl.lean_import import quick_imports
from tests.habits.source import ROOT
from tests.helpers import forkserver
from tests.helpers.forked_command import command

EXAMPLES = ROOT / "docs" / "examples"
pytestmark = pytest.mark.timeout(240)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow("a pretrained transformer")
@pytest.mark.parametrize(
    "example", ["lightning_digits", "plain_module", pytest.param("hugging_face", marks=pytest.mark.long)]
)
def test_an_example_is_short_and_runs(tmp_path, request, example):
    path, output = EXAMPLES / f"{example}.py", tmp_path / "run"
    assert len(path.read_text().splitlines()) < 50
    if example == "hugging_face":
        request.getfixturevalue("raafl_data")
        with quick_imports():  # here other tests need it too; the script's process would import it anew
            pytest.importorskip("transformers.models.bert.modeling_bert")
    with command(tmp_path / "c", str(path), entry=forkserver.script, OUTPUT=str(output)) as script:
        code = script.end(200)
    if script.err.startswith("skipped: the package"):
        pytest.skip(script.err)
    assert code == 0, script.err
    assert str(output) in script.out
    assert summary_of(output)["runtime"] == "simulated"


def test_the_example_for_hugging_face_says_why_it_skips(tmp_path):
    def without_data():
        os.environ.pop("RAAFL_DATA", None)

    path = str(EXAMPLES / "hugging_face.py")
    with command(tmp_path / "c", path, before=without_data, entry=forkserver.script) as script:
        assert (script.end(), script.err) == (1, "skipped: RAAFL_DATA is not set, the folder that has SST-2\n")


@pytest.mark.long("tests/runtime/test_replay.py::test_a_wall_clock_run_of_real_ranks_replays_to_the_last_bit")
def test_an_example_runs_under_torchrun(tmp_path):
    argv, output = ("--standalone", "--nproc-per-node=4", str(EXAMPLES / "lightning_digits.py")), tmp_path / "run"
    with command(
        tmp_path / "c", *argv, before=forkserver.start, entry=forkserver.torchrun, OUTPUT=str(output)
    ) as torchrun:
        assert torchrun.end() == 0, torchrun.err
    assert torchrun.out.count("accuracy") > 1
    found = summary_of(output)
    assert (found["runtime"], found["updates_merged"]) == ("distributed", 60)
    assert set(found["participation"]) == {"1", "2", "3"}


LOCAL = """
import sys, torch, raafl
from torch import nn
from raafl.data import Digits

fed = raafl.Federation("fed_async", max_updates=300, num_steps=2, progress="quiet", output=sys.argv[1], eval_every=4,
    callbacks=raafl.LambdaCallback(on_version=lambda run, version: run.stop("enough") if version == 7 else None))
make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
result = fed.fit(make, Digits(), loss=nn.CrossEntropyLoss(), local=2)
print("after", result.summary["finished"])
print("equal", fed.replay(sys.argv[1], make, Digits(), loss=nn.CrossEntropyLoss())["equal"])
try:
    fed.fit(make, Digits(), loss=nn.CrossEntropyLoss(), local=2)
except raafl.BadInput as error:
    print(str(error)[:48])
"""


def test_a_script_starts_its_own_ranks_and_a_callback_ends_them(tmp_path):
    script, output = tmp_path / "script.py", tmp_path / "run"
    script.write_text(LOCAL)
    with command(tmp_path / "c", str(script), str(output), before=forkserver.start, entry=forkserver.script) as started:
        assert started.end() == 0, started.err
    # clients end within fit
    assert started.out.splitlines() == [
        "after stopped: enough",
        "equal True",
        "'local' is 2, but this script has already called",
    ]
    found = summary_of(output)
    assert (found["runtime"], found["versions"], len(found["participation"])) == ("distributed", 7, 2)
