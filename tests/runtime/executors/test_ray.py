"""Ray as the engine of a simulation: the digests of one process, whichever workers come, die and train."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from model_zoo import MLP
from raafl.config.options import Engine
from raafl.errors import BadInput, TaskFailed
from tests.helpers.forked_command import command
from tests.helpers.small_runs import experiment, finish, small_mlp


class Killed(MLP):
    """Kills the first worker that trains it, as the kernel's memory killer would; not the process that has the run."""

    def __init__(self, mark: str, home: int):
        super().__init__(64, (24,), 10, lr=0.05, momentum=0.5)
        self.mark, self.home = Path(mark), home

    def training_step(self, batch, batch_idx):
        if os.getpid() != self.home:
            with suppress(FileExistsError):
                self.mark.touch(exist_ok=False)  # in one step: two workers may begin at the same moment
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Broken(MLP):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError("in the user's code")


def broken():
    return Broken(64, (24,), 10)


def on_ray(argv):
    """Runs on one cluster, an entry for `tests.helpers.forked_command.command`: workers killed, code that fails, no room."""
    import ray

    from raafl.runtime.executors.ray_engine import _connect

    folder, home = Path(argv[0]), os.getpid()
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    _connect(experiment(folder / "started", "fed_raa", engine=Engine("ray"), workers=2))
    seen = ray.remote(lambda: os.environ.get("CUDA_VISIBLE_DEVICES")).options(num_gpus=0)
    print(f"={ray.get(seen.remote())}")

    def killed():
        return Killed(str(folder / "killed"), home)

    for name, more in (("alone", {}), ("ray", {"engine": Engine("ray"), "workers": 2})):
        run = finish(experiment(folder / name, "fed_raa", model=killed, **more))
        print(f"={run.digest}", run.summary["final"])
    print(f"={(folder / 'killed').exists()}")
    for model, engine in ((broken, Engine("ray")), (small_mlp, Engine("ray", gpus_per_worker=1.0))):
        try:
            finish(experiment(folder / "run", "fed_avg", model=model, engine=engine))
        except (BadInput, TaskFailed) as error:
            print(f"={error}".replace("\n", " "))
    ray.shutdown()


@pytest.mark.timeout(400)
@pytest.mark.slow("Ray starts a cluster, and each of its workers imports torch")
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_killed_workers_are_replaced_to_the_digest_of_one_process_and_errors_are_named(tmp_path):
    with command(tmp_path / "c", str(tmp_path), entry=on_ray, HOME=str(tmp_path)) as started:
        assert started.end(deadline_s=360) == 0, started.err  # on a busy machine Ray alone takes a minute to start
        # Ray writes on standard output, too
        devices, alone, ray, killed, *errors = [line[1:] for line in started.out.splitlines() if line.startswith("=")]
    assert (
        devices == "3"
    )  # without RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO Ray hides all GPUs from a task that asks for none
    assert ray == alone and killed == "True"
    assert "ZeroDivisionError: in the user's code" in errors[0]
    assert "asks for 1 CPUs and 1 GPUs for each worker, but the cluster has 2 CPUs and 0 GPUs" in errors[-1]


def test_ray_is_named_with_its_extra_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "raafl.runtime.executors.ray_engine", raising=False)
    with pytest.raises(BadInput, match=r"engine.name is 'ray', but Ray is not installed: pip install"):
        finish(experiment(tmp_path / "run", "fed_avg", engine=Engine("ray")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "dask"}, r"engine.name is 'dask': give processes or ray"),
        ({"address": "auto"}, r"only Ray takes these options: give engine.name ray"),
        ({"name": "ray", "gpus_per_worker": -1.0}, r"engine.gpus_per_worker is -1.0: give 0 or more"),
        ({"name": "ray", "cpus_per_worker": 0.0}, r"engine.cpus_per_worker is 0.0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        Engine(**options)
