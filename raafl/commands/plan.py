"""Print predicted times, memory and bytes of a run, or measure this machine (`raafl plan`)."""

from __future__ import annotations

import json
import logging
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.config.argv import check_writable, not_written, own_options, values, whole_number
from raafl.config.plain_check import check_plain
from raafl.errors import BadInput, at_least, parse_address
from raafl.lean_import import quick_imports
from raafl.local.malloc import keep_freed
from raafl.runfolder.append_file import to_json

if TYPE_CHECKING:
    from raafl.devices.profiles import Profile

_log = logging.getLogger(__name__)

HELP = """\
usage: raafl plan --config FILE [--FIELD VALUE ...] [--json]
       raafl plan --measure [FILE] [--address HOST:PORT]
       raafl plan --answer HOST:PORT
       raafl plan --profiles

Says what a run will take, before it is run: parameters, memory, bytes and seconds of a task by submodel and device, who the
stragglers are, which fragments, buffer or deadline to choose, and time per version and utilisation with each algorithm. The
data is loaded and shared out; nothing is trained. Every field of a config is an option, as in `raafl simulate --help`.

  --algorithms A,B      predict these beside the config's own (default: all, or of a model above 300 million parameters none;
                        all = all the same, "" = none)
  --updates N           merged updates to go through (default: the config's max_updates, at most 2000 or 20 a client)
  --measure [FILE]      measure this machine: compute, memory, memory traffic, launches; write it as a device file
                        (measured.yaml), which `devices: FILE` reads; with --config it is in the table of devices as well
  --address HOST:PORT   with --measure: measure the link to the server, where `raafl plan --answer` runs
  --device DEVICE       with --measure: cpu or cuda (default cpu); --threads N of it (default 1, as in a run)
                        without it, cuda: say whether training steps can be captured as CUDA graphs, and why not
  --answer HOST:PORT    answer those who measure their link to this machine, until interrupted
  --profiles            list the devices and fleets that a config may name, with their sources
  --json                print JSON and nothing else"""


def command(argv: Sequence[str], width: int, *, terminal: bool) -> str:
    """Predict times, memory and traffic of a run without training, and return them as text.

    Other options measure this machine as a client device, or list the known devices.

    Raises:
        BadInput: an option or the config is invalid.
    """
    if any(option in argv for option in ("--help", "-h")):
        return HELP
    keep_freed()  # so that speeds are measured with the malloc settings of a client
    own, rest = _split(argv)
    if own.answer is not None:
        return _answer(own.answer)
    if own.profiles:
        return _profiles(width, terminal, as_json="--json" in rest)
    here: list[Profile] = []
    if own.measure is not None:
        here.append(_measure(own, rest))
    if not any(item == "--config" or item.startswith("--config=") for item in rest):
        if here:
            return to_json(asdict(here[0])) if "--json" in rest else f"written to {own.measure}: devices: {own.measure}"
        raise BadInput(
            "`raafl plan` needs a config: give --config FILE, or --measure, --answer or --profiles (see --help)"
        )
    check_plain("plan", rest)
    with quick_imports():
        from raafl.commands.auto import parse_run
        from raafl.lab.plan.plan import make_plan
        from raafl.lab.plan.show import text

        parsed = parse_run("plan", rest)
    names = None if own.algorithms is None else [name for name in own.algorithms.split(",") if name]
    on_gpu = own.measure is None and own.device.startswith("cuda")
    plan = make_plan(parsed.experiment, names, own.updates, here, on_gpu)
    if parsed.as_json:
        return json.dumps(plan.to_json(), allow_nan=False)
    return text(plan, width, terminal=terminal)


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl plan` that are not fields of the config."""
    found = ArgumentParser(prog="raafl plan", exit_on_error=False, add_help=False, allow_abbrev=False)
    found.add_argument("--algorithms")
    found.add_argument("--updates", type=int)
    found.add_argument("--measure", nargs="?", const="measured.yaml")
    found.add_argument("--address")
    found.add_argument("--device", default="cpu")
    found.add_argument("--answer")
    found.add_argument("--profiles", action="store_true")
    return found


def _split(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    own, rest = own_options(parser(), argv)
    at_least("updates", own.updates, 1, optional=True)
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", own.device):
        raise BadInput(f"device is '{own.device}': give cpu or cuda")
    if own.address is not None and own.measure is None:
        raise BadInput("--address needs --measure: give both, or neither")
    if own.measure is not None and Path(own.measure).suffix not in (".yaml", ".yml"):
        raise BadInput(f"measure is '{own.measure}': give a file that ends in .yaml")
    return own, rest


def _answer(address: str) -> str:
    from raafl.devices.measure import Answerer

    answerer = Answerer(address)
    _log.info(f"answering on {parse_address(address)[0]}:{answerer.port}, until interrupted")
    try:
        answerer.serve()
    finally:
        answerer.close()
    return ""


def _measure(own: Namespace, rest: Sequence[str]) -> Profile:
    import torch

    from raafl.devices.files import write_rows
    from raafl.devices.measure import measure_machine

    threads = whole_number("threads", (values(rest, "--threads") or ["1"])[-1])
    if own.device != "cpu" and not (own.device.startswith("cuda") and torch.cuda.is_available()):
        raise BadInput(f"device is '{own.device}': give cpu, or cuda where torch sees a GPU")
    file = Path(own.measure)
    check_writable("measure", file)
    _log.info(f"measuring {own.device}, {threads} threads" + (f", link to {own.address}" if own.address else ""))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        profile = measure_machine(file.stem, own.device, address=own.address)
    finally:
        torch.set_num_threads(before)
    given = {key: value for key, value in asdict(profile).items() if value is not None}
    where = f"{platform.node()}, {platform.machine()}, torch {torch.__version__}, {own.device}, {threads} threads"
    link = f"link to {own.address}" if own.address else "link not measured: free"
    try:
        write_rows(file, [given], f"Measured by `raafl plan --measure` on {where}; {link}.")
    except OSError as error:
        raise not_written("measure", file, error) from error
    return profile


def _profiles(width: int, terminal: bool, *, as_json: bool) -> str:
    from raafl.devices.catalog import catalogue, rows
    from raafl.devices.fleets import FLEET, bundled
    from raafl.lab.plan.show import table

    if as_json:
        return json.dumps(rows())
    found = [[row["device"], row["field"], f"{row['value']:.4g}", row["source"]] for row in rows()]
    shown = table(
        "Devices that a config may name", ["device", "field", "value", "source"], found, width, terminal=terminal
    )
    for name, one in catalogue()["generators"].items():
        shown += f"\n\n{name}: {one['what']}, drawn anew for each client by seed\n  {one['source']}"
    shown += "".join(f"\n\n{name}: {what}" for name, what in catalogue()["shares"].items())
    return shown + "".join(f"\n\n{FLEET}{name}: {one['what']}\n  {one['source']}" for name, one in bundled().items())
