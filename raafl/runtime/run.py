"""Run an experiment on the virtual or the wall clock, and write its run folder."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raafl.config.experiment import Experiment
from raafl.config.options import seconds
from raafl.core.hooks import HookList, RunHooks
from raafl.core.types import Assignment, Update, Warn
from raafl.data.federated import Sized
from raafl.errors import BadInput, CodeFailed
from raafl.local.evaluate import MAX_LOGGED, Evaluator
from raafl.rules import Rules
from raafl.runfolder.journal import RunFolder, default_run_folder
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import BREAKS, CONFIG, JournalRow, Summary
from raafl.runfolder.statistics import Coverage, RunStatistics
from raafl.runtime.lifecycle.checkpointer import AsItIs, Checkpointer, SavedForm, check_space
from raafl.runtime.lifecycle.environment import conditions
from raafl.runtime.lifecycle.signals import Interrupt
from raafl.runtime.observers import absent, display_of, observers_of
from raafl.runtime.setup import ServerSetup, build, evaluation_seed, make_executor, max_norm_ratio
from raafl.sanitize import is_url
from raafl.submodel import FULL
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.config.targets import Goals
    from raafl.runfolder.seals import Signer
    from raafl.runtime.executors.ranks import RankExecutor
    from raafl.runtime.lifecycle.resume import SavedRun
    from raafl.transport import Transport

NO_SERVER_ABOVE = (
    "subfederation is given, but nobody sends this run a task: leave it out, or start the run by "
    "`raafl join --subfederation FILE`"
)


ALONE = threading.RLock()
"""Lock of a simulation or replay: tasks of two in one process would draw from the same generators."""


class Run:
    """Parts that simulated and real runs have in common: run folder, journal, progress display, evaluator and summary."""

    def __init__(
        self,
        parts: ServerSetup,
        config_yaml: str,
        runtime: str,
        saved: SavedRun | None = None,
        observer: RunHooks | None = None,
        signer: Signer | None = None,
        num_queued: Callable[[], int] = lambda: 0,
    ) -> None:
        """Try a training step and an evaluation, then open the run folder.

        `saved`: checkpoint of the run to continue; None = a new run. `num_queued`: returns how many events wait for the
        run's loop.
        """
        from raafl.runfolder.seals import Signer

        experiment = parts.experiment
        self.parts, self.runtime, self.config_yaml = parts, runtime, config_yaml
        self.num_queued, self.resumed = num_queued, saved is not None
        data = parts.data
        self.norms = form_of(parts)
        self.evaluator = evaluator_of(parts, self.norms)
        self.saved_form = SavedForm(parts.module, lambda: self.evaluator.living)
        self.progress = display_of(experiment)
        self.signer = signer or Signer.own()
        self.folder = self._new_folder() if saved is None else saved.folder
        self.observer = observer or RunHooks()
        self.observers = observers_of(self, self.observer)
        with ExitStack() as unless_begun:
            unless_begun.callback(self._give_up)
            unless_begun.callback(HookList(*self.observers).close)
            HookList(*self.observers).begin(self, saved)
            recorded = {} if saved is None else saved.section["record"]["metrics"]
            from raafl.runtime.first_look import check_goals, first_look, notes_before

            # look before the folder exists, so that a run that cannot start leaves none
            look = first_look(parts, self.evaluator, recorded)
            self.first_metrics = look.metrics if recorded else self.observer.on_measured(0, 0.0, look.metrics)
            check_goals(experiment, self.first_metrics, has_client_tests=any(data.test_sizes))
            self._notes, self._remaining = notes_before(
                parts, look, self.saved_form, self.first_metrics, is_new=saved is None
            )
            if saved is not None:
                from raafl.runtime.lifecycle.resume import go_on

                go_on(self, saved)
            else:
                self._begin(config_yaml, self.first_metrics)
            self.record.figures.logged.expect(look.logged[:MAX_LOGGED])
            self.saver = Checkpointer(
                self.folder,
                self.saved_form,
                experiment.keep_checkpoints,
                runtime,
                self.record,
                every_s=seconds("checkpoint_s", experiment.checkpoint_s),
                warn=self.progress.warn,
                written=lambda: self.hooks.saved(),
            )
            self.hooks = self.norms.hooks(*self.observers, self.saver)
            self.hooks.opened()
            unless_begun.pop_all()
        self._interrupt = Interrupt(on_insist=self.progress.abandon)

    def _give_up(self) -> None:
        """Close the folder of a run that cannot begin, and delete the files of a new one."""
        opened = vars(self)  # lacks what was not reached
        if "saver" in opened:
            self.saver.close()
        if "writer" in opened:
            (self.writer.close if self.resumed else self.writer.discard)()

    def _new_folder(self) -> Path:
        name, output = self.parts.experiment.name, self.parts.experiment.output
        # a URL's run is written to a local folder, from which it is copied
        return default_run_folder(name) if output is None or is_url(output) else Path(output)

    def figures(self) -> RunStatistics:
        """Return new statistics of the run, as yet without a task."""
        fleet, tokens = self.parts.coordinator.fleet, self.parts.data.tokens_per_sample()

        def num_tokens(task: Assignment, update: Update) -> float:
            return (tokens or 0.0) * fleet.samples(update.num_samples, task)

        return RunStatistics(
            Coverage(self.parts.submodels),
            lambda task: fleet.cost(task.spec, task.extra).peak_bytes,
            None if tokens is None else num_tokens,
        )

    def _begin(self, config_yaml: str, metrics: dict[str, float]) -> None:
        """Create the run folder, and record the metrics of the initial model."""
        experiment, state = self.parts.experiment, self.parts.coordinator.state
        self.folder = self._new_folder()  # choose again, since another run may have taken the name
        check_space(self.folder, state.values.num_bytes, experiment.keep_checkpoints)
        try:
            self.writer = RunFolder(self.folder, config_yaml, self.progress.warn)
        except BadInput:
            if self.folder == self._new_folder():
                raise
            return self._begin(config_yaml, metrics)  # another run has taken the name just now
        except OSError as error:
            raise BadInput(f"output is '{self.folder}', which cannot be created ({error}): name another") from error
        self.writer.signer = self.signer
        from raafl.config.own_runs import remember

        remember(config_yaml, self.folder)
        self.progress.follow(self.writer)
        self.record = RunRecord(self.writer, experiment.targets(), figures=self.figures())
        self.record.due(0, 0.0, self.parts.coordinator.algorithm.merge.figures(state))
        self.record.evaluated(0, 0.0, metrics)

    def limits(self) -> dict[str, Any]:
        """Return the limits of the start that the journal has."""
        limits = self.parts.coordinator.limits
        return {"min_clients": limits.min_clients, "count_lost": limits.count_lost}

    def goals(self) -> Goals:
        """Return the goals at which the run ends: numbers of updates and seconds, and targets."""
        from raafl.config.targets import Goals

        limits = self.parts.coordinator.limits
        return Goals(limits.max_updates, limits.max_time_s, tuple(self.parts.experiment.targets()))

    def start(self) -> None:
        """Start the run's clock and the progress display."""
        experiment, coordinator = self.parts.experiment, self.parts.coordinator
        described, clients = coordinator.algorithm.describe(), quantity(len(self.parts.clients), "client")
        size = f"{coordinator.state.submodels.cost(FULL, coordinator.fleet.batch_size).params:,} parameters"
        head = f"{experiment.name}: {described['name']} on {clients}"
        # journals contain the title in this form
        title = f"{head}, select {described['select']}, merge {described['merge']}, {size}"
        self.progress.start(f"{head}, a model of {size}, measured on {self.parts.data.measured}")
        what = re.sub(r"^full\b", "the whole model", described["select"])
        late = ", s: merges since the task began" if "(s+1)" in described["merge"] else ""
        self.progress.note(f"  a client trains: {what}")
        self.progress.note(f"  merge after: {described['trigger']}; how: {described['merge']}{late}")
        for note in self._notes:
            (self.progress.warn if isinstance(note, Warn) else self.progress.note)(note)
        # handle signals until `close`, so that none interrupts the end of the run
        self._interrupt.__enter__()
        if self.resumed:
            self.hooks.start()
            return
        row: JournalRow = {
            "time_s": 0.0,
            "event": "run",
            "runtime": self.runtime,
            "conditions": conditions(experiment, trains=self.runtime == "simulated"),
            "start": self.limits(),
            "title": title,
            "goals": self.goals().to_json(),
            "guard": {"max_norm_ratio": max_norm_ratio(experiment)},
        }
        if experiment.algorithm.chosen is not None:
            from raafl.runtime.lifecycle.last_entries import TRIALS_S

            row["chosen"] = {name: value for name, value in experiment.algorithm.chosen.items() if name != TRIALS_S}
        if experiment.batch_clients == "fast" and self.runtime == "simulated":
            row["batches"] = "fast"
        self.writer.event(row)
        self.writer.seal(self.writer.sealed(), 0, [CONFIG])
        self.record.restart_clock()
        self.hooks.start()

    def finish(
        self, reason: str, time_s: float, error: CodeFailed | None = None, trained: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the run's summary and return it.

        Args:
            reason: reason for which the run ended.
            time_s: time in seconds on the run's clock.
            error: error of the user's code that ended the run; None = none.
            trained: entries of the summary on how tasks were trained; those that are empty are left out.
        """
        self.observer.error = self.observer.error or error
        coordinator, reason = self.parts.coordinator, self.observer.failure or reason
        summary = self.record.summary(
            algorithm=self.parts.experiment.algorithm.name,
            runtime=self.runtime,
            seed=self.parts.experiment.seed,
            version=coordinator.state.version,
            values=coordinator.state.values,
            time_s=time_s,
            reason=reason,
        )
        from raafl.runtime.lifecycle.last_entries import final_metrics, reported, trials

        if not reason.startswith(BREAKS):
            summary["final"] |= final_metrics(self.parts, self.evaluator, self.progress.warn)
        summary.update(cast(Summary, {name: told for name, told in (trained or {}).items() if told}))
        summary["weights_clipped"] = {str(client): n for client, n in sorted(coordinator.admission.clipped.items())}
        summary.update(cast(Summary, reported(coordinator, self.progress.warn)))
        if costs := trials(self.parts.experiment.algorithm.chosen, self.folder if self.resumed else None):
            summary["trials"] = costs
        summary["rates_leave"] = self._remaining
        summary["axes"] = []
        if self._remaining:
            from raafl.parts.select.axis_report import axis_rows

            summary["axes"] = axis_rows(self.parts.submodels)
        summary["kept_whole"] = self.parts.submodels.reasons
        self.saver.close()
        from raafl.runtime.lifecycle.export import save_final

        with self.norms.filled(coordinator.state.values, anew=False):
            where = save_final(self.folder, self.saver, self.parts, self.saved_form, self.progress, summary)
        summary["model"], summary["model_copy"] = where
        told = cast(dict[str, Any], summary)
        told.update(absent())
        self.hooks.end(told)
        failures = (observer.failure for observer in self.observers)
        summary["finished"] = reason = next((failure for failure in failures if failure is not None), reason)
        failed = self.observer.error
        traceback = None
        if failed is not None:
            from raafl.local.failure import leave_traceback

            traceback = leave_traceback(self.folder, reason, failed)
        self.hooks.publish(told)
        if traceback is not None:
            summary["traceback"] = traceback
        self.writer.finish(summary, self.saver.num_failed, self.progress.warnings)
        self.writer.seal(self.writer.sealed(), coordinator.state.version, [], final=True)
        self.hooks.written()
        return told

    def close(self) -> None:
        """Restore the terminal, end the checkpoint thread and write the remaining rows; needed whether or not the run failed."""
        with ExitStack() as ending:  # all of them run, from the last, even if one raises
            ending.callback(self._interrupt.__exit__, None, None, None)
            ending.callback(self.hooks.close)
            ending.callback(self.writer.close)
            ending.callback(self.saver.close)  # before the writer, since it seals the files that it writes
            ending.callback(self.progress.stop)


def evaluator_of(parts: ServerSetup, norms: AsItIs, batches: Callable[..., Iterable[Sized]] | None = None) -> Evaluator:
    """Return the evaluator of the global model on the data by which a run is measured, or on other ``batches``."""
    return Evaluator(
        parts.submodels,
        batches or parts.data.test_batches,
        parts.coordinator.state.values.device,
        norms.fill_,
        seed=evaluation_seed(parts.experiment),
        metrics_live=Rules(parts.experiment.rules).metrics_live,
    )


def form_of(parts: ServerSetup) -> AsItIs:
    """Return the converter of a model's values for evaluations and files, such as one that fills in batch norm statistics."""
    if parts.submodels.batch_norm != "static":
        return AsItIs()
    from raafl.runtime.lifecycle.batch_norm import StaticStatistics

    experiment, coordinator = parts.experiment, parts.coordinator
    num, device = experiment.submodels.static_batches, coordinator.state.values.device
    size = coordinator.fleet.batch_size
    return StaticStatistics(parts.submodels, parts.data, num, size, experiment.seed, device)


def opened(experiment: Experiment, runtime: str) -> AbstractContextManager[SavedRun | None]:
    """Return a context of the run to be resumed, with a checkpoint of it; None = a new run."""
    if not experiment.resume:
        return nullcontext()
    from raafl.runtime.lifecycle import resume

    return resume.opened(experiment, runtime)


def simulate(
    experiment: Experiment,
    config_yaml: str = "",
    observer: RunHooks | None = None,
    transport: Transport | None = None,
) -> tuple[dict[str, Any], Path]:
    """Run an experiment on a virtual clock; return the summary and the run folder.

    Args:
        experiment: settings of the run.
        config_yaml: config of the run as text, to be stored in the run folder.
        observer: observer called during the run; None = none.
        transport: connections to other ranks that also train; None = only this process trains.
    """
    from raafl.runtime.simulation import Simulation

    with ALONE, ExitStack() as stack:
        experiment.check()
        if experiment.subfederation.is_on or experiment.subfederations.number is not None:
            raise BadInput(NO_SERVER_ABOVE)
        saved = stack.enter_context(opened(experiment, "simulated"))
        if saved is not None:
            saved.check_mode(experiment)
        parts = build(experiment, pace=False)
        executor = make_executor(parts, experiment.workers, ranks=transport is not None)
        stack.callback(executor.close)
        # create the run after the executor, which forks and so needs a process without threads
        run = Run(parts, config_yaml, "simulated", saved, observer)
        stack.callback(run.close)
        run.progress.show_executor(executor)
        if transport is not None:
            take_on = cast("RankExecutor", executor).take_on  # `make_executor` returns this class for ranks
            transport.listen(lambda client, peer, connect: take_on(peer, connect), run.progress.warn)
        run.start()
        below, make = None, Simulation
        if experiment.subfederations.size is not None:
            from raafl.runtime.subfederations import Above, RunsBelow

            below, make = RunsBelow(run, executor, stack, saved), Above
            for note in below.notes:
                run.progress.note(note)
        simulation = make(
            parts.coordinator,
            parts.clients,
            executor if below is None else below.executor,
            run.record,
            run.evaluator,
            hooks=run.hooks,
            progress=run.progress,
        )
        if saved is not None:
            saved.restore_clock(simulation.restore)
        reason = simulation.run()
        trained = {"batched": executor.report(), **executor.on_gpu()}
        if below is not None:
            run.saver.close()  # its thread uses the module that the runs below save, too
            trained["subfederations"] = below.finish(reason)
        return run.finish(reason, simulation.now, simulation.error, trained), run.folder
