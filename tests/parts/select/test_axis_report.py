"""What `raafl axes`, a plan and a summary say of a model: by hand, for an MLP and a LLaMA of half a billion parameters."""

from __future__ import annotations

import json
import re

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raafl.commands.cli import main
from raafl.lab.plan.show import axes_text
from raafl.parts.select.axis_report import facts, share
from raafl.submodel import Submodels, isolated_run
from raafl.submodel.find import trace
from raafl.submodel.prove import narrow

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "vocab_size": 60000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Tokens(LightningDataModule):
    """Sixteen texts of 80 tokens."""

    def train_dataloader(self):
        tokens = torch.randint(0, 100, (16, 81), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=1)


class Wrong(LightningModule):
    """Declares an axis along which it sums up, and one that it has."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = torch.relu(self.up(x))
        return nn.functional.cross_entropy(self.down(h) * (1 + h.mean()), y)

    def submodel_axes(self):
        return {"hidden": [("up.weight", 0), ("up.bias", 0), ("down.weight", 1)]}


def asked(capsys, *argv):
    assert main(["axes", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_facts_of_an_mlp_are_those_by_hand(capsys):
    """64-200-10: of 15,010 parameters 50 units leave 50 * 75 + 10, and of the weights' FLOPs a quarter."""
    found = asked(capsys, "--config", "quickstart", "--rate", "0.25", "1")
    assert list(found) == ["axes", "whole", "rates", "seconds"] and found["seconds"] > 0
    parameters = ["layers.1.weight", "layers.1.bias", "layers.3.weight"]
    assert found["axes"] == [{"name": "layers.1", "size": 200, "parameters": parameters}]
    places = {(one["parameter"], one["dim"]): one["reason"] for one in found["whole"]}
    assert places.keys() == {("layers.1.weight", 1), ("layers.3.weight", 0), ("layers.3.bias", 0)}
    assert places["layers.1.weight", 1].startswith("it is an input (mlp.py:")
    assert found["rates"]["0.25"] == {"parameters": pytest.approx(3760 / 15010), "flops": pytest.approx(0.25)}
    assert found["rates"]["1"] == {"parameters": 1.0, "flops": 1.0}


