"""Reading experiments from YAML and options; what is wrong becomes one line with the field, the value and the remedy."""

from __future__ import annotations

import copy
import json
import os
from concurrent.futures import ThreadPoolExecutor

import jsonargparse
import pytest
import yaml

from raafl.config.argv import expand_algorithm, expand_trainer
from raafl.config.parse import config_first, expand_short, load_experiment, make_parser, parse
from raafl.config.shared import for_clients
from raafl.config.trust import of_text
from raafl.errors import BadInput
from raafl.plain_yaml import dump_yaml
from raafl.runtime.setup import limits_of
from tests.habits.source import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture
def load(tmp_path):
    """A function that loads the quick start with a second file over it, given as text."""

    def overlaid(text, *options):
        (tmp_path / "over.yaml").write_text(text)
        argv = ["--config", str(QUICKSTART), "--config", str(tmp_path / "over.yaml"), *options]
        return parse("simulate", argv).experiment

    return overlaid


# ---- what is right ----


def test_the_quick_start_means_what_it_says():
    experiment = load_experiment(QUICKSTART)
    assert (experiment.clients, experiment.seed, experiment.max_updates) == (4, 0, 400)
    assert (experiment.algorithm.name, experiment.train.num_epochs) == ("fed_raa", 2)
    assert [profile.name for profile in experiment.profiles()] == ["fast", "middling", "slow", "slowest"]
    assert type(experiment.partition).__name__ == "Dirichlet"
    model = experiment.model()
    assert sum(p.numel() for p in model.parameters()) == 64 * 200 + 200 + 200 * 10 + 10
    assert experiment.model() is not model, "each call makes a new one"
    assert experiment.data().batch_size == 32


def test_a_later_file_and_then_options_win(load):
    experiment = load("seed: 5\nclients: 3\ntrain: {num_steps: 7}\n", "--clients", "2")
    assert (experiment.seed, experiment.clients) == (5, 2)
    assert (experiment.train.num_epochs, experiment.train.num_steps) == (2, 7)  # steps are used where both are given


@pytest.mark.parametrize(
    ("options", "given", "is_set"),
    [
        (["--algorithm", "fed_async"], "alpha", 0.25),  # fed_async has an alpha too: kept
        (["--algorithm", "fed_async", "--algorithm.alpha", "0.5"], "alpha", 0.5),
        (["--algorithm=raafl.fed_async"], "alpha", 0.25),
    ],
)
def test_another_algorithm_keeps_what_both_take_and_drops_the_rest(load, options, given, is_set):
    text = "algorithm: {class_path: raafl.fed_raa, init_args: {alpha: 0.25, fragments: 2}}\n"
    experiment = load(text, *options)
    assert experiment.algorithm.name == "fed_async"
    assert getattr(experiment.algorithm.merge, given) == is_set


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("algorithm: fed_buff", "fed_buff"),
        ("algorithm: auto", "auto"),
        ("algorithm: {class_path: auto, init_args: {methods: [fed_avg]}}", "auto"),
        ("algorithm: {class_path: fed_raa, init_args: {fragments: 4}}", "fed_raa"),
    ],
)
def test_an_algorithm_may_have_its_short_name(text, name, load):
    """In a file as on the command line; the text of the config that is kept has its path."""
    assert load(text + "\n").algorithm.name == name


def test_what_is_called_algorithm_elsewhere_keeps_its_value():
    """Of options, only `--algorithm` has short names: a table that an option gives is not a config."""
    load = jsonargparse.get_loader(make_parser("simulate").parser_mode)
    assert load("algorithm: fed_avg") == {"algorithm": "fed_avg"}
    assert load("algorithm: fed_avg", path="a.yaml") == {"algorithm": "raafl.fed_avg"}


