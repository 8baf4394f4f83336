"""What is wrong with a config, and where it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithm import Algorithm, Full, Sample
from raafl.algorithms import fed_avg
from raafl.config.messages import place_of_field, yaml_line
from raafl.config.parse import parse
from raafl.data import Partition
from raafl.errors import BadInput
from tests.habits.source import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def refused(*argv):
    with pytest.raises(BadInput) as error:
        parse("simulate", ["--config", QUICKSTART, *argv])
    return str(error.value)


def test_the_line_of_a_field_in_the_last_config_that_has_it(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("clients: 2\ndata:\n  class_path: x\n")
    second.write_text("clients: 3\n")
    argv = ["simulate", "--config", str(first), f"--config={second}"]
    assert place_of_field("data", argv) == f" (data is in {first}, line 2)"
    assert place_of_field("data", [*argv, "--data.path", "y"]) == ""
    assert place_of_field("model", argv) == "" == place_of_field(None, argv)


def test_the_line_of_an_argument_and_of_a_field_of_a_list(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model:\n  class_path: x\n  init_args:\n    lr: 1\ndevices:\n- {name: a}\n- name: b\n  count: 0\n")
    assert [yaml_line(str(file), name) for name in ("model.lr", "devices.count", "devices.x", "seed")] == [
        4,
        8,
        5,
        None,
    ]
    assert yaml_line(str(tmp_path / "none.yaml"), "seed") is None


def test_every_problem_of_every_file_and_option_is_said(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "seed: x\ntrain:\n  num_epochs: q\nmodel:\n  class_path: model_zoo.MLP\n  init_args:\n    lr: high\n"
    )
    assert refused("--config", str(file), "--clients", "many", "--algorithm.fragment=3").splitlines() == [
        f"seed is 'x': give a whole number ({file}, line 1)",
        f"train.num_epochs is 'q': give a whole number or null ({file}, line 3)",
        f"model.lr is 'high': give a number ({file}, line 7)",
        "clients is 'many': give a whole number",
        "unknown field algorithm.fragment: did you mean 'fragments'?",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cliens", "4"], "unknown option --cliens: did you mean '--clients'?"),
        (["--train.num_epoch=4"], "unknown option --train.num_epoch: did you mean '--train.num_epochs'?"),
        (["--clients"], "--clients needs a value, as in --clients VALUE"),
        (["--json=5"], "--json takes no value: leave '5' out"),
        (["4"], "unexpected '4': an option starts with --, as in --clients 4"),
        (["--partition.alpha", "x"], "partition.alpha is 'x': give a number"),
        (["--model.hidden", "[a]"], "model.hidden is ['a']: give a list of whole numbers, such as [200]"),
        (["--train", "5"], "train is '5': give its fields, as in --train.FIELD VALUE (see --help)"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, says):
    assert refused(*options) == says


OWN = """
import enum
import model_zoo


class Colour(enum.Enum):
    red = 1


class Net(model_zoo.MLP):
    def __init__(self, colour: Colour = Colour.red, table: dict[str, int] | None = None, untyped=3, **more):
        super().__init__(**more)
"""


def test_a_class_of_the_users_own_with_types_of_its_own_and_arguments_of_its_base(tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for argument, says in {
        "colour: blue": "model.colour is 'blue': give a value of type Colour",
        "table: {a: x}": "model.table is {'a': 'x'}: give a table or null",
        "hiden: [3]": "unknown field model.hiden: did you mean 'hidden'?",
        "hidden: [x], untyped: y": "model.hidden is ['x']: give a list of whole numbers, such as [200]",
    }.items():
        (tmp_path / "a.yaml").write_text(f"model: {{class_path: own_net.Net, init_args: {{{argument}}}}}")
        assert refused("--config", str(tmp_path / "a.yaml")) == f"{says} ({tmp_path / 'a.yaml'}, line 1)"


CHEK = """
from raafl.core.algorithm import Select

class Wide(Select):
    def chek(self, fleet):
        return []
"""
ABSTRACT = """
from dataclasses import replace
import raafl
from raafl.core.algorithm import Algorithm, Select

class Wide(Select):
    pass

def wide() -> Algorithm:
    return replace(raafl.fed_avg(), select=Wide())
