"""The machine that a result names."""

from __future__ import annotations

from raafl.lab.compare.runs import gpus, machine_name


def test_the_gpus_of_a_machine_are_named(tmp_path):
    for bus, text in {"1": "Model: \t\t NVIDIA H200\nIRQ: 5\n", "2": "IRQ: 6\n"}.items():
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    assert gpus(tmp_path) == ["NVIDIA H200"] and gpus(tmp_path / "none") == []
    assert machine_name({"processor": "Xeon", "gpus": gpus(tmp_path)}) == "Xeon, NVIDIA H200"
    assert machine_name({"processor": "Xeon"}) == "Xeon"  # of results from before GPUs were named
