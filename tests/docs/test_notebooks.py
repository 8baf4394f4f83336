"""The notebooks of docs/examples run in a kernel, are stored without outputs, and name no path of a machine."""

from __future__ import annotations

import json
import re

import pytest

from tests.habits.source import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))
INTERRUPTED = """
import os, signal, threading

def interrupt(run, version):
    if version == 3:
        os.kill(os.getpid(), signal.SIGINT)  # what the square button does

endless = raafl.Federation(
    fed.algorithm, devices=fed.devices, max_updates=10_000, callbacks=raafl.LambdaCallback(on_version=interrupt)
)
ended = endless.simulate(model, Digits())
assert (ended.summary["finished"], ended.summary["versions"]) == ("interrupted", 3), ended
ended
"""
GONE_ON = """
gone_on = raafl.Federation(fed.algorithm, devices=fed.devices, max_updates=5).simulate(
    model, Digits(), resume=ended.folder
)
assert gone_on.summary["versions"] == 5
"""


def executed(path, folder, monkeypatch, *more: str):
    """Run a notebook without its cell that installs, and further cells, in a kernel of its own; return its cells."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in more]
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=110, kernel_name="python3", resources=place).execute()
    return notebook.cells


def html_of(cells) -> list[str]:
    """The last output of each cell that shows itself as HTML, tables of progress aside."""
    last = [cell.outputs[-1] for cell in cells if cell.cell_type == "code" and cell.outputs]
    return [out.data["text/html"] for out in last if out.output_type == "execute_result" and "text/html" in out.data]


@pytest.mark.slow("a kernel imports torch and lightning anew")
def test_the_quick_start_shows_itself_and_a_cell_can_be_interrupted(tmp_path, monkeypatch):
    cells = executed(ROOT / "docs" / "examples" / "quick-start.ipynb", tmp_path, monkeypatch, INTERRUPTED, GONE_ON)
    axes, plan, result, interrupted = html_of(cells)
    assert "<td" in axes and "layers.1" in axes
    assert "7,210 parameters" in plan
    assert "<svg" in result and "raafl report" in result
    assert "interrupted" in interrupted
    run = next(cell for cell in cells if cell.cell_type == "code" and "result = fed.simulate" in cell.source)
    shown = [out for out in run.outputs if out.output_type == "display_data"]
    assert len(shown) == 1 and "version 80" in shown[0].data["text/html"], "one table, which has been replaced"


@pytest.mark.long("test_the_quick_start_shows_itself_and_a_cell_can_be_interrupted")
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != "quick-start"], ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    assert any("<svg" in text for text in html_of(executed(path, tmp_path, monkeypatch)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_ready_for_another_machine(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert "".join(code[0]["source"]).startswith("%pip install") and code[0]["metadata"]["tags"] == ["install"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    text = "".join(line for cell in cells for line in cell["source"])
    assert not re.search(r"(?<![\w.])/(home|work|tmp|root|Users)/", text)
