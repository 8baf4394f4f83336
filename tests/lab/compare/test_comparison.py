"""Reading a comparison file: what it means, and one clear error for what is wrong."""

from __future__ import annotations

import pytest
import yaml

from raafl.errors import BadInput
from raafl.lab.compare.comparison import read

GOOD = {"config": "quickstart", "rows": {"A": "--model.lr 0.1", "B": None}, "seeds": [0, 1]}
SEARCH = {"grid": {"--model.lr": [0.1, 0.2], "--seed_of_nothing": ["a"]}, "seeds": [10]}


def written(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


def test_options_are_words_and_the_name_is_the_files(tmp_path):
    found = read(written(tmp_path, options="--name 'a b'"))
    assert (found.name, found.reference) == ("mine", "A")
    assert found.options == ("--name", "a b")
    assert found.rows == {"A": ("--model.lr", "0.1"), "B": ()}


def test_all_rows_and_trials_are_measured_at_one_distance_after_their_own_options(tmp_path):
    found = read(written(tmp_path, options="--clients 3", eval_every="2s", smooth=2))
    assert found.options_of("A", ("--x", "1")) == (
        "--clients",
        "3",
        "--model.lr",
        "0.1",
        "--x",
        "1",
        "--eval_every",
        "2s",
    )
    # at 0, 2, 4 and 6 s the values are 1, 1, 2 and 5: their means over two
    assert found.points([(0.0, 1.0), (3.0, 2.0), (4.5, 4.0), (6.0, 5.0)]) == [(2.0, 1.0), (4.0, 1.5), (6.0, 3.5)]
    by_versions = read(written(tmp_path, smooth=2))
    assert by_versions.points([(0.0, 1.0), (3.0, 2.0)]) == [(3.0, 1.5)] and by_versions.every_s is None


@pytest.mark.parametrize(
    ("given", "maximize"),
    [
        ({}, True),
        ({"metric": "loss"}, False),
        ({"metric": "val_mse"}, False),
        ({"metric": "gap"}, True),
        ({"metric": "loss", "maximize": True}, True),
        ({"metric": "gap", "maximize": False}, False),
    ],
)
def test_a_metrics_name_says_what_is_better_unless_the_file_does(tmp_path, given, maximize):
    assert read(written(tmp_path, **given)).maximize is maximize


def test_a_grid_is_a_product_in_order(tmp_path):
    search = read(written(tmp_path, search=SEARCH)).search
    assert search.settings("A") == [
        ("--model.lr", "0.1", "--seed_of_nothing", "a"),
        ("--model.lr", "0.2", "--seed_of_nothing", "a"),
    ]


def test_trials_are_drawn_once_for_a_row_and_as_many_for_each(tmp_path):
    rows = {"B": {"--x": [1, 2, 3, 4, 5]}}
    search = read(written(tmp_path, search={**SEARCH, "rows": rows, "trials": 2})).search
    assert len(search.settings("A")) == len(search.settings("B")) == 2
    assert search.settings("B") == search.settings("B")
    assert len(set(search.settings("B"))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sead": [1]}, "sead is unknown: .*seeds"),
        ({"rows": {}}, "rows is empty"),
        ({"rows": {"A": "--x 'open"}}, "rows.A is .*quotation"),
        ({"seeds": [1, 1]}, "each once"),
        (
            {"eval_every": "5"},
            "eval_every is 5: versions of two rows are not the same training; give seconds such as 10s",
        ),
        ({"eval_every": 5}, "eval_every is 5: give text"),
        ({"eval_every": "soon"}, "eval_every is soon: give 1 or more versions, seconds"),
        (
            {"eval_every": "1s", "rows": {"A": "--eval_every=3"}},
            "rows.A has --eval_every, and the comparison has eval_every",
        ),
        ({"eval_every": "1s", "options": "--eval_every 3"}, "options has --eval_every, and the comparison has"),
        ({"rows": {"A": "--seed 5"}}, "rows.A has --seed, which has no effect there: give seeds"),
        ({"options": "--output=/x"}, "options has --output, which has no effect there"),
        ({"search": {**SEARCH, "options": "--resume x"}}, "search.options has --resume, which has no effect there"),
        ({"search": {**SEARCH, "grid": {"--seed": [1, 2]}}}, "search.grid has --seed, which has no effect there"),
        ({"seeds": "0"}, "seeds is 0: give a list"),
        ({"baseline": "C"}, "baseline is 'C', which is no row"),
        ({"smooth": 0}, "smooth is 0"),
        ({"search": {**SEARCH, "seeds": [1]}}, "search.seeds has 1, which is also a seed of the comparison"),
        ({"search": {**SEARCH, "seeds": [10, 10]}}, r"search.seeds is \[10, 10\]: give each seed once"),
        ({"search": {**SEARCH, "rows": {"B": {"--x": [1]}}}}, "row 'B' 1 trials and row 'A' 2"),
        ({"search": {**SEARCH, "trials": 3}}, "search.trials is 3, but row 'A' has only 2 combinations"),
        ({"search": {**SEARCH, "grid": {"lr": [1]}}}, "give each option a list of values"),
        ({"search": {**SEARCH, "halving": {"keep": 1}}}, "search.halving.keep is 1"),
        ({"search": {**SEARCH, "validation_share": 0}}, "search.validation_share is 0"),
        ({"search": {"seeds": [3]}}, "search.grid is missing"),
        ({"search": {}}, "search.grid is missing"),
        ({"search": []}, r"search is \[\]: give a mapping"),
        ({"smooth": "a"}, "smooth is 'a': give a whole number"),
        ({"smooth": 2.5}, "smooth is 2.5: give a whole number"),
        ({"maximize": "false"}, "maximize is 'false': give true or false"),
        ({"metric": ["accuracy"]}, r"metric is \['accuracy'\]: give text"),
        ({"about": 2026}, "about is 2026: give text"),
        ({"targets": [float("nan")]}, "targets is .*: give a list of numbers"),
        ({"published": {"A": [1]}}, r"published.A is \[1\]: give a number or text"),
        ({"rows": {1: None, "1": "--x 1"}}, "rows has '1' twice"),
        ({"name": "../../evil"}, "name is '../../evil', which is no name of a folder"),
        ({"name": ".."}, "name is '..', which is no name of a folder"),
        ({"search": {**SEARCH, "rows": ["A"]}}, r"search.rows is \['A'\]: give a mapping"),
        ({"search": {**SEARCH, "trials": "a"}}, "search.trials is 'a': give a whole number"),
        ({"search": {**SEARCH, "trials": 1.5}}, "search.trials is 1.5: give a whole number"),
        ({"search": {**SEARCH, "validation_share": "a"}}, "search.validation_share is 'a': give a number"),
        ({"search": {**SEARCH, "halving": {"rungs": 2.5}}}, "search.halving.rungs is 2.5: give a whole number"),
        ({"search": {**SEARCH, "halving": {"keep": "a"}}}, "search.halving.keep is 'a': give a number"),
    ],
)
def test_bad_files_are_named(tmp_path, changes, message):
    with pytest.raises(BadInput, match=message):
        read(written(tmp_path, **changes))


