"""Run federated learning from Python (`raafl.Federation`), on real ranks or a virtual clock."""

from __future__ import annotations

import copy
import csv
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

import torch
import yaml
from torch import nn

from raafl.algorithms import AUTO
from raafl.api.callbacks import Callback, CallbackHooks, EarlyStopping, callbacks_of, current_module
from raafl.api.local_clients import local_clients
from raafl.api.modules import Loss, MakeOptimizer, Metrics, ModuleSpec, as_datamodule, check_types, in_eval_mode
from raafl.api.python_objects import objects
from raafl.api.settings import (
    Settings,
    algorithm_of,
    brief_repr,
    check_attribute,
    check_how,
    config_of,
    count_of,
    devices_of,
    fields_of,
    options_set,
    plain_value,
    same_settings,
    settings_in,
    to_yaml,
    without_addresses,
)
from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm
from raafl.errors import BadInput, CodeFailed, RunFailed
from raafl.local.numerics import numerics_left
from raafl.log import console, in_notebook
from raafl.rng import undisturbed
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.lab.plan.show import AxesReport, PlanReport

OnInterrupt = Literal["raise", "return"]
_LOADING: Final = ("batch_size", "collate_fn")  # arguments that say how data sets, which are no data module, are loaded


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        summary: content of summary.json.
        folder: folder of the run, an absolute path.
        module: copy of the given module with the final values, in eval mode.
    """

    summary: dict[str, Any]
    folder: Path
    module: nn.Module

    def __repr__(self) -> str:
        summary = self.summary
        final = ", ".join(f"{name} {value:.4g}" for name, value in self.final.items())
        return (
            f"Result({summary['algorithm']}: {final or 'no metrics'} after {quantity(summary['updates_merged'], 'update')}, "
            f"{quantity(summary['versions'], 'version')}, {summary['time_s']:.4g} s; finished {summary['finished']!r:.80}, "
            f"folder {str(self.folder)!r})"
        )

    def _repr_html_(self) -> str:
        from raafl.lab.report.notebook import run_html

        return run_html(self.folder, self.summary)

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the final model, by name."""
        return dict(self.summary["final"])

    @property
    def metrics(self) -> list[dict[str, float | None]]:
        """Evaluations, one row of metrics.csv each: version, time_s, wall_s, metrics; None = not measured."""
        return [{name: float(value) if value else None for name, value in row.items()} for row in self._rows("metrics")]

    @property
    def clients(self) -> list[dict[str, str]]:
        """Rows of clients.csv, one for each finished task of a client."""
        return self._rows("clients")

    def _rows(self, table: str) -> list[dict[str, str]]:
        with (self.folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


class Federation:
    """Settings of a federation of unequal clients that train one model; they can be used for several runs."""

    def __init__(
        self,
        algorithm: Algorithm | str = "fed_raa",
        *,
        clients: int | None = None,
        devices: Any = None,
        callbacks: Callback | Sequence[Callback] | None = (),
        on_interrupt: OnInterrupt | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """Store the settings; nothing is built yet.

        Args:
            algorithm: such as ``raafl.fed_raa(fragments=3)``, or its name.
            clients: how many; None = one for each rank but the first, or for each device, or 10.
            devices: speed, memory and link of the clients: a list of `raafl.devices.Device`, of their fields, or of bundled
                names; or a file.
            callbacks: one `raafl.Callback` or a list of them.
            on_interrupt: after Ctrl-C, once the run has ended: "raise" KeyboardInterrupt, so that a script ends too, or
                "return" the result so far; None = return in a notebook, raise elsewhere.
            settings: fields of a config (docs/python.md); those of ``train`` and ``fabric`` also without their prefix.

        Raises:
            BadInput: there is no such setting, or a callback is not one.
        """
        if on_interrupt not in (None, "raise", "return"):
            raise BadInput(f"on_interrupt is {on_interrupt!r:.60}: give 'raise' or 'return'")
        self.on_interrupt = on_interrupt
        self.algorithm = algorithm_of(algorithm)
        check_types({"clients": clients}, {"clients": int | None})
        self.clients, self.devices = plain_value("clients", clients), devices_of(devices)
        self.callbacks = callbacks_of(callbacks)
        self._fields, self._is_set = fields_of(settings), options_set(settings)
        self._observer: CallbackHooks | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse an attribute that no run would read."""
        check_attribute(name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        shown = [f"{name}={brief_repr(value)}" for name, value in self._fields.items()]
        named = [getattr(device, "name", device) for device in self.devices] if isinstance(self.devices, list) else []
        devices = f"[{', '.join(map(str, named[:6]))}{', ...' * (len(named) > 6)}]" if named else self.devices
        clients = self.clients or "by devices, ranks or 10"
        parts = [self.algorithm.name, f"clients={clients}", f"devices={devices}", *shown]
        parts += [f"callbacks={self.callbacks}"] if self.callbacks else []
        return f"Federation({', '.join(parts)})"

    def stop(self, reason: str = "asked to") -> None:
        """End the current run early, and record ``reason`` in its summary. Callable from any thread.

        Raises:
            BadInput: no run is in progress.
        """
        if self._observer is None:
            raise BadInput("stop: no run is in progress: call it while simulate or fit runs")
        self._observer.stop(reason)

    def simulate(
        self,
        module: object,
        data: object = None,
        *,
        devices: object = None,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        metrics: Metrics | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        resume: str | Path | None = None,
    ) -> Result:
        """Simulate a run on a virtual clock: device profiles determine how long tasks take; the training itself is real.

        Args:
            module: a LightningModule; an nn.Module, with ``loss``; a function that returns one of them; the name of
                a transformers model; or what `raafl.from_trainer` returns. It is not changed.
            data: a LightningDataModule; a pair (train, test) of map-style data sets; or the name of a Hugging Face data set.
                None = ``module`` is of a Trainer, which has its data.
            devices: devices of the clients in this run; None = those given to the federation.
            loss: function of (output, target); only for an nn.Module.
            optimizer: function that gets a list of parameters and returns an optimizer; None = the LightningModule's
                own, SGD with learning rate 0.05 for an nn.Module, AdamW with 5e-5 for the name of a transformers model.
            metrics: functions of (output, target) by name, in addition to loss and accuracy; only for an nn.Module.
            batch_size: batch size for data sets; a data module has its own batch size.
            collate_fn: function that makes a batch from a list of samples; only for data sets.
            resume: folder of an interrupted run to continue, or of a finished one whose goal is farther now; module and
                data must be the same as then.

        Raises:
            BadInput: an argument is wrong; raised before training, with a line for every problem.
            RunFailed: the run failed, or a callback raised an exception, which is the cause; the run folder is
                complete.
            KeyboardInterrupt: Ctrl-C was pressed; the summary was written before. See ``on_interrupt``.
        """
        from raafl.runtime.run import simulate

        how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "metrics": metrics}
        how |= {"batch_size": batch_size, "collate_fn": collate_fn}
        spec, source, fields = self._given(module, data, how)
        wanted = self.devices if devices is None else devices_of(devices)
        num_clients = self.clients if self.clients is not None else count_of(wanted) or 10
        return self._run(simulate, spec, source, wanted, num_clients, resume, fields)  # type: ignore[return-value]

    def fit(
        self,
        module: object,
        data: object = None,
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        metrics: Metrics | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        resume: str | Path | None = None,
        local: int | None = None,
    ) -> Result | None:
        """Run in separate processes: rank 0 is the server, the others are clients.

        Torchrun starts the processes; if ``local`` is given, this call starts them on this machine.
        Each of them must build the same module and load the same data; a client trains on its share.

        Args:
            module: model, as for `simulate`.
            data: training and test data, as for `simulate`.
            loss: function of (output, target), as for `simulate`.
            optimizer: function that returns an optimizer, as for `simulate`.
            metrics: functions of (output, target) by name, as for `simulate`.
            batch_size: batch size for data sets, as for `simulate`.
            collate_fn: function that makes a batch from a list of samples, as for `simulate`.
            resume: folder of a run to continue, as for `simulate`.
            local: number of clients to start on this machine; each runs this script again, up to the end of `fit`.
                Allowed once in a script. None = torchrun has started the ranks.

        Returns:
            The result on rank 0, None on the others.

        Raises:
            BadInput: an argument is wrong, or the ranks were not started.
            RunFailed: the run failed, or a callback raised an exception, which is the cause; the run folder is
                complete.
            KeyboardInterrupt: Ctrl-C was pressed; the summary was written before. See ``on_interrupt``.
        """
        if None not in (local, self.clients) and local != self.clients:
            raise BadInput(
                f"local is {local}, but the federation has clients={self.clients}: give one of them, or the same"
            )
        how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "metrics": metrics}
        how |= {"batch_size": batch_size, "collate_fn": collate_fn}
        spec, source, fields = self._given(module, data, how, processes=True)
        with local_clients(local) as starting:
            if "WORLD_SIZE" not in os.environ:
                raise BadInput(
                    "`fit` needs several processes: start the script with `torchrun --standalone --nproc-per-node 5 "
                    "SCRIPT`, or use fit(..., local=4), or simulate"
                )
            num_clients = self.clients if self.clients is not None else int(os.environ["WORLD_SIZE"]) - 1
            from raafl.runtime.over_ranks import fit

            run = partial(fit, starting=starting)
            return self._run(run, spec, source, self.devices, num_clients, resume, fields, simulated=False)

    def replay(
        self,
        folder: str | Path,
        module: Any,
        data: Any = None,
        *,
        until: int | None = None,
        trust_config: bool = False,
        **how: Any,
    ) -> dict[str, Any]:
        """Repeat a run that was started in Python, and check that the result is equal bit for bit.

        Settings come from the run folder. If the run's algorithm or partition was a Python object, which a folder cannot
        store, that of this federation is used. See docs/replay.md.

        Args:
            folder: folder of the run.
            module: module given to the run, with the same initial weights.
            data: data given to the run.
            until: number of the event after which to stop; None = replay all.
            trust_config: whether to import classes that are not raafl's and that the folder's config names.
            how: arguments loss, optimizer, metrics, batch_size and collate_fn, as given to the run.

        Returns:
            Result of the replay: ``equal`` (whether all is equal), ``parted_at`` (the first event that is not), and more; see
            `raafl.runtime.replay.replay`.
        """
        from raafl.runtime.replay import replay

        spec, source, _ = self._given(module, data, how)
        given: dict[str, Any] = {"algorithm": copy.deepcopy(self.algorithm)}
        if "partition" in self._fields:
            given["partition"] = self._fields["partition"]
        given |= {"module": lambda: spec.make(source), "data": lambda: source, "unwrap": spec.unwrap}
        with console(), _random_state_restored(), objects(**given):
            return replay(Path(folder), until=until, trust_config=trust_config)

    def plan(self, module: object, data: object = None, *, algorithms: Sequence[str] = (), **how: Any) -> PlanReport:
        """Predict times, memory and bytes of a simulation without training, as `raafl plan` does.

        Args:
            module: model, as for `simulate`.
            data: training and test data, as for `simulate`.
            algorithms: name or names of further algorithms to predict; "all" = all.
            how: arguments loss, optimizer, metrics, batch_size and collate_fn, as for `simulate`.

        Returns:
            The plan, which shows itself as text and in a notebook.

        Raises:
            BadInput: an argument is wrong.
        """
        from raafl.lab.plan.show import plan_report

        with console(), _random_state_restored():
            return plan_report(self._predicted_experiment(module, data, how), algorithms)

    def axes(
        self, module: object, data: object = None, *, rates: float | Sequence[float] = (0.5, 0.25), **how: Any
    ) -> AxesReport:
        """List a model's axes (dimensions that shrink together), the shares that rates keep, and dimensions that cannot shrink.

        Args:
            module: model, as for `simulate`.
            data: data of which two samples prove each axis, as for `simulate`.
            rates: share or shares of each axis, above 0 and at most 1, whose remaining parameters and FLOPs are computed.
            how: arguments loss, optimizer, metrics, batch_size and collate_fn, as for `simulate`.

        Returns:
            The axes, which show themselves as text and in a notebook.

        Raises:
            BadInput: an argument is wrong.
        """
        from raafl.lab.plan.show import axes_report

        with console(), _random_state_restored():
            return axes_report(self._predicted_experiment(module, data, how), rates)

    def _predicted_experiment(self, module: Any, data: Any, how: dict[str, Any]) -> Experiment:
        """Build the config of a simulation that is only predicted, not run; `auto` is replaced by the chosen method."""
        spec, source, fields = self._given(module, data, how)
        num_clients = self.clients if self.clients is not None else count_of(self.devices) or 10
        return self._experiment(spec, source, self.devices, num_clients, None, fields, simulated=None)

    def _given(
        self, module: Any, data: Any, how: Mapping[str, Any], *, processes: bool = False
    ) -> tuple[ModuleSpec, Any, Mapping[str, Any]]:
        """Convert a caller's module and data to a `ModuleSpec` and a data module, and return the config's other fields, too.

        `how`: the caller's arguments loss, optimizer, metrics, batch_size and collate_fn.
        """
        check_how(how)
        of_trainer, fields = getattr(type(module), "for_federation", None), self._fields
        if of_trainer is not None:
            given = {"data": data, **how}
            module, data, fields = of_trainer(
                module, self._fields, given, set_options=self._is_set, processes=processes
            )
        source = as_datamodule(data, module, **{name: how.get(name) for name in _LOADING})
        spec = ModuleSpec(module, **{name: value for name, value in how.items() if name not in _LOADING})
        return spec, source, fields

    def _run(
        self,
        run: Any,
        spec: ModuleSpec,
        source: Any,
        devices: Any,
        num_clients: int,
        resume: str | Path | None,
        fields: Mapping[str, Any],
        *,
        simulated: bool = True,
    ) -> Result | None:
        recorded = {} if resume is None else settings_in(Path(resume))
        fields = fields if resume is None else {"rules": recorded["rules"], **fields}
        experiment = self._experiment(spec, source, devices, num_clients, resume, fields, simulated=simulated)
        config = config_of(experiment, spec, source)
        if resume is not None:
            from raafl.config.parse import check_output

            check_output(experiment.output, str(resume))
            same_settings(recorded, yaml.safe_load(to_yaml(config, [])))
        callbacks = [*self.callbacks, *(EarlyStopping(**stop) for stop in spec.early_stopping())]
        observer = self._observer = CallbackHooks(callbacks, spec.trained_copy)
        try:
            with console(), _random_state_restored():
                ended = run(experiment, to_yaml(config, self._notes()), observer=observer)
                result = None if ended is None else _result(ended[0], ended[1], observer)
        finally:
            self._observer = None
        interrupted = result is not None and "interrupted" in (result.summary["finished"], observer.stop_asked())
        if result is not None and interrupted and self._raises():
            raise KeyboardInterrupt(f"the run was interrupted; its results so far are in {result.folder}")
        return result

    def _experiment(
        self,
        spec: ModuleSpec,
        source: Any,
        devices: Any,
        num_clients: int,
        resume: str | Path | None,
        fields: Mapping[str, Any],
        *,
        simulated: bool | None,
    ) -> Experiment:
        """Build the config of a run, with a chosen method for `auto`; ``simulated`` None: the run is only predicted."""
        experiment = Experiment(
            model=lambda: spec.make(source),
            data=lambda: source,
            algorithm=copy.deepcopy(self.algorithm),
            clients=num_clients,
            devices=devices,
            resume=None if resume is None else str(resume),
            **fields,
        )
        return _chosen(experiment, simulated) if experiment.algorithm.name == AUTO else experiment

    def _raises(self) -> bool:
        """Check whether an interrupted run must raise KeyboardInterrupt, or return its result."""
        return not in_notebook() if self.on_interrupt is None else self.on_interrupt == "raise"

    def _notes(self) -> list[str]:
        callbacks = without_addresses(", ".join(map(repr, self.callbacks)))
        script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "an interactive session"
        return [
            f"Started in Python, by {script}. Objects that were given are named under `given` and `shown`;",
            "raafl.Federation(...).replay(RUN, module, data) repeats the run.",
            *([f"callbacks: {callbacks}"] if callbacks else []),
        ]


def _chosen(experiment: Experiment, simulated: bool | None) -> Experiment:
    from raafl.lab.plan.choose import chosen_for

    experiment.check()
    with _random_state_restored():
        return chosen_for(experiment, simulated)


def _result(summary: dict[str, Any], folder: Path, observer: CallbackHooks) -> Result:
    """Make the result of a run that has ended, or raise `RunFailed` with the reason why it failed."""
    if summary["finished"].startswith("failed"):
        why = summary["finished"].removeprefix("failed: ")
        error: BaseException | None = observer.error
        if isinstance(error, CodeFailed):
            if error.__cause__ is None:  # it comes from another process, so only its traceback as text is known
                error.add_note(error.traceback)
            error = error.__cause__ or error
        raise RunFailed(f"{why} (run folder: {folder})") from error
    assert observer.run is not None
    return Result(summary, folder.absolute(), in_eval_mode(observer.unwrap(current_module(observer.run, anew=False))))


@contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restore the process's random state and torch's numeric settings when the ``with`` block ends; other threads wait."""
    from raafl.runtime.run import ALONE

    cuda: Any = torch.cuda
    # CUDA must not be initialised here: forked processes could not use it any more
    gpus = range(cuda.device_count()) if cuda.is_initialized() else ()
    with ALONE, undisturbed(gpus), numerics_left():
        yield
