"""Tables of docs are made from results, and from nothing else."""

from __future__ import annotations

import json

import yaml

from benchmarks import tables
from benchmarks.choices import unseen_rules
from benchmarks.tables import chosen, markdown, pages, renewed, renewed_page, written


def test_every_page_has_the_tables_of_its_results():
    stale = [page.name for page in pages() if renewed_page(page) != page.read_text()]
    assert not stale, "run python -m benchmarks.tables"


def test_a_table_is_replaced_between_its_marks_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tables.ROOT", tmp_path)
    row = {
        "row": "A",
        "seeds": [0, 1],
        "failed": 0,
        "time_to": {},
        "runs": [],
        "final": {"mean": 0.5, "half": 0.25, "num": 2},
    }
    (tmp_path / "r.json").write_text(
        '{"name": "r", "date": "2026-01-02T03", "commit": null, "hardware": {"processor": "P"}, "metric": "accuracy",'
        f' "reference": "A", "rows": [{str(row).replace(chr(39), chr(34))}]}}'
    )
    text = renewed("before\n<!-- table: r.json -->\nold\n<!-- end of table -->\nafter")
    assert text.startswith("before\n<!-- table: r.json -->\n\n`raafl compare configs/papers/r.yaml`, 2026-01-02 (P")
    assert "`rules: 1`" in text  # of a file that is older than the number
    assert "| A | 0.50 ± 0.25 |" in text and "old" not in text and text.endswith("\n\n<!-- end of table -->\nafter")


def test_a_comparison_shows_few_columns_and_a_shown_difference_in_bold():
    def row(label: str, difference: dict[str, object] | None, failed: int = 0) -> dict[str, object]:
        figures = {"megabytes": {"mean": 7.0, "half": None}, "updates": {"mean": 3.0, "half": None}}
        value = {"mean": 0.5, "half": 0.25, "num": 2}
        return (
            {"row": label, "seeds": [0, 1], "failed": failed, "time_to": {}, "runs": [], "final": value}
            | figures
            | {"difference": difference}
        )

    rows = [
        row("A", None),
        row("B", {"mean": 0.25, "half": 0.125, "shown": True}),
        row("C", {"mean": -0.25, "half": 0.5, "shown": False, "p_holm": 0.5}, failed=1),
    ]
    result = {
        "name": "r",
        "date": "2026-01-02T03",
        "commit": None,
        "hardware": {"processor": "P"},
        "metric": "accuracy",
    }
    text = written(result | {"reference": "A", "rows": rows}, "r.json", "MB")
    assert "\nMeans over 2 seeds; [all columns and seeds](../../r.json).\n" in text
    assert text.endswith(
        "| row | accuracy | minus A | MB |\n| --- | --- | --- | --- |\n| A | 0.50 ± 0.25 |  | 7 |\n"
        "| B | 0.50 ± 0.25 | **+0.25 ± 0.12** | 7 |\n| C (1 failed) | 0.50 ± 0.25 | -0.25 ± 0.50 | 7 |"
    )


def test_an_empty_place_is_filled_and_then_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tables.written", lambda result, source, also, up: "table")
    monkeypatch.setattr("benchmarks.tables.ROOT", tmp_path)
    (tmp_path / "r.json").write_text("{}")
    text = renewed("<!-- table: r.json -->\n<!-- end of table -->")
    assert "\n\ntable\n\n" in text and renewed(text) == text


def test_a_benchmarks_table_has_the_rows_and_columns_that_it_is_asked_for():
    rows = [
        {"model": "A", "rate": 0.5, "ratio": 1.004, "n": 7, "part": "x"},
        {"model": "A", "rate": 0.25, "ratio": 2.0, "n": 7, "part": "x"},
        {"model": "B", "rate": 0.25, "ratio": None, "n": 12345, "part": "x"},
        {"model": "C", "rate": 0.25, "ratio": 9.0, "n": 1, "part": "y"},
    ]
    result = {"date": "2026-01-02T03", "hardware": {"cpu": "P"}, "rows": rows}
    text = chosen(result, {"columns": "model, ratio:.2f as times", "where": "part=x, rate=0.25"})
    assert text == "Measured 2026-01-02 on P.\n\n| model | times |\n| --- | --- |\n| A | 2.00 |\n| B |  |"
    text = chosen(result, {"columns": "model as name, n", "across": "rate of ratio:.1f", "where": "part=x"})
    assert text.endswith(
        "| name | n | 0.5 | 0.25 |\n| --- | --- | --- | --- |\n| A | 7 | 1.0 | 2.0 |\n| B | 12345 |  |  |"
    )
    text = chosen(result, {"columns": "model, n, part", "alike": "one row", "where": "part=x"})
    assert text.endswith("| model | n | part |\n| --- | --- | --- |\n| A, A | 7 | x |\n| B | 12345 | x |")


def test_markdown_escapes_bars():
    assert markdown([["a", "b|c"], ["1", "2"]]) == "| a | b\\|c |\n| --- | --- |\n| 1 | 2 |"


def test_a_result_of_older_rules_says_whether_its_times_are_the_present_ones(tmp_path, monkeypatch):
    rows = [
        {"result": name, "rules": 1, "moved": moved}
        for name, moved in (("a", 0.0), ("b", 0.0), ("b", 0.3375), ("c", None))
    ]
    monkeypatch.setattr(tables, "_RULES", tmp_path / "rules.json")
    (tmp_path / "rules.json").write_text(json.dumps({"rows": rows}))
    assert tables._moved("a", 1) == "; the present rules give the same task times"
    assert tables._moved("b", 1) == "; by the present rules a task takes up to 33.8% more or less time"
    assert tables._moved("c", 1) == tables._moved("a", 2) == tables._moved("d", 1) == ""


def test_rules_on_unseen_fleets_are_a_table_as_soon_as_a_result_has_them():
    """The rows are those of `benchmarks.choices`: two cells in which auto is 1 and 1.3 times the best, FedAvg once not there."""
    entry = yaml.safe_load((tables.ROOT / "benchmarks" / "tables.yaml").read_text())["auto-unseen-rule"]
    result = {"hardware": {"cpu": "CPU"}, "date": "2026-01-02", "rows": [{"part": "cell", "fleet": "f"}]}
    assert chosen(result, entry) == "`benchmarks/results/auto-unseen.json` has no rows with part=rule yet."
    rows = unseen_rules([{"ratio": 1.0, "always FedAvg": 2.0}, {"ratio": 1.3, "always FedAvg": None}])
    result["rows"] += [{"part": "rule", **row} for row in rows]
    assert chosen(result, entry).splitlines()[2:] == [
        "| rule | cells | median over the best | worst |",
        "| --- | --- | --- | --- |",
        "| auto | 2 | 1.15 | 1.30 |",
        "| always FedAvg | 2 | not reached | not reached |",
    ]


def test_links_start_at_the_folder_of_their_page(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tables.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.tables.written", lambda result, source, also, up: f"[all]({up}{source})")
    (tmp_path / "r.json").write_text("{}")
    for name, link in (
        ("README.md", "r.json"),
        ("docs/index.md", "../r.json"),
        ("docs/results/auto.md", "../../r.json"),
    ):
        page = tmp_path / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("<!-- table: r.json -->\n<!-- end of table -->")
        assert f"[all]({link})" in renewed_page(page)
