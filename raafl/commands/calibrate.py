"""Fit device profiles to the tasks of a real run, and compare the virtual clock with real runs (`raafl calibrate`)."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.config.argv import check_writable, not_written, options_of
from raafl.errors import BadInput, at_least
from raafl.lean_import import quick_imports
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.devices.profiles import Profile
    from raafl.lab.plan.calibrate import Check, Fit, RealRun


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl calibrate`."""
    found = ArgumentParser(
        prog="raafl calibrate",
        exit_on_error=False,
        description="Fit a device profile to the first tasks of each client of a real run, say its error on the others, and "
        "write a file for `devices:`. With --check, simulate real runs with these profiles and print predicted beside real "
        "times; nothing is trained.",
    )
    found.add_argument("run", type=Path, metavar="RUN", help="folder of a run on the wall clock, of raafl fit or serve")
    found.add_argument(
        "--check", type=Path, nargs="+", default=[], metavar="RUN", help="real runs to predict, such as RUN"
    )
    found.add_argument("--tasks", type=int, help="tasks of a client to fit at most (default 20, and at most half)")
    found.add_argument(
        "--base",
        type=Path,
        metavar="FILE",
        help="device file of raafl plan --measure on such a client: how computation, memory traffic, launches and the link "
        "compare (default: the profile that the client had in the run)",
    )
    found.add_argument("--output", type=Path, metavar="FILE", help="device file to write (default: calibrated.yaml)")
    found.add_argument(
        "--trust_config", action="store_true", help="import what the run's config names, though it is not raafl's own"
    )
    found.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return found


def command(argv: Sequence[str], width: int, *, terminal: bool) -> str:
    """Fit device profiles to the measured task times of a real run, write them to a file, and return the text to print.

    With `--check`, also predict the times of other real runs from these profiles, and compare them.

    Raises:
        BadInput: an option is wrong, or a folder does not contain a run on the wall clock.
    """
    own = options_of(parser(), argv)
    at_least("tasks", own.tasks, 1, optional=True)
    output = own.output or Path("calibrated.yaml")
    if output.suffix not in (".yaml", ".yml"):
        raise BadInput(f"output is '{output}': give a file that ends in .yaml")
    check_writable("output", output)
    with quick_imports():
        from raafl.config.parse import load_run
        from raafl.devices.files import write_rows
        from raafl.lab.plan.calibrate import MOST_FITTED, calibrate, check, device_rows, profiles_of, read_real

    base = None if own.base is None else _base(own.base)

    def real(folder: Path) -> RealRun:
        return read_real(folder, load_run(folder, trusted=own.trust_config, for_replay=True), base)

    for option, folder in (("run", own.run), *(("check", folder) for folder in own.check)):
        if not folder.is_dir():
            raise BadInput(
                f"{option} is '{folder}', which is not a folder: name that of a real run, of raafl fit or serve"
            )
    run = real(own.run)
    checked = [run if folder == own.run else real(folder) for folder in own.check]  # before anything is written
    fits = calibrate(run, own.tasks or MOST_FITTED)
    profiles = profiles_of(run, fits)
    said = [_said(fit) for _, fit in sorted(fits.items())]
    comment = f"Calibrated by `raafl calibrate` from {quantity(len(run.tasks), 'task')} of {own.run}.\n" + "\n".join(
        said
    )
    try:
        write_rows(output, device_rows(profiles.values()), comment)
    except OSError as error:
        raise not_written("output", output, error) from error
    checks = [check(one, fits) for one in checked]
    warnings = list(_warnings(run, fits))
    if own.json:
        rows = [asdict(fit) for _, fit in sorted(fits.items())]
        return json.dumps(
            {"output": str(output), "clients": rows, "checks": [asdict(one) for one in checks], "warnings": warnings}
        )
    return "\n".join(
        [_table(run, fits, profiles, width, terminal), *warnings, f"written: devices: {output}", *map(_checked, checks)]
    )


def _base(file: Path) -> Profile:
    from raafl.devices.files import load_devices

    try:
        devices = load_devices(file)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if len(devices) > 1:
        raise BadInput(f"base is '{file}', which has {len(devices)} devices: give a file with one")
    return replace(devices[0].profile, name="base")


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


def _said(fit: Fit) -> str:
    errors = f"a task {_percent(fit.task_error)}, all together {_percent(fit.sum_error, sign=True)}"
    return (
        f"client {fit.client}: {quantity(fit.num_fitted, 'task')} fitted; error on {fit.num_held_out} others: {errors}"
    )


def _table(run: RealRun, fits: dict[int, Fit], profiles: Mapping[int, Profile], width: int, terminal: bool) -> str:
    from raafl.lab.plan.show import table

    names = [
        "client",
        "fitted",
        "held out",
        "GFLOP/s",
        "overhead s",
        "jitter",
        "error a task",
        "of the sum",
        "first task",
    ]
    rows = []
    for client, fit in sorted(fits.items()):
        first = "-" if fit.warm_up_s is None else f"{fit.warm_up_s:+.3g} s"
        rows.append(
            [
                str(client),
                str(fit.num_fitted),
                str(fit.num_held_out),
                f"{profiles[client].flops_per_s / 1e9:.4g}",
                f"{fit.overhead_s:.3g}",
                f"{fit.jitter:.3g}",
                _percent(fit.task_error),
                _percent(fit.sum_error, sign=True),
                first,
            ]
        )
    return table(
        f"Calibrated from {quantity(len(run.tasks), 'task')}; errors are of held-out tasks",
        names,
        rows,
        width,
        terminal=terminal,
    )


def _warnings(run: RealRun, fits: dict[int, Fit]) -> list[str]:
    found = []
    if run.num_paced:
        found.append(
            f"{run.num_paced} of {len(run.tasks)} tasks took as long as an emulated device, so the profiles "
            "describe that device; run with emulate: false to calibrate this machine"
        )
    if run.experiment.overlap:
        found.append(
            "the run has overlap, so where an update waited until the one before was sent, the wait counts as computing: "
            "calibrate on a run with overlap: false"
        )
    short = [str(client) for client, fit in sorted(fits.items()) if not fit.num_held_out]
    if short:
        found.append(
            f"the error is unknown for client {', '.join(short[:20])}: it has too few tasks; let it finish three or "
            "more"
        )
    missing = [str(info.id) for info in run.world.clients if info.id not in fits]
    if missing:
        found.append(f"client {', '.join(missing[:20])} finished no task: the file has the profile of the run for it")
    return found


def _checked(one: Check) -> str:
    if one.predicted_s is None or one.predicted_update_s is None:
        return f"{one.run}: cannot be predicted: {one.problem}"
    return (
        f"{one.run}: predicted {one.predicted_s:.4g} s, real {one.real_s:.4g} s ({_percent(one.error, sign=True)}); an update "
        f"{one.predicted_update_s:.4g} s, real {one.real_update_s:.4g} s; a task's error {_percent(one.task_error)}"
    )
