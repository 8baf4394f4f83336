"""Decide whether a process may take part in a run: compare its model, config and version, and check what a client claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from raafl._version import __version__
from raafl.core.restoring import client_from_json
from raafl.core.saving import client_to_json
from raafl.core.types import ClientInfo
from raafl.devices.recordings import full_profile
from raafl.sanitize import sanitize_text
from raafl.submodel import Submodels
from raafl.transport import Refused

PROTOCOL: Final = 1
"""Version of the messages and of what both ends derive from them (layouts, seeds, digests); see CONTRIBUTING.md, A release.

It decides who is admitted, so that a server of another package version keeps its clients.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """Fingerprints of a process's model, config and version, which two processes compare before they exchange tensors.

    Attributes:
        model: fingerprint of the layout of all parameters.
        base: digest of the frozen parameters; None = there are none.
        config: digest of each section of the config that must be equal; None = not compared.
        raafl: version of the package; compared only between processes on one machine.
        protocol: version of the message protocol.
    """

    model: object
    base: object = None
    config: Mapping[str, object] | None = None
    raafl: object = __version__
    protocol: object = PROTOCOL

    @classmethod
    def of(cls, submodels: Submodels, config: Mapping[str, str] | None = None) -> Self:
        """Compute the fingerprints of this process's model and config, with its version, to compare with a peer's."""
        base = submodels.base
        digest = None if base is None else base.digest
        return cls(submodels.layout().fingerprint, digest, config, __version__, PROTOCOL)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Read the fingerprints of a peer's model and config from its first message (HELLO); they are only compared with ours."""
        config = meta.get("config")
        config = config if isinstance(config, dict) else None
        return cls(meta.get("model"), meta.get("base"), config, meta.get("raafl"), meta.get("protocol"))

    def to_meta(self) -> dict[str, Any]:
        """Convert the fingerprints of model and config, and the versions, to fields of the first message (HELLO)."""
        config = None if self.config is None else dict(self.config)
        return {
            "protocol": self.protocol,
            "raafl": self.raafl,
            "model": self.model,
            "base": self.base,
            "config": config,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field in which the identities of two processes differ, and both values as text of at most 64 characters."""

    field: str
    ours: str
    theirs: str


def agree(ours: Identity, theirs: Identity, *, same_package: bool = False) -> Difference | None:
    """Compare the models, configs and versions of two processes; return the first difference, or None if they agree.

    The protocol version is compared first, since other versions may have other fields. If the peer trains on data of
    its own, the config section ``data`` is not compared.
    """
    if ours.protocol != theirs.protocol:
        return _difference("protocol", ours.protocol, theirs.protocol)
    if same_package and ours.raafl != theirs.raafl:
        return _difference("raafl", ours.raafl, theirs.raafl)
    for name, digest in (ours.config or {}).items():
        other = None if theirs.config is None else theirs.config.get(name)
        if other != digest and not (name == "data" and other == "own"):
            return _difference("config" if theirs.config is None else f"config.{name}", digest, other)
    if ours.model != theirs.model:
        return _difference("model", ours.model, theirs.model)
    if ours.base != theirs.base:
        return _difference("base", ours.base, theirs.base)
    return None


def _difference(name: str, ours: object, theirs: object) -> Difference:
    return Difference(name, sanitize_text(ours, 64), sanitize_text(theirs, 64))


def in_words(different: Difference, client: int) -> str:
    """Return a message for a client whose model, config or version differs from the server's."""
    if different.field == "config":
        return "the client sent no config"
    if different.field.startswith("config."):
        return f"different config: '{different.field[7:]}' differs from the server's config.yaml"
    if different.field == "base":
        return (
            f"different frozen parameters: the server's have digest {different.ours[:16]}, those of client {client} "
            f"{different.theirs[:16]}; they are not sent: give both the same pretrained weights"
        )
    return f"different {different.field}: the server has {different.ours}, client {client} has {different.theirs}"


def client_info(
    hello: Mapping[str, Any],
    num_samples: int,
    known: ClientInfo,
    incarnation: int,
    *,
    own_data: bool = True,
    max_below: int = 0,
) -> ClientInfo:
    """Check the fields of a client's first message (HELLO), and build the coordinator's description of the client from it.

    Raises:
        Refused: the description is invalid, or claims more than it may; the client gets the reason.
    """
    profile, client = hello.get("profile"), known.id
    try:
        if not isinstance(profile, dict):
            raise ValueError("the profile is not a mapping")
        profile = full_profile(profile, client_to_json(known)["profile"])
        profile["name"] = sanitize_text(profile.get("name", "default"))
        info = client_from_json({**hello, "client": client, "incarnation": incarnation, "profile": profile})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Refused("bad-json", f"profile of client {client}: {sanitize_text(error)}") from None
    if type(info.below) is not int or not 0 <= info.below <= max_below:
        raise Refused(
            "subfederation",
            f"client {client} stands for {sanitize_text(info.below, 20)} clients, as a subfederation, but guard.max_below of "
            f"this run is {max_below or 'null'}",
        )
    if info.own_data and not own_data:
        raise Refused("own-data", f"client {client} has data of its own, which guard.own_data of this run forbids")
    if known.num_samples and not info.own_data and num_samples > known.num_samples:
        raise Refused(
            "too-many-samples",
            f"client {client} says that it has {num_samples} samples, but its share of the run's data is "
            f"{known.num_samples}: it has other data than the run",
        )
    # a profile takes half a kilobyte, which counts for ten thousand clients
    return replace(info, profile=known.profile) if info.profile == known.profile else info