"""


@pytest.mark.parametrize(
    ("field", "source", "says", "line"),
    [
        ("algorithm", "def f(:\n", "cannot be imported: SyntaxError: invalid syntax", 1),
        ("model", "import math\n1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero", 2),
        ("model", "import json\njson.loads('x')\n", "cannot be imported: JSONDecodeError: Expecting value: line 1", 2),
        (
            "algorithm",
            CHEK,
            "cannot be imported: Wide has a method 'chek', which nothing calls: Select has no 'chek', did you",
            4,
        ),
        ("algorithm", ABSTRACT, "cannot be made: TypeError: Can't instantiate abstract class Wide with", 10),
    ],
    ids=["syntax", "division", "in a library", "misspelt", "abstract"],
)
def test_what_is_wrong_in_the_users_own_file(tmp_path, monkeypatch, field, source, says, line):
    name = tmp_path.name  # of this case alone, as no module is imported twice
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = refused(f"--{field}", f"{name}.wide")
    assert text.startswith(f"{field} is {name}.wide, which {says}") and "\n" not in text
    assert text.endswith(f" ({tmp_path / name}.py:{line})")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("steps_within_s abc", "algorithm.submodel.steps_within_s is 'abc': give a number or null"),
        ("selector leadin", "algorithm.submodel.selector is 'leadin': give one of leading, rolling, random, magnitude"),
        ("stepss 1", "unknown field algorithm.submodel.stepss: did you mean 'steps_within_s'?"),
        ("rates [1.0,2.0]", "a rate in rates is 2.0: give a number above 0, at most 1"),
    ],
)
def test_options_of_an_object_that_is_named_by_an_option(option, says):
    name, value = option.split()
    named = ("--algorithm", "fed_avg", "--algorithm.submodel", "raafl.parts.Rated")
    assert refused(*named, f"--algorithm.submodel.{name}", value) == says


def test_what_an_object_inside_another_says_of_its_values(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "algorithm:\n  class_path: raafl.fed_avg\n  init_args:\n    submodel: {class_path: raafl.parts.Rated}\n"
    )
    says = refused("--config", str(file), "--algorithm.submodel.init_args.rates", "7")
    assert "rates is 7" in says and "Union" not in says


def made() -> None:
    """Say that nothing is made."""


def unsaid():
    return made()


def forgot_return() -> Algorithm:
    fed_avg()


def makes_no_partition() -> Partition:
    return 3


def mixed_up() -> Algorithm:
    return replace(fed_avg(), sample=Full(), select=Sample())


@pytest.mark.parametrize(
    ("field", "function", "says"),
    [
        ("algorithm", "forgot_return", "returned None: let it return an instance of Algorithm"),
        ("partition", "makes_no_partition", "returned an object of type int: let it return an instance of Partition"),
    ],
)
def test_a_function_that_returns_something_else_than_it_says_is_refused(field, function, says):
    assert refused(f"--{field}", f"{__name__}.{function}") == f"{field} is {__name__}.{function}, which {says}"


def test_parts_of_an_algorithm_in_each_others_places_are_refused():
    parsed = parse("simulate", ["--config", QUICKSTART, "--algorithm", f"{__name__}.mixed_up"])
    with pytest.raises(BadInput) as error:
        parsed.experiment.check()
    assert str(error.value).splitlines() == [
        "algorithm is fed_avg, whose part `sample` is Full(): give an instance of Sample",
        "algorithm is fed_avg, whose part `select` is Sample(cohort=None, concurrency=None): give an instance of Select",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--algorithm", f"{__name__}.unsaid"],
            "which does not say what it makes: annotate it, as in `def unsaid(...) -> Algo",
        ),
        (["--algorithm", f"{__name__}.QUICKSTART"], "which is no class or function: give one, such as raafl.fed_raa"),
        (["--model", "{classpath: model_zoo.MLP, lr: 1}"], "unknown field model.classpath: did you mean 'class_path'?"),
        (["--partition", "3"], "partition is '3': give a class path"),
        (["--init_args.lr", "1"], "unknown option --init_args.lr"),
        (["--batch_size", "4"], "unknown option --batch_size: train.batch_size is the local batch size"),
        (["--gpus", "1"], "unknown option --gpus: fabric.accelerator is cpu, cuda or auto"),
    ],
)
def test_a_mistake_has_one_line_with_a_remedy(options, says):
    text = refused(*options)
    assert says in text and "\n" not in text and ("did you mean" in says or "did you mean" not in text)


def test_arguments_of_a_part_that_are_not_indented_are_told_where_they_belong(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model: model_zoo.MLP\ninit_args: {hidden: [8]}\n")
    assert refused("--config", str(file)).startswith("unknown field init_args: indent it below the part that it is for")
