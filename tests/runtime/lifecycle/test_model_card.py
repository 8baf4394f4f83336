"""The card of a final model: what the summary says, as a table that the Hub reads, whatever names others have chosen."""

from __future__ import annotations

import pytest
import torch

from model_zoo import MLP
from raafl.core.options import Privacy
from raafl.runfolder import checkpoint_reader
from raafl.runtime.lifecycle.export import model_card
from tests.helpers.small_runs import experiment, finish

SUMMARY = {
    "algorithm": "fed_avg",
    "runtime": "distributed",
    "seed": 3,
    "finished": "max_updates",
    "versions": 4,
    "updates_merged": 8,
    "updates_refused": {"not-finite": 2},
    "updates_lost": 1,
    "participation": {"1": 5, "2": 3, "3": 0},
    "time_s": 90.0,
    "final": {"accuracy": 0.875, "a|b\n<script>": 1.0},
    "model_digest": "abcd",
    "privacy": None,
}


def rows(card):
    return [line for line in card.splitlines() if line.startswith("| ") and not line.startswith(("| |", "| ---"))]


def test_it_says_what_the_summary_says():
    card = model_card(SUMMARY, "a run", "MLP", is_pretrained=False)
    assert rows(card) == [
        "| method | fed\\_avg |",
        "| clients whose updates were merged | 2 |",
        "| updates merged | 8 |",
        "| updates refused, lost | 2, 1 |",
        "| versions of the model | 4 |",
        "| time | 1.5 min of wall-clock time |",
        "| ended by | max\\_updates |",
        "| seed | 3 |",
        "| model digest | abcd |",
        "| metric | value |",
        "| accuracy | 0.875 |",
        "| a\\|b\\\\n\\<script\\> | 1 |",
    ]
    assert (
        "no differential privacy was applied by the server" in card and 'load_file("FOLDER/model.safetensors")' in card
    )
    card_of = pytest.importorskip("huggingface_hub").ModelCard
    assert card_of(card).data.to_dict() == {
        "library_name": "pytorch",
        "tags": ["raafl", "federated-learning", "fed_avg"],
    }


def test_a_model_that_transformers_does_not_know_is_not_said_to_be_one_of_its():
    card = model_card(SUMMARY, "a run", "Mine", is_pretrained=True)
    assert "library_name: pytorch" in card and "from transformers" not in card
    assert "Load it with what belongs to the `save_pretrained` of Mine." in card


def test_a_private_run_leaves_its_values_as_safetensors_with_a_card_that_has_epsilon(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    pytest.importorskip("dp_accounting")
    privacy = Privacy(noise_multiplier=1.0, clip_norm=1.0)
    run = finish(experiment(tmp_path / "run", privacy=privacy, safetensors=True, max_updates=4))
    assert run.summary["model"] == "model"
    card = (run.folder / "model" / "README.md").read_text()
    assert f"| epsilon | {run.summary['privacy']['epsilon']} |" in card and run.digest in card
    found = load_file(run.folder / "model" / "model.safetensors")
    saved = checkpoint_reader.load(run.folder).state_dict
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    module = MLP(64, (24,), 10)
    module.load_state_dict(found)


def test_a_tied_parameter_is_there_under_each_of_its_names(tmp_path):
    """The format has no tensors that share memory; a module is loaded by all its names."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    run = finish(experiment(tmp_path / "run", model=Tied, safetensors=True, max_updates=1))
    found = load_file(run.folder / "model" / "model.safetensors")
    Tied().load_state_dict(found)
    assert torch.equal(found["first.weight"], found["again.weight"])


class Tied(MLP):
    def __init__(self):
        super().__init__(64, (24,), 10)
        self.first = torch.nn.Linear(10, 10, bias=False)
        self.again = torch.nn.Linear(10, 10, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.again(self.first(super().forward(x)))
