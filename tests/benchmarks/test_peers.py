import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import with_raafl, workload
from benchmarks.peers.__main__ import WAYS, cpu_seconds
from benchmarks.peers.workload import Workload

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_the_seconds_of_an_orphan_are_counted_too(tmp_path):
    """The command ends at once; the process that it leaves behind computes for 0.3 s."""
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-SE', '-c', {BURN!r}]); print('done')"
    begin = time.monotonic()

    seconds, printed = cpu_seconds([sys.executable, "-SE", "-c", start], tmp_path)

    assert 0.3 <= seconds < 2 and printed == "done\n"
    assert time.monotonic() - begin >= 0.3, "it has been waited for"


def test_what_fails_or_does_not_end_is_no_measurement(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3: no such peer"):
        fails = "import sys; sys.stderr.write('no such peer'); sys.exit(3)"
        cpu_seconds([sys.executable, "-SE", "-c", fails], tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        cpu_seconds([sys.executable, "-SE", "-c", "import time; time.sleep(60)"], tmp_path, limit_s=0.3)


def test_a_peer_that_fails_loses_no_other_row(monkeypatch, capfd):
    def measure(work, one, python):
        if one.peer == "flgo":
            raise RuntimeError("it ended with 1: no module")
        return {"workload": work.name, "kind": one.kind, "simulator": one.label, "ms": 2.0}

    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(peers, "interpreter", lambda peer: None if peer == "pfl" else Path(sys.executable))
    found = [(row["simulator"], row["kind"]) for row in peers.rows() if row["workload"] == "mlp"]
    assert found == [(way.label, way.kind) for way in WAYS if way.peer not in ("flgo", "pfl")]
    assert "mlp, FLGo: left out: it ended with 1: no module" in capfd.readouterr().err


@pytest.mark.parametrize(("ms", "further_rounds"), [(20.0, 15), (1.0, 60), (0.1, 300)])
def test_the_further_trainings_take_long_enough_to_be_told_from_imports(monkeypatch, ms, further_rounds):
    asked = []

    def cpu_seconds(command, folder):
        asked.append(int(command[-1]))
        return 6.0 + asked[-1] * 100 * ms / 1000, f'{{"trainings": {asked[-1] * 100}}}'

    monkeypatch.setattr(peers, "cpu_seconds", cpu_seconds)
    row = peers.measure(workload.WORKLOADS["mlp"], WAYS[2], Path(sys.executable))
    assert asked == [2, 17, *([2 + further_rounds] if further_rounds > 15 else [])]
    assert (row["trainings"], row["ms"], row["start_s"]) == (further_rounds * 100, pytest.approx(ms), pytest.approx(6))


@pytest.mark.parametrize("batch_clients", [1, "auto"])
def test_raafl_trains_what_the_bare_loop_does(batch_clients):
    """Two rounds of four clients: both count eight trainings, the bare loop by the steps that its model counted."""
    work = Workload("tiny", workload.mlp, (64,), 8, 4, (1, 2))
    workload.Net.steps = 0

    assert with_raafl.bare(work, 2) == 8
    assert workload.Net.steps == 8 * 5, "five batches of ten of its fifty samples"
    assert with_raafl.run(work, 2, "fed_avg", batch_clients) == 8


def test_every_way_has_a_module():
    assert {way.kind for way in WAYS} == {"sync", "async"}
    assert all(Path(workload.__file__).with_name(f"with_{way.peer}.py").is_file() for way in WAYS)