def test_an_algorithm_of_the_users_own_by_path(load, tmp_path, monkeypatch):
    (tmp_path / "own_method.py").write_text(
        "from raafl import Algorithm, fed_avg\n\n\ndef quorum(size: int = 2) -> Algorithm:\n"
        '    """Make it.\n\n    Args:\n        size: of the cohort.\n    """\n    return fed_avg(cohort=size)\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = load("algorithm: {class_path: own_method.quorum, init_args: {size: 3}}\n")
    assert experiment.algorithm.sample.cohort == 3


def test_the_kept_text_is_the_whole_config_and_loads_again(tmp_path):
    parsed = parse("simulate", ["--config", str(QUICKSTART), "--target", "accuracy=0.9", "--max_time", "2h"])
    (tmp_path / "kept.yaml").write_text(parsed.config_yaml)
    again = parse("simulate", ["--config", str(tmp_path / "kept.yaml")])
    assert again.config_yaml == parsed.config_yaml
    assert limits_of(again.experiment, 1) == limits_of(parsed.experiment, 1)
    assert limits_of(again.experiment, 1).max_time_s == 7200.0


TEXTS = (
    "no",
    "yes",
    "1e-3",
    "1E5",
    "2.5e3",
    "0x10",
    "null",
    "~",
    "",
    "2026-11-29",
    "1_000",
    "12:30",
    "a: b",
    "[1]",
    ".inf",
    "-",
    "017",
)


def test_texts_that_look_like_other_values_are_texts_again_in_the_kept_config(tmp_path, monkeypatch, capsys):
    """The kept text is what a replay and the clients read; what `--print_config` prints is made a config of one's own."""
    (tmp_path / "keeping.py").write_text(
        "from typing import Any\nfrom model_zoo import MLP\n\n\nclass Model(MLP):\n"
        "    def __init__(self, words: list[str], some: dict[str, Any], more: list[Any], plain: dict) -> None:\n"
        "        super().__init__()\n        self.given = words, some, more, plain\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    nested = {f"deep {num}": {"one": text, "list": [text, {"two": text}]} for num, text in enumerate(TEXTS)}
    given = {"words": list(TEXTS), "some": nested, "more": [list(TEXTS), nested], "plain": nested}
    config = {**yaml.safe_load(QUICKSTART.read_text()), "model": {"class_path": "keeping.Model", "init_args": given}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    parsed = parse("simulate", ["--config", str(tmp_path / "config.yaml")])
    assert parsed.experiment.model().given == tuple(given.values())
    with pytest.raises(SystemExit):
        parse("simulate", ["--config", str(tmp_path / "config.yaml"), "--print_config"])
    for kept in (
        capsys.readouterr().out,
        parsed.config_yaml,
        of_text(parsed.config_yaml, "ours", trusted=True),
        for_clients(parsed.config_yaml),
    ):
        tree = yaml.safe_load(kept)["model"]
        (tmp_path / "kept.yaml").write_text(dump_yaml({**config, "model": tree}))
        assert load_experiment(tmp_path / "kept.yaml").model().given == tuple(given.values())


def test_json_is_an_option_beside_the_fields():
    assert parse("simulate", ["--config", str(QUICKSTART), "--json"]).as_json
    assert not parse("simulate", ["--config", str(QUICKSTART)]).as_json


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--engine", "ray"], ["--engine.name", "ray"]),
        (["--engine=ray", "--strict"], ["--engine.name=ray", "--strict=true"]),
        (["--engine", "{name: ray}"], ["--engine", "{name: ray}"]),
        (["--engine.address", "auto", "--seed", "1"], ["--engine.address", "auto", "--seed", "1"]),
    ],
)
def test_an_engine_may_be_given_by_its_name(options, wanted):
    assert expand_short(options) == wanted


@pytest.mark.parametrize(
    ("options", "strict"),
    [([], False), (["--strict"], True), (["--strict", "--json"], True), (["--strict", "false"], False)],
)
def test_strict_needs_no_value(options, strict):
    assert parse("simulate", ["--config", str(QUICKSTART), *options]).experiment.strict is strict


@pytest.mark.parametrize("command", ["simulate", "fit"])
def test_every_field_of_an_experiment_is_an_option_with_a_text(command):
    from dataclasses import fields

    from raafl.config.experiment import Experiment

    actions = {action.dest: action for action in make_parser(command)._actions}
    for field in fields(Experiment):
        entries = [a for dest, a in actions.items() if dest == field.name or dest.startswith(f"{field.name}.")]
        assert any(len(entry.help or "") > 10 for entry in entries), field.name


# ---- what is wrong ----

WRONG = {
    "cliens: 4": "unknown field cliens: did you mean 'clients'?",
    "train: {num_epoch: 2}": "unknown field train.num_epoch: did you mean 'train.num_epochs'?",
    "waits: {join: 2}": "unknown field waits.join: did you mean 'waits.join_s'?",
    "train: 5": "train is 5: give its fields, as in --train.FIELD VALUE (see --help)",
    "train: {num_epochs: lots}": "train.num_epochs is 'lots': give a whole number or null",
    "clients: abc": "clients is 'abc': give a whole number",
    "emulate: perhaps": "emulate is 'perhaps': give true or false",
    "model: {class_path: model_zoo.MLP, init_args: {hiden: [200]}}": "unknown field model.hiden: did you mean 'hidden'?",
    "model: {class_path: model_zoo.MLP, init_args: {lr: high}}": "model.lr is 'high': give a number",
    "model: {class_path: model_zoo.MLP, init_args: {hidden: wide}}": (
        "model.hidden is 'wide': give a list of whole numbers, such as [200]"
    ),
    "model: {class_path: model_zoo.MPL}": "model is model_zoo.MPL, which does not exist: did you mean 'model_zoo.MLP'?",
    "model: {class_path: modelzoo.MLP}": (
        "model cannot be imported, there is no module 'modelzoo': did you mean 'model_zoo'?"
    ),
    "model: {class_path: torch.nn.Linear}": (
        "model is torch.nn.Linear, which makes no LightningModule: give one that does, such as model_zoo.MLP"
    ),
    "data: {class_path: raafl.data.Digit}": (
        "data is raafl.data.Digit, which does not exist: did you mean 'raafl.data.Digits'?"
    ),
    "data: {class_path: raafl.data.Digits, init_args: {batchsize: 1}}": (
        "unknown field data.batchsize: did you mean 'batch_size'?"
    ),
    "algorithm: {class_path: raafl.fed_rra}": (
        "algorithm is raafl.fed_rra, which does not exist: did you mean 'raafl.fed_raa'?"
    ),
    "algorithm: fed_avgg": "algorithm is raafl.fed_avgg, which does not exist: did you mean 'raafl.fed_avg'?",
    "algorithm: {class_path: fed_avgg}": "algorithm is raafl.fed_avgg, which does not exist: did you mean 'raafl.fed_avg'?",
    "algorithm: {class_path: fed_raa, init_args: {fragment: 3}}": "unknown field algorithm.fragment: did you mean 'fragments'?",
    "algorithm: {class_path: torch.nn.ReLU}": (
        "algorithm is torch.nn.ReLU, which makes no Algorithm: give one that does, such as raafl.fed_raa"
    ),
    "algorithm: {class_path: raafl.fed_raa, init_args: {fragment: 3}}": (
        "unknown field algorithm.fragment: did you mean 'fragments'?"
    ),
    "algorithm: {class_path: raafl.fed_raa, init_args: {fragments: [a, b]}}": (
        "algorithm.fragments is ['a', 'b']: give a whole number or a list of numbers"
    ),
    "algorithm: {class_path: raafl.fed_raa, init_args: {fragments: 9}}": (
        "fragments is 9: give 1 to 5 (the splits of Fed-RAA's Table 4), or a list of ratios such as [0.2, 0.3, 0.5]"
    ),
    "algorithm: {class_path: raafl.fed_opt, init_args: {optimizer: sgd}}": (
        "algorithm.optimizer is 'sgd': give one of adam, yogi, adagrad"
    ),
    "partition: {class_path: raafl.data.Dirichlet, init_args: {beta: 1}}": (
        "unknown field partition.beta: known: alpha, capped, min_samples, test_share, validation_share"
    ),
    "partition: {class_path: raafl.data.ClassesPerClient}": (
        "partition.num_classes is missing: give it in the config, or as --partition.num_classes VALUE"
    ),
    "devices: [{name: a, flop_per_s: 1.0e9}]": "unknown field devices.flop_per_s: did you mean 'flops_per_s'?",
    "devices: [{name: a, flops_per_s: fast}]": "devices.flops_per_s is 'fast': give a number",
    "devices: [a, b]": ("devices is 'a': give a table of fields, such as {name: slow, flops_per_s: 1.0e9}"),
    "devices: [{name: a, flops_per_s: -1.0}]": (
        "device profile 'a': flops_per_s is -1.0; it must be a number above 0, 1e-06 to 1e+24 "
        "(measure it with raafl plan --measure)"
    ),
    "devices: [{name: a, flops_per_s: 1.0e9, count: 0}]": "device 'a': count is 0; it must be a whole number, 1 or more",
}


NOWHERE = (  # what a factory says itself, and what no line says
    "algorithm: {class_path: raafl.fed_raa, init_args: {fragments: 9}}",
    "partition: {class_path: raafl.data.ClassesPerClient}",
)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_config_is_one_clear_line_with_its_place(text, load, tmp_path):
    with pytest.raises(BadInput) as error:
        load(text)
    place = f" ({tmp_path / 'over.yaml'}, line 1)" if text not in NOWHERE else ""
    assert str(error.value) == WRONG[text] + place


NO_TABLE = "write fields, with lines such as `clients: 4`"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("name: x\nclients: [4\n", "is not valid YAML: line 3, column 1: expected ',' or ']'"),
        ("seed: 1\n\tclients: 2\n", "is not valid YAML: line 2, column 1: found character '\\t'"),
        ("clients: 2\nseed: 1\nclients: 3\n", "is not valid YAML: line 3, column 1: 'clients' is given twice"),
        ("", f"holds nothing: {NO_TABLE}"),
        ("just text", f"holds 'just text': {NO_TABLE}"),
        ("- a\n- b\n", f"holds ['a', 'b']: {NO_TABLE}"),
        (b"\xff\xfe\x00\x01", "is not text in UTF-8 (byte 0xff at position 0): save it as UTF-8"),
    ],
)
def test_a_file_that_is_no_config(content, says, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput) as error:
        load_experiment(path)
    assert str(error.value).startswith(f"config {path} {says}")
    assert "\n" not in str(error.value)


