"""What a process imports before it has done anything, and what it costs a client rank."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.habits.source import ROOT

HEAVY = (
    "lightning",
    "transformers",
    "datasets",
    "plotly",
    "wandb",
    "sklearn",
    "torchvision",
    "scipy",
    "pandas",
    "matplotlib",
    "torchmetrics",
)


def run(code: str) -> object:
    """Run `code` in a fresh interpreter and return what it printed last, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded_after(code: str, names: tuple[str, ...] = HEAVY) -> object:
    return run(f"{code}\nimport sys, json\nprint(json.dumps([n for n in {names!r} if n in sys.modules]))")


def test_import_raafl_is_light():
    assert loaded_after("import raafl") == []


@pytest.mark.parametrize(
    "modules", ["raafl.lean_import", "raafl.commands.watch, raafl.runfolder.journal, raafl.runfolder.outcome"]
)
def test_modules_without_tensors_do_not_import_torch(modules):
    assert loaded_after(f"import {modules}", ("torch", "numpy", "rich", *HEAVY)) == []


def test_a_report_needs_no_torch_to_read_run_folders():
    assert loaded_after("import raafl.commands.report, raafl.report.labels", ("torch", *HEAVY)) == []


@pytest.mark.slow("lightning is imported anew")
def test_lean_lightning_leaves_out_what_torchmetrics_would_pull_in():
    optional = ("torchvision", "transformers", "scipy", "datasets", "wandb", "pandas", "sklearn")
    assert loaded_after("from raafl.lean_import import import_lightning; import_lightning()", optional) == []


@pytest.mark.slow("everything that torchmetrics can pull in is imported anew")
def test_after_a_lean_import_everything_else_imports_as_usual():
    optional = ("torchvision", "transformers", "scipy.signal", "matplotlib.pyplot")
    present = [n for n in optional if importlib.util.find_spec(n.partition(".")[0])]
    code = f"""
import sys, importlib, importlib.util, json
finders, find_spec = list(sys.meta_path), importlib.util.find_spec
from raafl.lean_import import import_lightning
assert import_lightning() is import_lightning() is sys.modules["lightning"]
assert importlib.util.find_spec is find_spec
assert importlib.util.find_spec("torchmetrics") is not None, "looking for it must not use it up"
for name in {present!r}:
    importlib.import_module(name)
import torchmetrics, lightning.pytorch.core.module as core
from torchmetrics.classification import MulticlassAccuracy
assert core.Metric is torchmetrics.Metric is torchmetrics.metric.Metric
assert core.MetricCollection is torchmetrics.MetricCollection
assert sys.meta_path[:1] == finders[:1], sys.meta_path
import torch
accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
accuracy.update(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
assert issubclass(MulticlassAccuracy, core.Metric)
if {("matplotlib.pyplot" in present)!r}:
    import matplotlib
    matplotlib.use("agg")
    assert isinstance(accuracy.plot()[1], matplotlib.axes.Axes)
print(json.dumps(accuracy.compute().item()))
"""
    assert run(code) == 0.75


@pytest.mark.long
def test_a_submodule_of_torchmetrics_may_come_first_after_a_lean_import():
    assert run(
        "from raafl.lean_import import import_lightning\nimport_lightning()\n"
        "from torchmetrics.regression import MeanSquaredError\nimport torchmetrics, json\n"
        "print(json.dumps(torchmetrics.MeanSquaredError is MeanSquaredError))"
    )


@pytest.mark.long
def test_lean_import_does_nothing_when_torchmetrics_is_there_already():
    assert run(
        "import torchmetrics, sys, json\nfinders, module = list(sys.meta_path), torchmetrics\n"
        "from raafl.lean_import import import_lightning\nimport_lightning()\n"
        "print(json.dumps(sys.modules['torchmetrics'] is module and '_Resume' not in str(sys.meta_path)))"
    )


@pytest.mark.long
def test_a_lightning_that_wants_more_of_torchmetrics_is_imported_the_ordinary_way():
    assert run(
        "import raafl.lean_import as lean, json\nlean._HOME.pop('MetricCollection')\nlightning = lean.import_lightning()\n"
        "import sys, torchmetrics\nfrom lightning.pytorch.core.module import MetricCollection\n"
        "print(json.dumps(MetricCollection is torchmetrics.MetricCollection and '_Resume' not in str(sys.meta_path)))"
    )
