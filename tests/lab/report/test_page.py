"""The page as a file: everything in it, nothing from outside, nothing taken for markup; and the command that writes it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("plotly", reason="needs plotly: pip install '.[report]'")

from raafl.commands.cli import main
from raafl.commands.report import build
from raafl.lab.report.page import Chart, Table, View, chart_html, data_json, escaped, shown, table_html
from raafl.runfolder.reading import read, sample_rows
from tests.lab.report.folders import CONFIG, EVENTS, METRICS, SUMMARY, TASKS, write


def test_what_turns_text_around_is_no_part_of_a_page():
    assert escaped("a\u202eb\x1bc\x9bd\n<e>\t電話") == "a b c d\n&lt;e&gt;\t電話"


OWN = "document.documentElement.dataset.owned=1"
HOSTILE = f"</script><script>{OWN}</script><img src=x onerror={OWN}> & \"'<b>%{{x}}</b>\u2028"
CHARTS = ("curves", "timeline", "time-spent", "participation", "staleness", "regions", "submodels", "partition")


class Elements(HTMLParser):
    """Counts elements, and keeps their attributes and the texts of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self._in_script = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return build([read(write(tmp_path_factory.mktemp("page") / "run"))])


def hostile_run(folder, name="x"):
    """A run every text of which tries to be markup."""
    config = {**CONFIG, "algorithm": {"class_path": HOSTILE}, HOSTILE: HOSTILE, "note": name}
    events = [
        {**event, "profile": {**event["profile"], "name": HOSTILE}} if "profile" in event else event for event in EVENTS
    ]
    tasks = [{**task, "spec": HOSTILE, "outcome": "refused:" + HOSTILE} for task in TASKS] + list(TASKS)
    metrics = [{**row, HOSTILE: 1.0} for row in METRICS]
    summary = {
        **SUMMARY,
        "algorithm": HOSTILE,
        "finished": HOSTILE,
        "warnings": [HOSTILE],
        "unwritten": {HOSTILE: HOSTILE},
        "final": {HOSTILE: 0.5},
        "time_to": {HOSTILE: 1.0},
    }
    return write(folder, config=config, events=events, tasks=tasks, metrics=metrics, summary=summary)


def test_the_page_has_every_chart_with_its_table_and_the_config(page):
    for name in CHARTS:
        (section,) = re.findall(rf'<section id="{name}">.*?</section>', page, re.S)
        assert f'<figure data-chart="{name}"' in section
        assert "<details>" in section and "<table>" in section
    assert "raafl.fed_raa" in re.findall(r'<section id="config">.*?</section>', page, re.S)[0]


def test_the_page_asks_for_nothing_from_outside(page):
    parsed = Elements(page)
    assert parsed.tags.count("script") == 3
    assert not {"iframe", "img", "object", "embed", "base", "form"} & set(parsed.tags)
    links = [
        value for name, value in parsed.attributes if name in ("href", "src", "srcset", "action", "data", "poster")
    ]
    assert links and all(value.startswith("#") or value == "data:," for value in links)
    (policy,) = [value for _, value in parsed.attributes if value and value.startswith("default-src")]
    assert not re.search(r"https?:|\*|'self'", policy)
    assert "url(" not in page.split("</style>")[0]


