"""Run a client from the command line (`raafl join`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from raafl.config.argv import name_of, names_section
from raafl.config.plain import check_plain
from raafl.config.remote_options import credentials, split, tls_key
from raafl.errors import resolves
from raafl.lean_import import quick_imports
from raafl.runfolder.outcome import REASONS
from raafl.runfolder.signing import Signer

_log = logging.getLogger(__name__)


def command(argv: list[str]) -> int:
    """Run a client until the server dismisses it; return 0 then.

    Raises:
        BadInput: an option, the config, or a certificate is invalid.
        RunFailed: refused, or the server stayed away.
    """
    own, rest = split("join", argv)
    check_plain("join", rest, whole=False)
    if own.address is not None:  # as there is but for --help
        resolves(own.address)

    def say(text: str) -> None:
        _log.info(f"client {own.client}: {text}", extra={"prefix": "raafl, "})

    with quick_imports():
        from raafl.config.parse import parse
        from raafl.runtime.client.join import join
        from raafl.runtime.client.multiprocess import together
        from raafl.runtime.client.setup import ClientSetup
        from raafl.runtime.client.site.admit import admit, open_gate
        from raafl.runtime.client.site.offer import DryRun, look

        gate = open_gate(own.policy, say, looks=own.dry_run)
        has_config = any(name_of(item) in ("--config", "--resume", "--help", "-h") for item in rest)
        parsed = parse("join", rest) if has_config else None

    def make_site(config_yaml: str | None) -> ClientSetup:
        with quick_imports():
            found = parsed or parse("join", rest, config_yaml=config_yaml)
        named = names_section(rest, "--data")
        own_data = named and not own.share_of_data
        experiment, text = found.experiment, found.config_yaml

        def build() -> ClientSetup:
            return ClientSetup.build(experiment, text, own.client, own_data=own_data, data_named=named)

        admitted = partial(admit, gate, experiment, text, build)
        return look(admitted, text, say) if own.dry_run else admitted()

    alone_s = parsed.experiment.waits.alone_s if parsed is not None else None

    def work(make: Callable[[str | None], ClientSetup]) -> int:
        def kept(config_yaml: str | None) -> ClientSetup:
            site = make(config_yaml)
            if own.receipts:
                stack.enter_context(site.receipts_kept(own.keep_inputs, say, Signer.choose(tls_key(known))))
            return site

        known = credentials(own, server=False)
        try:
            with ExitStack() as stack:
                reason = join(
                    own.address, own.client, known, kept,
                    needs_config=parsed is None, proxy=own.proxy, alone_s=alone_s, say=say, gate=gate,
                )  # fmt: skip
        except DryRun:
            return 0
        say(f"the run has ended: {REASONS.get(reason, reason)}")
        return 0

    return together(make_site, work, own.client, say)
