"""What the command line says of algorithms, options and models."""

from __future__ import annotations

import json
import re

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.commands.cli import main


def test_algorithms_json(capsys):
    assert main(["algorithms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(ALGORITHMS)
    assert all(list(row) == ["name", "paper", "sample", "select", "local", "trigger", "merge"] for row in rows)


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_the_table_of_algorithms_fits_and_says_everything(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["algorithms"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    for name, factory in ALGORITHMS.items():
        row = next(line for line in text.splitlines() if line.startswith(name))
        assert factory().paper.split()[0] in row
    words = set(re.findall(r"[\w./+-]+", " ".join(" ".join(f().describe().values()) for f in ALGORITHMS.values())))
    assert words <= set(re.findall(r"[\w./+-]+", text))
    assert text.splitlines()[-1 if columns > 60 else -2].startswith("auto  raafl chooses one of them")


@pytest.mark.parametrize("name", ["simulate", "fit"])
def test_help_names_every_field_in_plain_words(name, capsys, monkeypatch):
    from dataclasses import fields

    from raafl.config.experiment import Experiment

    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: raafl {name} --config FILE [--FIELD VALUE ...] [--json]\n")
    for field in fields(Experiment):
        line = re.search(rf"^  --{field.name}(\.\w+)? ", text, re.M)
        assert line is not None, field.name
    for jargon in ("<class", "Callable", "Union", "| null", "Namespace", "jsonargparse", "init_args"):
        assert jargon not in text
    assert all(f"`raafl.{algorithm}`" not in text for algorithm in ALGORITHMS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_named_says_all_it_takes(name, capsys, monkeypatch):
    import inspect

    monkeypatch.setenv("COLUMNS", "80")
    assert main(["algorithms", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(name)
    assert max(map(len, text.splitlines())) <= 80
    for argument, parameter in inspect.signature(ALGORITHMS[name]).parameters.items():
        (entry,) = re.findall(rf"^    {argument} .*?(?=^    \w|\Z)", text, re.M | re.S)
        if isinstance(parameter.default, float | str):
            assert f"(default: {parameter.default})" in " ".join(entry.split())
    assert main(["algorithms", "fed_rra"]) == 2
    assert "did you mean 'fed_raa'?" in capsys.readouterr().err


def test_help_of_a_model_lists_its_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--model.help", "model_zoo.MLP"])
    assert "--model.hidden" in capsys.readouterr().out
    assert main(["simulate", "--algorithm.help", "fed_raa"]) == 2
    assert "run `raafl algorithms NAME` for the arguments of an algorithm" in capsys.readouterr().err
