"""Ask a person at the site for consent: at the terminal, or by a file that a reviewer answers.

In the folder a request is ``ID.json``. The reviewer answers by a file beside it, ``ID.yes`` or ``ID.no``; both are then removed by
the client, and what was asked and answered goes to ``answers.jsonl``. No answer in time is a no, and so is a folder that cannot
be used: without a line in ``answers.jsonl`` there is no consent.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from raafl.errors import BadInput
from raafl.sites.policy import Consent

_LOOK_S = 0.2
_log = logging.getLogger(__name__)


class Consents:
    """Asks people at the site for the consent that its policy requires."""

    def __init__(self, consent: Consent | None, ended: Callable[[], bool] = lambda: False) -> None:
        """Prepare; create the spool folder if it is missing.

        `consent`: whom to ask and for what; None = nobody. Raises BadInput if the folder cannot be written.
        """
        self._consent, self.ended = consent, ended
        self._is_failing = False
        if consent is not None and consent.folder is not None:
            try:
                Path(consent.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise BadInput(
                    f"policy.consent.folder is '{consent.folder}', which cannot be created ({error.strerror}): name "
                    "another folder"
                ) from None

    def given(self, every: Literal["run", "task", "update"], request: Mapping[str, Any]) -> bool:
        """Ask a person for consent and return the answer; return True at once if the policy does not require it here."""
        consent = self._consent
        if consent is None or consent.every != every:
            return True
        shown = {"asks": f"consent to this {every}", **request}
        if consent.folder is None:
            return self._at_terminal(shown, consent.wait_s)
        try:
            is_given = self._by_spool(Path(consent.folder), shown, consent.wait_s)
        except OSError as error:  # the disk is full, or the folder was deleted
            self._warn(consent.folder, error)
            return False
        self._is_failing = False
        return is_given

    def _warn(self, folder: str, error: OSError) -> None:
        """Warn that nobody can be asked for consent; warn again only after the folder has worked in between."""
        if not self._is_failing:
            _log.warning(
                f"policy.consent.folder is '{folder}', in which no file can be written ({error.strerror}): make room, "
                "or create the folder again; until then nobody consents",
                extra={"private": True},
            )
        self._is_failing = True

    def _at_terminal(self, request: Mapping[str, Any], wait_s: float) -> bool:
        """Show the request at the terminal and read a line; anything but yes counts as no."""
        lines = "\n".join(f"  {name}: {value}" for name, value in request.items())
        sys.stderr.write(f"{lines}\nConsent? [y/N] ")
        sys.stderr.flush()
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self.ended():
            if select.select([sys.stdin], [], [], _LOOK_S)[0]:
                return sys.stdin.readline().strip().lower() in ("y", "yes")
        sys.stderr.write("no answer\n")
        return False

    def _by_spool(self, folder: Path, request: Mapping[str, Any], wait_s: float) -> bool:
        """Write the request to the spool folder and wait for the reviewer's answer file."""
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{uuid4().hex[:8]}"
        new, file = folder / f"{name}.new", folder / f"{name}.json"
        yes, no = folder / f"{name}.yes", folder / f"{name}.no"
        try:
            new.write_text(json.dumps(request, indent=2, default=str) + "\n", encoding="utf-8")
            new.rename(file)  # renamed, so that a reviewer never sees a half-written file
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline and not self.ended() and not (yes.exists() or no.exists()):
                time.sleep(_LOOK_S)
            answer = "no" if no.exists() else "yes" if yes.exists() else "none"
            with (folder / "answers.jsonl").open("a", encoding="utf-8") as answers:
                answers.write(json.dumps({"id": name, "answer": answer, **request}, default=str) + "\n")
        finally:
            for one in (new, file, yes, no):
                with suppress(OSError):
                    one.unlink()
        return answer == "yes"