def test_a_config_that_is_not_there_names_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for given in ("configs/quickstar.yaml", "quickstart.yaml"):
        with pytest.raises(BadInput) as error:
            load_experiment(given)
        assert str(error.value) == (
            f"config is '{given}', which does not exist: did you mean 'configs/quickstart.yaml'?"
        )
    with pytest.raises(BadInput, match="config is 'configs', which is a folder: "):
        load_experiment("configs")


def test_fields_without_a_default_are_named_together(tmp_path):
    (tmp_path / "bare.yaml").write_text("clients: 4\n")
    with pytest.raises(
        BadInput, match=r"^model, data, algorithm are missing: give --config FILE with them, or --model VALUE"
    ):
        load_experiment(tmp_path / "bare.yaml")


def test_a_module_that_cannot_import_what_it_needs_is_not_called_misspelt(load, tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput) as error:
        load("model: {class_path: needy.Net}")
    assert str(error.value) == (
        "model cannot be imported, there is no module 'a_package_that_is_not_there': "
        f"run the command in the folder that holds it, or install the package ({tmp_path / 'over.yaml'}, line 1)"
    )


# ---- how a command line is read ----


def test_names_of_algorithms_become_paths():
    assert expand_algorithm(["--seed", "1", "--algorithm", "fed_avg"]) == ["--seed", "1", "--algorithm=raafl.fed_avg"]
    assert expand_algorithm(["--algorithm=fed_avg"]) == ["--algorithm=raafl.fed_avg"]
    assert expand_algorithm(["--algorithm", "mine.method"]) == ["--algorithm=mine.method"]
    assert expand_algorithm(["--algorithm.alpha", "1"]) == ["--algorithm.alpha", "1"]
    for argv in (["--algorithm"], ["--algorithm", "--seed"], ["--algorithm="]):
        with pytest.raises(BadInput, match="--algorithm needs a name: ada_vit, "):
            expand_algorithm(argv)


