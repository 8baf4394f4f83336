"""LoRA with a rank for each client, in whole runs: bytes, one round by hand, two clocks, a replay, another base."""

from __future__ import annotations

import copy
import os

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_raa
from raafl.core.algorithm import Training
from raafl.data import FederatedData, Iid
from raafl.runfolder import checkpoint_reader
from raafl.runtime.replay import replay
from raafl.runtime.setup import make_model
from tests.conformance.clocks import on_both_clocks
from tests.helpers.lora_models import LAYERS, RANKS, Tokens, lora_bert, lora_run, rated, trained_bytes
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import equal_replay, finish

pytestmark = pytest.mark.timeout(120)


def test_only_adapters_and_head_travel_and_each_client_has_its_rank(tmp_path):
    run = finish(lora_run(tmp_path / "run", fed_raa(submodel=rated()), max_updates=16))
    rows = [row for row in run.rows() if row["outcome"] == "merged"]
    assert {int(row["client"]) for row in rows} == {1, 2, 3, 4}
    for row in rows:
        wanted = trained_bytes(RANKS[int(row["client"]) - 1])
        assert (int(row["bytes_down"]), int(row["bytes_up"])) == (wanted, wanted)


def zeroed_above(model, rank):
    with torch.no_grad():
        for layer in map(model.get_submodule, LAYERS):
            layer.lora_A["default"].weight[rank:] = 0
            layer.lora_B["default"].weight[:, rank:] = 0
    return model


