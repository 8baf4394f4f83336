"""Run a client from the command line (`raafl join`)."""

from __future__ import annotations

import logging
import math
import signal
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.config.argv import name_of, names_section, resolves, values
from raafl.config.plain_check import check_plain
from raafl.config.remote_options import split
from raafl.errors import BadInput
from raafl.lean_import import quick_imports
from raafl.log import reports_for_all
from raafl.runfolder.outcome import REASONS
from raafl.runfolder.seals import Signer

if TYPE_CHECKING:
    from raafl.runtime.client.setup import ClientSetup
    from raafl.runtime.lifecycle.service_manager import ServiceManager
    from raafl.sites.gate import SiteGate
    from raafl.transport.tcp.credentials import Credentials

_log = logging.getLogger(__name__)


def command(argv: list[str]) -> int:
    """Run a client until the server tells it to stop, then return 0.

    Raises:
        BadInput: an option, the config, or a certificate is invalid.
        RunFailed: the server refused the client, or could not be reached for too long.
        KeyboardInterrupt: the user ended it by Ctrl-C or SIGTERM.
    """
    own, rest = split("join", argv)
    if reports_for_all():
        check_plain("join", rest, whole=False)
    if own.address is not None:  # None only with --help
        resolves(own.address)

    with quick_imports():
        from raafl.commands.auto import parse_run
        from raafl.runtime.client.join import join
        from raafl.runtime.client.multiprocess import together
        from raafl.runtime.client.setup import ClientSetup
        from raafl.runtime.client.worker import TaskRefused
        from raafl.runtime.lifecycle.service_manager import ServiceManager
        from raafl.runtime.protocol import DRY_RUN

        say = _status_reporter(service := ServiceManager.here(), own.client)
        gate = open_gate_of(own, say)
        has_config = any(name_of(item) in ("--config", "--resume", "--help", "-h") for item in rest)
        parsed = parse_run("join", rest) if has_config else None

    def make_site(config_yaml: str | None) -> ClientSetup:
        with quick_imports():
            found = parsed or parse_run("join", rest, config_yaml=config_yaml)
        named = names_section(rest, "--data")
        experiment, text = found.experiment, found.config_yaml

        def build() -> ClientSetup:
            own_data = named and not own.share_of_data
            return ClientSetup.build(experiment, text, own.client, own_data=own_data, data_named=named)

        if gate is None and not own.dry_run:
            return build()
        from raafl.sites.admit import admit, look

        admitted = partial(admit, gate, experiment, text, build)
        return look(admitted, text, say) if own.dry_run else admitted()

    def work(make: Callable[[str | None], ClientSetup]) -> int:
        known = credentials(own, server=False)
        service.ready(f"client {own.client}: connecting to the server at {own.address}")
        try:
            with sigterm_interrupts(), ExitStack() as stack, nullcontext() if gate is None else gate.logs_kept():
                reason = join(
                    own.address,
                    own.client,
                    known,
                    _with_receipts(make, own, Signer.choose(known.key), say, stack),
                    needs_config=parsed is None,
                    proxy=own.proxy,
                    say=say,
                    gate=gate,
                    alone_s=_given_alone_s(rest) if parsed is None else parsed.experiment.waits.alone_s,
                )
        except TaskRefused as refusal:
            if refusal.server_reason != DRY_RUN:
                raise
            return 0
        say(f"the run has ended: {REASONS.get(reason, reason)}")
        return 0

    return together(make_site, work, own.client, say)


def _given_alone_s(rest: Sequence[str]) -> float | None:
    """Return for how many seconds the options have an absent server looked for; None = they do not say."""
    given = values(rest, "--waits.alone_s")
    if not given:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(given[-1])) < math.inf:
            return seconds
    raise BadInput(f"waits.alone_s is '{given[-1]}': give seconds above 0")


def open_gate_of(own: Namespace, say: Callable[[str], None]) -> SiteGate | None:
    """Return the gate that checks tasks against the policy of the site; None if there is no policy."""
    if own.policy is None:
        return None
    from raafl.sites.admit import open_gate

    return open_gate(own.policy, say, looks=own.dry_run)


def credentials(own: Namespace, *, server: bool) -> Credentials:
    """Find the credentials of `serve` or `join`: a token from the parent process, or the certificate files.

    Raises:
        BadInput: there is no certificate, or it is not clear which one to use.
    """
    from raafl.transport.tcp.credentials import LocalToken

    named = {name: getattr(own, f"tls_{name}") for name in ("ca", "cert", "key", "crl")}
    if not any(named.values()) and (token := LocalToken.from_environment()) is not None:
        return token
    from raafl.sites.credentials import TlsFiles

    found = replace(TlsFiles.find(Path(own.certs), server=server, given=named), run=own.run)
    found.context(server=server)
    found.check()
    return found


def _status_reporter(service: ServiceManager, client: int) -> Callable[[str], None]:
    """Make a function that shows a status line of the client to the user and reports it to systemd."""

    def say(text: str) -> None:
        _log.info(f"client {client}: {text}", extra={"prefix": "raafl, ", "private": True})
        service.status(text)

    return say


def _with_receipts(
    make: Callable[[str | None], ClientSetup],
    own: Namespace,
    signer: Signer | None,
    say: Callable[[str], None],
    stack: ExitStack,
) -> Callable[[str | None], ClientSetup]:
    """Wrap ``make``, a function that sets up a client: if the user wants receipts, its clients write them."""

    def kept(config_yaml: str | None) -> ClientSetup:
        site = make(config_yaml)
        if own.receipts:
            from raafl.sites.receipts import receipts_kept

            stack.enter_context(receipts_kept(site, own.keep_inputs, say, signer))
        return site

    return kept


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Return a context in which SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does; for a client, which has no state to save.

    An earlier handler of SIGTERM is called, too.
    """
    if (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
