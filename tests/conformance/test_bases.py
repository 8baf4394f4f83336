"""A language model whose clients hold its frozen base at 32, 16 and 4 bits a weight, each as its memory allows, in whole runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")

from model_zoo import HFCausalLM
from raafl.algorithms import fed_avg
from raafl.config.parse import load_experiment
from raafl.lab.plan import show
from raafl.lab.plan.dry import World, predict
from raafl.lab.plan.plan import make_plan
from raafl.runfolder import checkpoint_reader
from raafl.runtime.run import simulate
from tests.conformance import executors
from tests.conformance.clocks import fingerprints, on_both_clocks
from tests.habits.source import ROOT
from tests.helpers.cached_models import reuse_findings
from tests.helpers.crash import crash
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import equal_replay, finish, unequal

pytestmark = pytest.mark.timeout(300)  # the first test makes what all share
BASES = ("fp32", "bf16", "nf4")
RATES = (1.0, 0.5, 0.25, 0.125)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights from a file: those drawn in bf16 are not those drawn in fp32 and rounded."""
    folder = tmp_path_factory.mktemp("weights")
    HFCausalLM("made:llama").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def findings(tmp_path_factory):
    """Axes, proofs and costs are those of one model throughout, and no data set of this machine's is read."""
    with pytest.MonkeyPatch.context() as patch, reuse_findings():
        patch.setenv("RAAFL_DATA", str(tmp_path_factory.mktemp("data")))
        yield


def made(weights, output, base, *memory_bytes, **fields):
    """Four clients with ranks 8, 4, 2 and 1, and so much memory each; none = no limit."""
    named = base if isinstance(base, str) else f"[{','.join(base)}]"
    found = load_experiment(
        ROOT / "configs" / "llm-lora.yaml",
        "--model.name_or_path",
        str(weights),
        "--model.lora.base",
        named,
        "--data.num_test",
        "8",
        "--data.batch_size",
        "4",
        "--train.num_steps",
        "1",
        "--max_updates",
        "8",
        "--progress",
        "quiet",
        "--emulate",
        "false",
        "--output",
        str(output),
    )
    devices = unequal()
    if memory_bytes:
        devices = [replace(one, memory_bytes=float(n)) for one, n in zip(devices, memory_bytes, strict=True)]
    return replace(found, devices=devices, **fields)


@pytest.fixture(scope="module")
def peaks(weights, tmp_path_factory):
    """Bytes of a task by client and form, as they are predicted."""
    world = World(made(weights, tmp_path_factory.mktemp("none"), BASES))
    fleet, select = world.fleet(world.experiment.algorithm), world.experiment.algorithm.select
    specs = [select(client, fleet).spec for client in world.clients]
    return [{base: fleet.cost(replace(spec, base=base)).peak_bytes for base in BASES} for spec in specs]


@pytest.fixture(scope="module")
def memory(peaks):
    """So much that clients 1 to 4 have room for 32, 16, 4 and 16 bits, to the byte."""
    return [peaks[0]["fp32"], peaks[1]["fp32"] - 1, peaks[2]["bf16"] - 1, peaks[3]["bf16"]]


@pytest.fixture(scope="module")
def whole(weights, memory, tmp_path_factory):
    """A run whose clients have each form of the base; tests only read it."""
    return finish(made(weights, tmp_path_factory.mktemp("whole") / "run", BASES, *memory))


def held(run):
    """The form in which each client that was merged held the base."""
    return {int(row["client"]): row["spec"].rpartition(" on ")[2] for row in run.rows() if row["outcome"] == "merged"}


def adapters(run):
    state = checkpoint_reader.load(run.folder).state_dict
    return {name: value for name, value in state.items() if ".lora_" in name}


def test_each_client_has_what_its_memory_allows_and_the_plan_says_so(weights, memory, whole, tmp_path):
    experiment, run = made(weights, tmp_path / "run", BASES, *memory), whole
    assert held(run) == {1: "fp32", 2: "bf16", 3: "nf4", 4: "bf16"}
    found = predict(World(experiment), experiment.algorithm)
    assert found.bases == held(run) and found.time_s == pytest.approx(run.summary["time_s"], rel=1e-9)
    assert {row["outcome"] for row in run.rows()} <= {"merged", "unused"}
    assert equal_replay(experiment, run)
    a_rank = 4 * 2 * sum((64 + 64, 64 + 32, 64 + 32, 64 + 64, 64 + 128, 64 + 128, 128 + 64))  # as with one form
    sent = {(int(row["client"]), int(row["bytes_up"])) for row in run.rows() if row["outcome"] == "merged"}
    assert sent == {(client, a_rank * 8 >> (client - 1)) for client in (1, 2, 3, 4)}


