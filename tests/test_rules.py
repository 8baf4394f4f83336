"""The revision of a run's rules: new runs have the current one, run folders older than the field the first."""

from __future__ import annotations

import pytest
import torch

import raafl
from model_zoo import MLP
from raafl.config.parse import load_run, parse
from raafl.data import Digits
from raafl.errors import BadInput
from raafl.rules import CURRENT, Rules, recorded_revision
from tests.habits.source import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def folder_of(tmp_path, *, older):
    text = parse("simulate", ["--config", QUICKSTART]).config_yaml
    (tmp_path / "config.yaml").write_text(text.replace(f"rules: {CURRENT}\n", "") if older else text)
    return tmp_path


def test_a_new_run_has_the_current_rules_and_writes_them():
    parsed = parse("simulate", ["--config", QUICKSTART])
    assert parsed.experiment.rules == Rules().revision == CURRENT
    assert f"\nrules: {CURRENT}\n" in parsed.config_yaml


@pytest.mark.parametrize(("older", "revision"), [(True, 1), (False, CURRENT)])
def test_a_run_folder_is_replayed_and_resumed_by_its_own(tmp_path, older, revision):
    folder = folder_of(tmp_path, older=older)
    assert load_run(folder, trusted=False, for_replay=True).rules == revision
    assert parse("simulate", ["--resume", str(folder)]).experiment.rules == revision
    assert parse("simulate", ["--config", QUICKSTART, "--resume", str(folder)]).experiment.rules == revision
    assert recorded_revision({}) == 1


def test_a_folder_resumed_from_python_keeps_its_rules(tmp_path):
    federation = raafl.Federation(
        "fed_avg", clients=2, max_updates=2, checkpoint_every=1, output=tmp_path / "run", progress="quiet", rules=1
    )
    torch.manual_seed(0)
    federation.simulate(MLP(64, (8,), 10, lr=0.1), Digits())
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("rules: 1\n", ""))
    again = raafl.Federation("fed_avg", clients=2, max_updates=2, progress="quiet")
    torch.manual_seed(0)
    with pytest.raises(BadInput, match="whose run is finished"):  # nothing differs
        again.simulate(MLP(64, (8,), 10, lr=0.1), Digits(), resume=tmp_path / "run")


def test_rules_of_a_later_version_are_refused():
    with pytest.raises(BadInput, match=f"rules is 99: give at most {CURRENT}"):
        parse("simulate", ["--config", QUICKSTART, "--rules", "99"]).experiment.check()
