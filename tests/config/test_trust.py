"""A config that somebody else wrote: every form in which it could choose code, a file or a repository is refused."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from raafl.config.argv import shipped
from raafl.config.experiment import field_types, marked
from raafl.config.parse import load_run, parse
from raafl.config.shared import sections
from raafl.config.trust import _TEXTS, REACHES, from_server, imports_only, of_folder, paths, registry
from raafl.errors import BadInput, RunFailed

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CONFIG = yaml.safe_load(QUICKSTART.read_text())
SYSTEM = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}
TEXT = json.dumps(SYSTEM)
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "PWNED"]}}
MLP = CONFIG["model"]


def model(**args):
    return {"model": {"class_path": "model_zoo.MLP", "init_args": args}}


def hugging(**args):
    return {"model": {"class_path": "model_zoo.HFCausalLM", "init_args": args}}


def method(**args):
    return {"algorithm": {"class_path": "raafl.fed_raa", "init_args": args}}


def texts(**args):
    return {"data": {"class_path": "raafl.data.SST2", "init_args": {"tokenizer": "words", **args}}}


HOSTILE = {
    "a table": {"model": SYSTEM},
    "a path": {"data": "shutil.rmtree"},
    "a text": {"model": TEXT},
    "a text for data": {"data": TEXT},
    "a text for the algorithm": {"algorithm": TEXT},
    "a text for the partition": {"partition": TEXT},
    "a text in an argument": model(hidden=TEXT),
    "a text in a list": model(hidden=[TEXT]),
    "a table in an argument": model(lr=POPEN),
    "a select": method(submodel=POPEN),
    "a select as text": method(submodel=TEXT),
    "in a select": method(submodel={"class_path": "raafl.parts.Rated", "init_args": {"rates": POPEN}}),
    "in the keys of rates": method(submodel={"class_path": "raafl.parts.Rated", "init_args": {"rates": {TEXT: 1.0}}}),
    "class_path among rates": method(
        submodel={"class_path": "raafl.parts.Rated", "init_args": {"rates": {"class_path": 1}}}
    ),
    "re-exported by raafl": {
        "model": {"class_path": "raafl.runtime.supervisor.subprocess.Popen", "init_args": {"args": ["id"]}}
    },
    "re-exported by the cli": {"model": {"class_path": "raafl.commands.cli.os.system", "init_args": {"command": "id"}}},
    "re-exported by the zoo": {"model": {"class_path": "model_zoo.hub.os.system", "init_args": {"command": "id"}}},
    "a prefix": {"model": {"class_path": "raaflish.Model"}},
    "raafl's, of another kind": {"model": {"class_path": "raafl.data.Digits"}},
    "raafl's, but no part": {"model": {"class_path": "raafl.runtime.run.simulate"}},
    "a part's method": {
        "model": {"class_path": "model_zoo.MLP.load_from_checkpoint", "init_args": {"checkpoint_path": "x"}}
    },
    "a stand-in of Python's": {"model": {"class_path": "raafl.api.python_objects.Module", "init_args": {"given": "x"}}},
    "a class path that is no text": {"model": {"class_path": ["os.system"]}},
    "a class path with a line break": {"model": {"class_path": "model_zoo.MLP\n"}},
    "more beside the class path": {"model": {**MLP, "dict_kwargs": {"x": 1}}},
    "a config's path": {"model": "server.yaml"},
    "a config's path for a section": {"train": "train.yaml"},
    "a class for a section": {"train": {"class_path": "os.system", "init_args": {"command": "id"}}},
    "an unknown argument": model(**{"hidden.class_path": "os.system"}),
    "a device": {"devices": [{"name": "x", "flops_per_s": POPEN}]},
    "a device of another class": {"devices": [{"class_path": "os.system", "init_args": {"command": "id"}}]},
    "a device named as text": {"devices": [{"name": TEXT}]},
    "a device file": {"devices": "/etc/passwd"},
    "the devices as text": {"devices": f"[{TEXT}]"},
    "compressors": {"compress": {"down": TEXT}},
    "a precision": {"fabric": {"precision": TEXT}},
    "an accelerator": {"fabric": {"accelerator": "my.accelerator"}},
    "memory": {"memory": TEXT},
    "a wait": {"waits": {"alone_s": TEXT}},
    "a seed": {"seed": TEXT},
    "a truth for a number": {"clients": True},
    "too many clients": {"clients": 10**12},
    "too many threads": {"threads": 10**6},
    "a root": {"data": {"class_path": "raafl.data.MNIST", "init_args": {"root": "/home/me/.ssh"}}},
    "a data set's path": {"data": {"class_path": "raafl.data.HuggingFace", "init_args": {"path": "me/evil"}}},
    "a tokenizer of the hub": texts(tokenizer="me/evil"),
    "a tokenizer's folder": texts(tokenizer="/tmp/evil"),
    "a tokenizer out of its package": texts(tokenizer="package:torch/../../../../tmp"),
    "a package with a parent": texts(tokenizer="package:evil.module/x"),
    "a model of the hub": hugging(name_or_path="me/evil"),
    "a model's folder": hugging(name_or_path="../evil"),
    "remote code": hugging(name_or_path="package:x/y", architecture={"trust_remote_code": True}),
    "remote code below": hugging(architecture={"model_type": "llama", "a": {"trust_remote_code": True}}),
    "an auto map": hugging(architecture={"model_type": "llama", "auto_map": {"AutoModel": "me/evil--m.M"}}),
    "a kernel of the hub": hugging(architecture={"model_type": "llama", "attn_implementation": "me/kernel"}),
    "a kernel by another name": hugging(architecture={"model_type": "llama", "experts_implementation": "flash"}),
    "a model that fetches kernels": hugging(architecture={"model_type": "yoso"}),
    "a quantisation": hugging(architecture={"model_type": "llama", "quantization_config": {"load_in_8bit": True}}),
    "another's file": hugging(architecture={"model_type": "llama", "gguf_file": 1}),
    "too many of a device": {"devices": [{"name": "a100", "count": 10**12}]},
    "a name that steers a terminal": model(**{"a\x1b]0;x\x07": 3}),
    "a backbone of the hub": hugging(architecture={"model_type": "timm_wrapper", "num_labels": 2}),
    "a class in an architecture": hugging(architecture={"x": POPEN}),
    "a class in a list of it": hugging(architecture={"x": [POPEN]}),
    "a cache": hugging(architecture={"model_type": "llama", "cache_dir": "/home/me"}),
    "adapters": hugging(architecture={"model_type": "llama"}, lora={"target_modules": "(a+)+$"}),
    "a memory folder": {
        "algorithm": {"class_path": "raafl.ram_fed", "init_args": {"memory": "disk", "memory_folder": "/home/me"}}
    },
}


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path, monkeypatch):
    """A folder with a module that leaves a mark when it is imported; nothing ever does."""
    (tmp_path / "evil.py").write_text("open('PWNED', 'w')\ndef make(**_): open('PWNED', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    assert not (tmp_path / "PWNED").exists()
    assert not {"evil", "antigravity"} & (set(sys.modules) - before)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_s_config_is_names_and_plain_values(name):
    with pytest.raises(RunFailed, match=r"^the server's config is refused: .*: obtain the config yourself") as refused:
        from_server(yaml.safe_dump({**CONFIG, **HOSTILE[name]}))
    (line,) = str(refused.value).splitlines()
    assert len(line) < 400 and line.isascii() and line.isprintable()


HOSTILE_YAML = {
    "an alias": "x: &it {class_path: os.system, init_args: {command: touch PWNED}}\nmodel: *it\n",
    "an alias of a text": f"x: &it {TEXT!r}\nmodel: *it\n",
    "an alias in an argument": "x: &it [os.system]\nmodel: {class_path: model_zoo.MLP, init_args: {hidden: *it}}\n",
    "a merge": "x: &it {class_path: os.system}\nmodel: {<<: *it}\n",
    "an object of Python": "model: !!python/object/apply:os.system ['touch PWNED']\n",
    "a name of Python": "model: !!python/name:os.system\n",
    "a block of text": "model: |\n  class_path: os.system\n  init_args: {command: touch PWNED}\n",
    "the same field twice": "model: {class_path: model_zoo.MLP}\nmodel: {class_path: os.system}\n",
    "binary": "model: !!binary b3Muc3lzdGVt\n",
    "a date": "seed: 2020-01-01\n",
    "a loop": "model: &it {class_path: model_zoo.MLP, init_args: {hidden: [*it]}}\n",
    "a text for all": json.dumps(json.dumps(CONFIG)),
    "a list": "[]",
    "nothing": "",
    "not YAML": "model: [",
    "very deep": "model: " + "[" * 5_000,
    "a very long number": "seed: " + "9" * 5000,
    "a number in sixteens": "seed: 0x" + "f" * 5000,
    "laughs": "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "merged laughs": "a: &a {x: 1}\n"
    + "".join(
        f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_no_form_of_yaml_hides_anything(name):
    with pytest.raises(RunFailed, match=r"^the server's config is refused: .*: obtain the config yourself"):
        from_server(HOSTILE_YAML[name])


def test_what_a_client_does_not_use_it_never_sees():
    unused = {
        "output": "/home/me",
        "resume": "/home/me",
        "logger": SYSTEM,
        "name": TEXT,
        "progress": TEXT,
        "workers": TEXT,
        "config": "/tmp/evil.yaml",
        "model.class_path": "os.system",
        "privacy": {"seed_file": "/etc/passwd"},
        "guard": SYSTEM,
    }
    taken = yaml.safe_load(from_server(yaml.safe_dump({**CONFIG, **unused})))
    assert set(taken) <= {*marked("sent_to_clients"), "max_updates"} and taken == yaml.safe_load(
        from_server(QUICKSTART.read_text())
    )


def test_an_alias_of_plain_values_is_followed():
    text = "x: &it [10, 20]\nmodel: {class_path: model_zoo.MLP, init_args: {hidden: *it}}\n"
    assert yaml.safe_load(from_server(text))["model"]["init_args"] == {"hidden": [10, 20]}


@pytest.mark.quick_cases("quickstart", "cifar10-timely-fl")
@pytest.mark.parametrize("name", ["quickstart", "cifar10-timely-fl", "fed-buff-rolling", "ram-fed", "sst2-minilm-lora"])
def test_every_shipped_config_can_be_taken_from_a_server_and_from_a_run_folder(name, tmp_path):
    text = parse("serve", ["--config", str(shipped()[name])]).config_yaml
    taken = parse("join", [], config_yaml=from_server(text))
    assert sections(taken.config_yaml) == sections(text)
    (tmp_path / "config.yaml").write_text(text)
    assert repr(yaml.safe_load(of_folder(tmp_path, trusted=False))) == repr(yaml.safe_load(text))  # NaN and all


def test_every_text_that_a_server_may_give_belongs_to_a_parameter():
    owners = {entry.name: entry.find() for table in registry().values() for entry in table.values()}
    from model_zoo.lora import LoRA
    from raafl.config.experiment import Experiment
    from raafl.devices import Device
    from raafl.local.train import FabricOptions

    owners |= {cls.__name__: cls for cls in (LoRA, Device, FabricOptions, Experiment)}
    for rule in _TEXTS:
        owner, name = rule.split(".")
        assert name in inspect.signature(owners[owner]).parameters, rule


def test_each_file_that_a_config_could_have_written_is_listed():
    """Beside what a run folder is: `output`, `resume` and `push_to_hub`, which a submitted config loses."""
    owners = {entry.name: entry.find() for table in registry().values() for entry in table.values()}
    owners |= {hint.__name__: hint for hint in field_types().values() if is_dataclass(hint)}
    named = {f"{owner}.{name}" for owner, factory in owners.items() for name in inspect.signature(factory).parameters}
    assert {name for name in named if name.endswith(("_file", "_folder", "_dir"))} == {
        name for name, does in REACHES.items() if does == "write"
    }


def test_the_second_fence_lets_nothing_else_through_and_is_taken_down_again():
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--it", type=type)
    with imports_only(paths()), pytest.raises(Exception, match="denied by the '\\*' entry"):
        parser.parse_args(["--it", "collections.OrderedDict"])
    assert parser.parse_args(["--it", "collections.OrderedDict"]).it.__name__ == "OrderedDict"


def test_nobody_s_config_names_what_runs_commands(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "model": SYSTEM}))
    with pytest.raises(BadInput, match=r"model.*os\.system"):
        parse("simulate", ["--config", "c.yaml"])


FOREIGN = {
    **{
        name: HOSTILE[name]
        for name in (
            "a table",
            "a path",
            "a text",
            "a text in an argument",
            "a select",
            "re-exported by raafl",
            "a device",
            "a class in a list of it",
            "a config's path",
        )
    },
    "a module beside it": {"model": {"class_path": "evil.make"}},
    "a logger": {"logger": {"class_path": "evil.Logger"}},
    "a logger's text": {"logger": TEXT},
    "where a logger writes": {"logger": {"class_path": "csv", "init_args": {"save_dir": "/home/me"}}},
    "where a logger sends": {"logger": {"class_path": "mlflow", "init_args": {"tracking_uri": "https://evil"}}},
    "whose account a logger uses": {"logger": {"class_path": "wandb", "init_args": {"entity": "evil"}}},
    "a kernel": hugging(architecture={"model_type": "bert", "attn_implementation": "evil/kernel"}),
    "settings of a stand-in": {
        "model": {
            "class_path": "raafl.api.python_objects.Module",
            "init_args": {"given": "x", "settings": {"y": POPEN}},
        }
    },
    "consent": {"trust_config": True},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_run_folder_names_more_than_raafl_s_own_with_consent_only(name, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **FOREIGN[name]}))
    with pytest.raises(BadInput, match=r"^the config of .* is refused: .*--trust_config"):
        of_folder(tmp_path, trusted=False)
    for command in ("simulate", "fit", "serve", "join"):
        with pytest.raises(BadInput, match=r"--trust_config"):
            parse(command, ["--resume", str(tmp_path)])
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert yaml.safe_load(of_folder(tmp_path, trusted=True)) == {**written, "rules": 1}


def test_with_consent_a_class_of_one_s_own_is_found(tmp_path):
    (tmp_path / "mine_of_trust.py").write_text("from model_zoo import MLP\nclass Mine(MLP): pass\n")
    config = {**CONFIG, "model": {**MLP, "class_path": "mine_of_trust.Mine"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(BadInput, match=r"model is 'mine_of_trust.Mine', which is not raafl's own.*--trust_config"):
        load_run(tmp_path, trusted=False)
    assert type(load_run(tmp_path, trusted=True).model()).__name__ == "Mine"
    assert "mine_of_trust" in sys.modules and sys.modules.pop("mine_of_trust")


def test_one_s_own_options_are_one_s_own(tmp_path):
    """What the user names on the command line beside a config from elsewhere is imported as ever."""
    (tmp_path / "data_of_trust.py").write_text("from raafl.data import Digits\nclass Mine(Digits): pass\n")
    found = parse("join", ["--data", "data_of_trust.Mine"], config_yaml=from_server(QUICKSTART.read_text()))
    assert type(found.experiment.data()).__name__ == "Mine" and sys.modules.pop("data_of_trust")


def test_paths_may_stand_in_a_run_folder(tmp_path):
    config = {
        **CONFIG,
        "data": {"class_path": "raafl.data.MNIST", "init_args": {"root": "/data/mnist", "batch_size": 8}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "output": "runs/x", "logger": ["csv", "wandb"]}))
    assert load_run(tmp_path, trusted=False).data().root == Path("/data/mnist")


def test_every_parameter_s_type_is_one_that_is_checked():
    """A new kind of annotation would be refused for every value: it belongs into `_Check.fits`."""
    from raafl.config.trust import _Check

    check = _Check(on_this_machine=True)
    for table in registry().values():
        for entry in table.values():
            factory = entry.find()
            hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
            for name, parameter in inspect.signature(factory).parameters.items():
                if isinstance(parameter.default, bool | int | float | str):
                    assert check.fits(parameter.default, hints[name], name, f"{entry.name}.{name}"), (entry, name)
                assert not get_args(hints[name]) or hints[name] is not object