def test_nothing_that_comes_from_a_folder_is_markup(tmp_path):
    good = write(tmp_path / "good")
    plain = Elements(build([read(good), read(write(tmp_path / "other", config={**CONFIG, "clients": 3}))]))
    text = build([read(good), read(hostile_run(tmp_path / "bad"))])
    parsed = Elements(text)
    assert len(parsed.scripts) == len(plain.scripts) == 3
    assert {"b", "img"} & set(parsed.tags) == set()
    assert set(parsed.tags) <= set(plain.tags) | {"li", "ul"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    figures = json.loads(parsed.scripts[0])
    assert set(figures) == {*CHARTS, "axes"}  # which has tables alone
    for chart in figures.values():
        for view in chart["views"]:
            check_texts(view["data"])
            check_texts(view["layout"])


def check_texts(value, key=""):
    """Fail where plotly would read a text as markup, but for the templates, which are the page's own."""
    if isinstance(value, dict):
        for name, item in value.items():
            check_texts(item, name)
    elif isinstance(value, list):
        for item in value:
            check_texts(item, key)
    elif isinstance(value, str) and key != "hovertemplate":
        assert "<" not in value, (key, value)
    elif isinstance(value, str):
        assert "owned" not in value


def test_a_select_and_its_view_have_the_same_key():
    view = View([], {})
    chart = Chart("x", "t", "n", {(HOSTILE + "\x01",): view}, [Table(["a"], [])], {"Run": [HOSTILE + "\x01"]})
    (option,) = [value for name, value in Elements(chart_html(chart)).attributes if name == "value"]
    assert json.loads(data_json([chart]))["x"]["views"][0]["key"] == [option]


def test_a_chart_without_views_says_why_and_has_no_place():
    text = chart_html(Chart("x", "Title", "There is nothing yet.", {}))
    assert "There is nothing yet." in text
    assert "<figure" not in text


def test_cells():
    assert [shown(value) for value in (None, float("nan"), 3, 12345, 2.0, 0.123456789, "a<b")] == [
        "–",
        "–",
        "3",
        "12,345",
        "2",
        "0.12346",
        "a<b",
    ]
    assert '<td class="words">a&lt;b</td>' in table_html(Table(["x"], [["a<b"]]))
    assert escaped("a\x00b<") == "a b&lt;"


@pytest.mark.slow("thirty thousand tasks are read")
def test_ten_thousand_clients_and_thirty_thousand_tasks_make_a_small_page(tmp_path):
    num_clients, num_tasks = 10_000, 30_000
    events = [EVENTS[0]] + [
        {"time_s": 0.0, "event": "joined", "client": i, "num_samples": i % 97, "profile": {"flops_per_s": 1e6 * i}}
        for i in range(1, num_clients + 1)
    ]
    tasks = [
        {
            "client": i % num_clients + 1,
            "assignment": i,
            "spec": f"a[0:{i % 5000}]",
            "region": i % 5000,
            "version": i // 2,
            "merged_version": i,
            "staleness": i - i // 2,
            "assigned_s": i / 100,
            "arrived_s": i / 100 + 90,
            "outcome": "merged",
        }
        for i in range(num_tasks)
    ]
    metrics = [{**METRICS[0], "version": i, "time_s": float(i)} for i in range(20_000)]
    run = read(write(tmp_path / "run", events=events, tasks=tasks, metrics=metrics))
    text = build([run])
    assert len(text.encode()) < 3e6
    for said in ("24 bands", "40 bands", "of 30,000 rows, evenly picked", "points at most", "drawn as 50 bands"):
        assert said in text, said


# ---- the command ----


def test_the_command_writes_one_page_about_several_runs(tmp_path, capsys):
    one = write(tmp_path / "one")
    two = write(tmp_path / "two", config={**CONFIG, "seed": 1})
    page = tmp_path / "page.html"
    assert main(["report", str(one), str(two), str(one), "--output", str(page)]) == 0
    assert f"{page}: 2 runs" in capsys.readouterr().out
    assert "<h1>2 runs of fed_raa</h1>" in page.read_text()


def test_runs_in_folders_of_one_name_have_names_of_their_own(tmp_path):
    """Killed runs of one config are told apart by nothing else: the page would show one of them, with its colour for both."""
    folders = [write(tmp_path / name / "run", summary=None) for name in ("a", "b")]
    folders.append(write(tmp_path / "c"))
    page = tmp_path / "page.html"
    assert main(["report", *map(str, folders), "--output", str(page)]) == 0
    options = re.findall(r'data-chart="timeline".*?<option value="([^"]*)">.*?value="([^"]*)">', page.read_text())
    assert options == [("fed_raa, not ended (a/run), seed 0", "fed_raa, not ended (b/run), seed 0")]
    assert re.findall(r"<td[^>]*>(?:<span[^>]*></span>)?(./run|c)</td>", page.read_text())[:3] == [
        "a/run",
        "b/run",
        "c",
    ]


SAMPLES = "version,kind,input,output,expected,probability\n"


@pytest.mark.parametrize("rows", ["", "some,other\n1,2\n", SAMPLES + "x,text,a,b,,\n", SAMPLES + "3,te"])
def test_damaged_samples_are_left_out(tmp_path, rows):
    folder = write(tmp_path / "run")
    (folder / "samples.csv").write_text(rows)
    assert 'id="samples"' not in build([read(folder)])


def test_complete_samples_beside_damaged_ones_are_shown(tmp_path):
    folder = write(tmp_path / "run")
    (folder / "samples.csv").write_text(
        f"{SAMPLES}0,text,a,{'b' * 200_000},,\n0,text,a,fine,,\n7,text,a,better,,\n,,\n"
    )
    page = build([read(folder)])
    assert '<td class="words">fine</td>' in page and '<td class="words">better</td>' in page and "b" * 1000 not in page


def test_of_long_samples_the_first_and_the_last_model_are_shown(tmp_path):
    folder = write(tmp_path / "run")
    rows = [f"{version},class,test sample {i},v{version}s{i},," for version in range(110) for i in range(120)]
    (folder / "samples.csv").write_text("\n".join([SAMPLES.rstrip(), *rows, ""]))
    found = sample_rows(folder)
    assert [",".join(row) for row in found] == rows[:5000] + rows[-5000:]
    first_and_last, _ = build([read(folder)]).split("All of run")
    assert ">v0s99<" in first_and_last and ">v109s99<" in first_and_last and ">v108s0<" not in first_and_last


def test_a_region_of_any_number_is_drawn(tmp_path):
    folder = write(tmp_path / "run", tasks=[{**TASKS[0], "region": 1e300}, *TASKS[1:]])
    assert '<section id="regions">' in build([read(folder)])


def test_an_empty_folder_of_a_run_that_died_early_is_reported(tmp_path):
    folder = write(tmp_path / "run", events=EVENTS[:1], tasks=[], metrics=[], summary=None)
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    text = page.read_text()
    assert "there is no summary.json: the run has not ended, or was killed" in text
    assert "<figure" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "raafl report needs a run folder"),
        (["nowhere"], "'nowhere' is not a run folder: there is nothing there"),
        (["run", "--outptu", "x"], "unknown option '--outptu'"),
        (["run", "--output", "."], "which is a folder: name a file, such as report.html"),
        (["run", "--output", "no/such/page.html"], "cannot be written (No such file or directory): name another file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, options, said):
    write(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_without_plotly_the_page_has_tables_and_the_curve_and_names_the_remedy(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    file = tmp_path / "page.html"
    assert (
        main(["report", str(write(tmp_path / "run")), str(hostile_run(tmp_path / "bad")), "--output", str(file)]) == 0
    )
    text = file.read_text()
    parsed = Elements(text)
    assert "pip install" in text and "[report]" in text
    assert not parsed.scripts and "<figure" not in text and not {"b", "img"} & set(parsed.tags)
    (section,) = re.findall(r'<section id="curves">.*?</section>', text, re.S)
    assert "<polyline" in section and "<table>" in section
    assert len(file.read_bytes()) < 100_000