def test_a_model_and_data_are_enough_and_the_text_says_the_same(capsys):
    model = ["--model", "model_zoo.MLP", "--model.in_features", "64", "--data", "raafl.data.Digits"]
    found = asked(capsys, *model)
    assert list(found["rates"]) == ["0.5", "0.25"] and len(found["axes"]) == 1
    assert main(["axes", *model, "--rate", "0.5"]) == 0
    text = capsys.readouterr().out
    for word in ("layers.1", "layers.3.weight[0], layers.3.bias[0]", "(mlp.py:", "found and proven in", "0.50"):
        assert word in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "axes needs a model and data: give --config FILE, or --model CLASS and --data CLASS"),
        (["--model", "model_zoo.MLP"], "axes needs a model and data"),
        (["--config", "quickstart", "--rate", "0"], "rate is 0.0"),
        (["--config", "quickstart", "--rate", "half"], "--rate: invalid float value: 'half'"),
        (["--config", "quickstart", "--ratee", "1"], "unknown option --ratee"),
    ],
)
def test_bad_options_are_one_line(argv, said, capsys):
    assert main(["axes", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_a_plan_and_a_summary_have_the_same(capsys, tmp_path):
    small = ["--config", "quickstart", "--max_updates", "2", "--progress", "quiet"]
    found = asked(capsys, *small)
    assert main(["plan", *small, "--algorithms", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes"] == {name: found[name] for name in ("axes", "whole", "rates")}
    assert main(["simulate", *small, "--output", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["axes"] == found["axes"]
    assert list(summary["rates_leave"].values()) == list(found["rates"].values())


def test_what_is_refuted_or_could_not_be_followed_is_whole_with_its_reason():
    from raafl.submodel.prove.proof import refuted

    batch = torch.randn(4, 6), torch.tensor([0, 1, 1, 0])
    submodels = Submodels(Wrong(), batch)
    submodels.exclude_axis(refuted(submodels, Wrong(), batch))
    found = facts(submodels, [0.5], 2)
    assert found["axes"] == [] and found["rates"]["0.5"] == {"parameters": 1.0, "flops": 1.0}
    reasons = {(one["parameter"], one["dim"]): one["reason"] for one in found["whole"]}
    assert reasons["up.bias", 0].startswith("not proven: ")
    assert reasons["up.weight", 1] == "the model's declared axes do not include it"
    assert axes_text(found, 100, terminal=False).startswith("No axes: every client trains all widths whole.")

    unseen = facts(Submodels(nn.Sequential(nn.Linear(3, 2)), (torch.randn(2, 5), None)), [0.5], 2)
    assert all("mat1 and mat2" in one["reason"] for one in unseen["whole"]) and len(unseen["whole"]) == 3


def test_a_long_table_is_cut_where_it_is_a_section_and_says_so():
    axes = [{"name": f"a{i}", "size": 4, "parameters": ["w"]} for i in range(5)]
    whole = [{"parameter": f"p{i}", "dim": 0, "reason": "why"} for i in range(5)]
    found = {"axes": axes, "whole": whole, "rates": {"0.5": {"parameters": 0.5, "flops": 0.25}}}
    text = axes_text(found, 100, terminal=False, most=2)
    assert "a1" in text and "a2" not in text and "... and 3 more: `raafl axes` lists them all" in text
    assert "p0[0], p1[0], p2[0], and 2 more" in text and "a4" in axes_text(found, 100, terminal=False)


@pytest.mark.long(
    "tests/submodel/prove/test_narrow.py::test_a_narrow_copy_has_the_axes_of_the_model_and_is_proven_in_its_place"
)
def test_a_large_model_needs_no_values(capsys, monkeypatch):
    """Two blocks of LLaMA, 367 million parameters: more than are ever drawn. The widest copy that has values is proven."""
    pytest.importorskip("transformers")
    drawn, draw = [], isolated_run.draw
    monkeypatch.setattr(
        "raafl.submodel.prove.proof.random_values",
        lambda s, m: drawn.append(narrow.num_values(s)) or narrow.random_values(s, m),
    )
    monkeypatch.setattr(
        isolated_run, "draw", lambda m, seed: drawn.append(sum(p.numel() for p in m.parameters())) or draw(m, seed)
    )
    argv = [
        "--model",
        "model_zoo.HFCausalLM",
        "--model.architecture",
        json.dumps(LLAMA),
        "--data",
        f"{__name__}.Tokens",
    ]
    found = asked(capsys, *argv, "--rate", "0.25")
    blocks = [f"model.model.layers.{i}" for i in (0, 1)]
    sizes = {one["name"]: one["size"] for one in found["axes"]}
    assert sizes == {f"{block}.{name}": n for block in blocks for name, n in (("heads", 4), ("ffn", 8192))}
    width, block = 2048, 2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192
    whole = 2 * 60000 * width + 2 * block + 5 * width
    left = 2 * 60000 * width + 2 * block / 4 + 5 * width
    assert found["rates"]["0.25"]["parameters"] == pytest.approx(left / whole)
    assert 0 < max(drawn) < trace.LARGE < trace.MOST_VALUES < whole


@pytest.mark.parametrize(
    ("value", "shown"), [(1, "1.0"), (0.5, "0.50"), (0.3049, "0.30"), (0.00414, "0.0041"), (0, "0.0")]
)
def test_shares_have_two_significant_digits(value, shown):
    assert share(value) == shown


@pytest.mark.parametrize(("width", "terminal", "most"), [(80, True, 80), (200, True, 120), (80, False, 120)])
def test_tables_of_axes_are_at_most_120_wide(width, terminal, most):
    names = [f"encoder.layers.{i}.attention.weight" for i in range(12)]
    found = {
        "axes": [{"name": "width", "size": 8, "parameters": names}],
        "rates": {"0.5": {"parameters": 0.5, "flops": 0.004}},
        "whole": [{"parameter": name, "dim": 0, "reason": "a norm takes statistics across it " * 9} for name in names],
    }
    text = re.sub(r"\x1b\[[0-9;]*m", "", axes_text(found, width, terminal=terminal))
    assert most - 20 < max(map(len, text.splitlines())) <= most
    assert all(name in "".join(text.split()) for name in names) and "0.0040" in text