def test_a_plan_shows_the_peak_with_each_form_and_what_each_device_has(weights, memory, tmp_path):
    plan = make_plan(made(weights, tmp_path / "run", BASES, *memory), [], 8)
    whole, devices = (
        plan.to_json()["submodels"][0],
        show.text(plan, 140, terminal=False).partition("Seconds per task")[2],
    )
    assert (
        list(whole["peaks"]) == list(BASES) and whole["peak_bytes"] == whole["peaks"]["fp32"] > whole["peaks"]["bf16"]
    )
    cells = {words[0]: words[6] for words in map(str.split, devices.splitlines()) if words and "device-" in words[0]}
    assert cells == {"device-1": "fp32", "device-2": "bf16", "device-3": "nf4", "device-4": "bf16"}


def test_where_all_are_small_it_is_the_run_with_nf4_everywhere_to_the_bit(weights, peaks, tmp_path):
    small = [one["nf4"] for one in peaks]
    several = finish(made(weights, tmp_path / "several", BASES, *small))
    alone = finish(made(weights, tmp_path / "alone", "nf4", *small))
    assert set(held(several).values()) == {"nf4"} and len(fingerprints(several)) >= 8
    assert fingerprints(several) == fingerprints(alone)
    one, other = adapters(several), adapters(alone)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long("test_where_all_are_small_it_is_the_run_with_nf4_everywhere_to_the_bit")
def test_where_all_have_room_it_is_the_run_with_fp32_everywhere_to_the_bit(weights, tmp_path):
    several, alone = (finish(made(weights, tmp_path / str(base), base)) for base in (BASES, "fp32"))
    assert set(held(several).values()) == {"fp32"}
    assert fingerprints(several) == fingerprints(alone) and several.digest == alone.digest


@pytest.mark.long("tests/conformance/test_lora.py::test_merges_of_products_give_the_same_model_on_both_clocks")
def test_both_clocks_give_the_same_model(weights, memory, tmp_path):
    simulated, _ = on_both_clocks(made(weights, tmp_path / "simulated", BASES, *memory), tmp_path / "real")
    assert set(held(simulated).values()) == set(BASES)


@pytest.mark.quick_cases("pool")
@pytest.mark.parametrize(
    ("run", "fields"),
    [(finish, {"workers": 2}), (finish, {"batch_clients": 4}), (executors.over_ranks, {})],
    ids=["pool", "cohorts", "ranks"],
)
def test_every_executor_gives_the_same_model(weights, memory, whole, tmp_path, run, fields):
    other = run(made(weights, tmp_path / "other", BASES, *memory, **fields))
    assert other.digest == whole.digest and fingerprints(other) == fingerprints(whole)


def test_a_resumed_run_gives_the_same_model(weights, memory, whole, tmp_path, monkeypatch):
    assert set(held(whole).values()) == set(BASES)
    cut = made(weights, tmp_path / "cut", BASES, *memory, checkpoint_every=1)
    with crash(monkeypatch, 5):
        simulate(cut)
    assert finish(replace(cut, output=None, resume=cut.output)).digest == whole.digest


@pytest.mark.long(
    "tests/conformance/test_lora.py::test_a_client_whose_frozen_base_differs_is_refused_and_the_others_go_on"
)
def test_a_client_whose_four_bits_are_other_ones_is_never_merged(weights, memory, tmp_path):
    def before(rank):
        if rank == 3:
            import model_zoo.nf4

            model_zoo.nf4.BLOCK = 32

    experiment = made(weights, tmp_path / "run", BASES, *memory)
    in_rounds = fed_avg(submodel=experiment.algorithm.select)  # which wait for client 3
    with ranks(replace(experiment, algorithm=in_rounds), before) as fleet:
        run = fleet.serve()
    assert run.summary["updates_merged"] >= 8 and held(run) == {1: "fp32", 2: "bf16", 4: "bf16"}
    assert set(run.summary["updates_refused"]) == {"other-base"}