def test_a_field_without_a_value_has_its_default(tmp_path):
    names = ("name", "about", "smooth", "targets", "published", "baseline", "search")
    found = read(written(tmp_path, **dict.fromkeys(names)))
    assert found == read(written(tmp_path))
    assert read(written(tmp_path, search={**SEARCH, "rows": None, "halving": None})).search.rows == {}


def test_labels_that_are_numbers_are_read_as_text(tmp_path):
    rows, search = {0.1: "--x 1", 0.2: None}, {**SEARCH, "rows": {0.2: {"--x": [1, 2]}}}
    found = read(written(tmp_path, rows=rows, baseline=0.2, published={0.1: 3}, search=search, variants={7: {}}))
    assert (list(found.rows), found.reference, found.published) == (["0.1", "0.2"], "0.2", {"0.1": 3})
    assert list(found.search.rows) == ["0.2"]
    assert read(tmp_path / "mine.yaml", "7").name == "mine-7"


def test_a_label_given_twice_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("config: quickstart\nseeds: [0]\nrows:\n  A: --seed 1\n  A: --seed 2\n")
    with pytest.raises(BadInput, match=r"mine.yaml' is not YAML: line 5, column 3: 'A' is given twice"):
        read(path)


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"about: \xe9")
    with pytest.raises(BadInput, match=r"mine.yaml' is not text in UTF-8"):
        read(path)


def test_some_rows_alone(tmp_path):
    search = {**SEARCH, "rows": {"B": {"--x": [1, 2]}}}
    found = read(written(tmp_path, search=search, baseline="B", published={"A": 1, "B": 2})).only(["A"])
    assert (list(found.rows), found.reference, dict(found.published), dict(found.search.rows)) == (
        ["A"],
        "A",
        {"A": 1},
        {},
    )
    with pytest.raises(BadInput, match="rows has 'C', which is no row"):
        found.only(["C"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"none.yaml' cannot be read"):
        read(tmp_path / "none.yaml")


def test_a_variant_replaces_fields_and_has_a_name_of_its_own(tmp_path):
    path = written(tmp_path, variants={"long": {"seeds": [7], "options": "--max_updates 9"}})
    assert read(path).seeds == (0, 1)
    found = read(path, "long")
    assert (found.name, found.seeds, found.options, found.rows) == (
        "mine-long",
        (7,),
        ("--max_updates", "9"),
        read(path).rows,
    )
    with pytest.raises(BadInput, match=r"variant is 'lang', which the comparison does not have: .*long"):
        read(path, "lang")
    with pytest.raises(BadInput, match=r"variants\.long\.sead is unknown"):
        read(written(tmp_path, variants={"long": {"sead": [1]}}))


def test_the_config_of_a_run_is_told_from_a_comparison(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {}, "data": {}, "algorithm": "fed_avg", "json": False}))
    with pytest.raises(
        BadInput, match=r"config.yaml' is the config of a run, not a comparison: write a file with config: "
    ):
        read(path)