def test_options_of_a_trainer_are_those_of_the_model_and_the_data_that_come_from_it():
    argv = ["--seed", "1", "--trainer", "mine.make", "--trainer.lr=0.1", "--trainer.init_args.layers", "2"]
    made = "raafl.local.from_trainer"
    assert expand_trainer(argv) == [
        *("--seed", "1", f"--model={made}.Model", "--model.trainer=mine.make"),
        *(f"--data={made}.Data", "--data.trainer=mine.make"),
        *("--model.arguments.lr=0.1", "--data.arguments.lr=0.1"),
        *("--model.arguments.layers=2", "--data.arguments.layers=2"),
    ]
    for argv in (["--trainer"], ["--trainer.lr", "--seed", "1"]):
        with pytest.raises(BadInput, match=f"{argv[0]} needs a value"):
            expand_trainer(argv)


def test_options_of_a_model_or_of_data_beside_a_trainer_are_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("{trainer: math.pi, algorithm: fed_avg, clients: 2, max_updates: 1}")
    for name, path in (("data", "raafl.data.Digits"), ("model", "model_zoo.MLP")):
        with pytest.raises(BadInput, match=f"^trainer and {name} are both given: leave {name} out"):
            load_experiment(tmp_path / "c.yaml", f"--{name}", path)


