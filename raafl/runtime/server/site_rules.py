"""Hold a session with a client of another site to what the site may claim, and to what the site wants to have proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raafl.core.types import ClientInfo
from raafl.runfolder.signing import Signer
from raafl.runtime.fields import LogLine, SignedHead
from raafl.runtime.protocol import Answer, Assign, Failed
from raafl.runtime.server.session_protocol import SessionExtension, SessionProtocol
from raafl.runtime.server.terms import Task
from raafl.submodel import FlatTensors
from raafl.transport import Refused


@dataclass(frozen=True, slots=True)
class SiteRules:
    """Limits for the clients of one site."""

    clients: frozenset[int] = frozenset()  # client ids that the site may use
    max_samples: int | None = None  # largest number of training samples that one client may claim; None = any number
    own_data: bool = True  # whether clients may train on data of their own
    # smallest and largest allowed value for fields of the device profile
    profile: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def check(self, info: ClientInfo) -> None:
        """Raise `Refused` for a client that claims more, such as samples, than its site may; the client gets the reason."""
        if info.own_data and not self.own_data:
            raise Refused("own-data", f"client {info.id} has data of its own, which the server forbids its site")
        if self.max_samples is not None and info.num_samples > self.max_samples:
            raise Refused(
                "too-many-samples",
                f"client {info.id} says that it has {info.num_samples} samples: its site may have {self.max_samples} at most",
            )
        for name, (least, most) in self.profile.items():
            value = getattr(info.profile, name)
            if value is None or not least <= value <= most:
                raise Refused(
                    "profile",
                    f"client {info.id} says that its {name} is {value}: its site may claim {least:g} to {most:g}",
                )


ANYTHING = SiteRules()
"""No rules, for clients that are processes of the server's own command."""


class SiteSession(SessionExtension):
    """A session with a client of another site: rules for what it may claim, signed heads of the journal, its log lines."""

    def __init__(
        self,
        session: SessionProtocol,
        rules: Callable[[int], SiteRules],
        signer: Signer | None,
        take_logs: Callable[[int, Sequence[LogLine]], None],
    ) -> None:
        """Store the rules and the signer.

        `rules`: returns the limits of the client's site. `signer`: signs the journal's hash that is sent with each
        task; None = unsigned. `take_logs`: called on any thread with the client's id and its log lines.
        """
        super().__init__(session)
        self._rules, self._signer, self._take_logs = rules(session.client), signer, take_logs

    def check(self, info: ClientInfo) -> None:
        """Refuse a client that claims more than its site may."""
        self._rules.check(info)

    def before(self, task: Task, message: Assign, values: FlatTensors) -> tuple[Assign, FlatTensors]:
        """Sign the journal's head, which the site keeps as evidence."""
        if task.head is None:
            return message, values
        return replace(message, head=SignedHead.sign(task.head, task.assignment.id, self._signer)), values

    def after(self, message: Answer | Failed) -> None:
        """Store the log lines that the site lets the server have."""
        self._take_logs(self.session.client, message.logs)
