"""Define limits on what the clients of a site may claim about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raafl.core.types import ClientInfo
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