def test_files_come_first_in_their_own_order(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for path in (first, second):
        path.write_text("seed: 1\n")
    argv = ["--seed", "3", "--config", str(first), "--json", f"--config={second}"]
    assert config_first(argv) == [f"--config={first}", f"--config={second}", "--seed", "3", "--json"]
    with pytest.raises(BadInput, match="--config needs a file"):
        config_first(["--config"])


def test_a_list_of_devices_is_not_copied_for_each_of_them(tmp_path, monkeypatch):
    """A thousand devices took minutes, and as long in each command on the run's folder."""
    num_copied, copied = [0], copy._deepcopy_dispatch[list]

    def counting(items, memo, deepcopy=copy.deepcopy):
        num_copied[0] += len(items)
        return copied(items, memo, deepcopy)

    monkeypatch.setitem(copy._deepcopy_dispatch, list, counting)
    devices = [{"name": f"d{number}", "flops_per_s": 1e9 + number} for number in range(20)]
    config = {**yaml.safe_load(QUICKSTART.read_text()), "devices": devices}
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(config))
    found = parse("simulate", ["--config", str(tmp_path / "many.yaml")])
    assert [(one.name, one.flops_per_s) for one in found.experiment.devices] == [tuple(one.values()) for one in devices]
    assert [one["name"] for one in yaml.safe_load(found.config_yaml)["devices"]] == [one["name"] for one in devices]
    assert num_copied[0] < 20 * len(devices)


@pytest.mark.parametrize(
    ("options", "clients"),
    [
        ([], 10),
        (["--devices", "[{name: a, flops_per_s: 1e9, count: 3}, {name: b, flops_per_s: 1e9}]"], 4),
        (["--devices", "[{name: a, flops_per_s: 1e9, count: 3}]", "--clients", "6"], 6),
        (["--devices", "fleet:four-classes"], 4),
        (["--devices", "nowhere.csv"], 10),  # named by the check
    ],
)
def test_without_clients_there_are_as_many_as_devices(options, clients):
    parts = [
        "--model",
        "model_zoo.MLP",
        "--model.in_features",
        "64",
        "--model.num_classes",
        "10",
        "--data",
        "raafl.data.Digits",
    ]
    found = parse("simulate", [*parts, "--algorithm", "fed_avg", *options])
    assert found.experiment.clients == clients == yaml.safe_load(found.config_yaml)["clients"]


def test_configs_may_be_parsed_in_several_threads():
    """jsonargparse changes the working directory, and raafl its functions and settings: one thread must not end another's."""
    from jsonargparse import _common, _typehints

    def state():
        return dict(_common.parsing_settings), _typehints.deepcopy, os.getcwd()

    before, text = state(), QUICKSTART.read_text()
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda seed: parse("simulate", [f"--seed={seed}"], config_yaml=text).experiment.seed, range(3))
        assert list(found) == [0, 1, 2]
    assert state() == before