def test_one_round_by_hand(tmp_path):
    """Each client: the whole model with its ranks, the others zero, which stay so. The mean of each over those who have it."""
    training = Training(num_epochs=None, num_steps=1, batch_size=64)
    experiment = lora_run(tmp_path / "run", fed_avg(submodel=rated()), train=training, max_updates=4)
    before = make_model(experiment)
    data = FederatedData(Tokens(), Iid(), 4, experiment.seed)
    trained = []
    for client, rank in enumerate(RANKS, start=1):
        model = zeroed_above(copy.deepcopy(before), rank).train()
        optimizer = model.configure_optimizers()
        ((batch, _),) = data.client(client).batches(torch.Generator(), 64, num_epochs=1)
        model.training_step(batch, 0).backward()
        optimizer.step()
        assert model.get_parameter(f"{LAYERS[0]}.lora_B.default.weight")[:, rank:].count_nonzero() == 0
        trained.append(dict(model.named_parameters()))
    merged = checkpoint_reader.load(finish(experiment).folder).state_dict
    for name, parameter in before.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(merged[name], parameter)
            continue
        expected = torch.empty_like(parameter)
        ranks_of = range(8) if "lora_" in name else [0]
        for i in ranks_of:
            part = i if "lora_A" in name else (slice(None), i) if "lora_B" in name else slice(None)
            have = [one[name][part] for one, rank in zip(trained, RANKS, strict=True) if i < rank]
            assert len(have) == (4 if "lora_" not in name else sum(i < rank for rank in RANKS))
            expected[part] = torch.stack(have).mean(0).detach()
        torch.testing.assert_close(merged[name], expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(merged[name], parameter)


@pytest.mark.long("test_merges_of_products_give_the_same_model_on_both_clocks")
@pytest.mark.parametrize(
    "algorithm", [fed_raa(submodel=rated()), fed_avg(submodel=rated())], ids=["fed_raa", "fed_avg"]
)
def test_both_runtimes_give_the_same_model(tmp_path, algorithm):
    base = lora_run(tmp_path / "simulated", algorithm, max_updates=8, emulate=False)
    _, real = on_both_clocks(base, tmp_path / "real")
    merged = [row for row in real.rows() if row["outcome"] == "merged"]
    frame = {int(row["bytes_down"]) - trained_bytes(RANKS[int(row["client"]) - 1]) for row in merged}
    assert 0 < min(frame) <= max(frame) < 4096, "beside the tensors only a header and the spec are sent"


@pytest.mark.quick_cases("flora")
@pytest.mark.parametrize(
    ("make", "lora"),
    [(fed_buff, "fedex"), (fed_async, "flora"), (fed_async, "rolora")],
    ids=["fedex", "flora", "rolora"],
)
def test_merges_of_products_give_the_same_model_on_both_clocks(tmp_path, make, lora):
    algorithm = make(submodel=rated(), lora=lora)
    base = lora_run(tmp_path / "simulated", algorithm, max_updates=8, emulate=False)
    _, real = on_both_clocks(base, tmp_path / "real")
    assert equal_replay(base, real)
    last = real.rows("metrics.csv")[-1]
    energies = [name for name in last if name.startswith("rank_energy/")]
    assert energies == ["rank_energy/1", "rank_energy/2", "rank_energy/3-4", "rank_energy/5-8"]
    assert sum(float(last[name]) for name in energies) == pytest.approx(1.0)


@pytest.mark.long("test_merges_of_products_give_the_same_model_on_both_clocks")
def test_several_processes_train_the_same_model(tmp_path):
    one, two = (
        finish(lora_run(tmp_path / str(n), fed_raa(submodel=rated()), max_updates=12, workers=n)) for n in (1, 2)
    )
    assert one.digest == two.digest


CONFIG = """
name: lora
seed: 0
clients: 4
model:
  class_path: model_zoo.HFSequenceClassifier
  init_args:
    architecture: {architecture}
    lr: 0.01
    lora: {{rank: 8, alpha: 16.0, target_modules: [query, value]}}
data: tests.helpers.lora_models.Tokens
algorithm:
  class_path: raafl.fed_raa
  init_args:
    submodel:
      class_path: raafl.parts.Rated
      init_args: {{rates: [1.0, 0.5, 0.25, 0.125], rate_of: width}}
train: {{num_steps: 2}}
max_updates: 12
progress: quiet
"""


@pytest.mark.long("test_merges_of_products_give_the_same_model_on_both_clocks")
def test_a_run_from_a_config_replays_to_the_last_bit(tmp_path):
    import json

    from raafl.config.parse import parse
    from raafl.runtime.run import simulate
    from tests.helpers.lora_models import BERT

    path = tmp_path / "lora.yaml"
    path.write_text(CONFIG.format(architecture=json.dumps(BERT)))
    parsed = parse("simulate", ["--config", str(path), f"--output={tmp_path / 'run'}"])
    summary = simulate(parsed.experiment, parsed.config_yaml)[0]
    result = replay(tmp_path / "run", trust_config=True)
    assert result["equal"] is True and result["model_digest"] == summary["model_digest"]
    assert result["versions"] == summary["versions"]


def test_a_client_whose_frozen_base_differs_is_refused_and_the_others_go_on(tmp_path, capfd, monkeypatch):
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        lora_bert(lora=None).save_pretrained(tmp_path / name)
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "one"))

    def model():
        return lora_bert(name_or_path=os.environ["WEIGHTS"], architecture=None)

    def before(rank):
        if rank == 2:
            os.environ["WEIGHTS"] = str(tmp_path / "other")

    experiment = lora_run(tmp_path / "run", fed_raa(submodel=rated()), model=model, max_updates=6, emulate=False)
    with ranks(experiment, before) as fleet:
        run = fleet.serve()
        codes = fleet.exit_codes()
    assert {rank: code for rank, code in codes.items() if code != 0} == {2: 1}
    assert run.summary["updates_merged"] == 6
    (lost,) = [row for row in run.events("lost") if row["client"] == 2]
    assert "different frozen parameters: the server's have digest" in lost["reason"]
    lines = [line for line in capfd.readouterr().err.splitlines() if "frozen" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "client 2: refused: different frozen parameters: the server's have digest "
    )
    assert lines[0].endswith("they are not sent: give both the same pretrained weights")
