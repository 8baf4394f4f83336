"""Records that cross a boundary: what clients are, what they are asked, what they answer, what happens when.

Times are seconds on the runtime's clock since the run began: virtual when simulated, else the wall clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raafl.devices.profiles import Profile
from raafl.errors import TaskFailed
from raafl.submodel.flat import FlatTensors
from raafl.submodel.spec import FULL, Spec

OUT_OF_MEMORY = "out-of-memory"
"""Why an update is refused, `Update.refusal`, of a client whose memory was too small for the task."""


HUGE_NORM, OVERFLOW = "huge-norm", "overflow"
"""Why an update is refused: its norm is far above those accepted before; its merge would leave numbers that are not finite."""

DIVERGED = frozenset({"non-finite", HUGE_NORM, OVERFLOW})
"""Refusals that a client may owe to the global model that it was sent."""

NUM_TESTED = "test/num_samples"
"""In `Update.metrics`: on how many samples the client has measured what it trained."""


class Warn(str):
    """A note that the run may not be what was asked for: said as a warning, kept in the summary, an error with `strict`."""


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """What the server knows of one client.

    Attributes:
        id: 1..N; the rank under torchrun.
        num_samples: size of the client's training data, |D_n|.
        profile: what its device and link can do.
        incarnation: how often it has joined before; separates a client that came back from the one that was lost.
        own_data: it trains on data that only it has, not on its share of the run's.
    """

    id: int
    num_samples: int
    profile: Profile = field(default_factory=Profile)
    incarnation: int = 0
    own_data: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A `select` part's answer: which submodel, and how much work on it.

    Attributes:
        spec: the submodel.
        region: index j of the region whose merges q(j) this work counts towards (0 for a whole model).
        num_epochs: local epochs; None = the run's own setting.
        num_steps: local steps; None = the run's own setting.
        extra: what the local part is to be told beside this: small plain data, as JSON can say it.
    """

    spec: Spec = FULL
    region: int = 0
    num_epochs: int | None = None
    num_steps: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One task: train this submodel of that version for so long, from this seed.

    Attributes:
        id: unique in the run, counted from 1.
        client: who; incarnation: in which of its lives.
        task: how many tasks this client had before.
        version: global version tau the submodel is cut from.
        seed: decides data order, dropout and every other draw of the task.
        pace_s: in a wall-clock run, the least time the task may take (an emulated slow device); 0 = as fast as it goes.
        lr_scale: factor of the optimizer's learning rate, by the run's schedule.
        extra: for the local part, see `Work.extra`.
    """

    id: int
    client: int
    incarnation: int
    task: int
    version: int
    spec: Spec
    region: int
    num_epochs: int | None
    num_steps: int | None
    seed: int
    assigned_s: float
    pace_s: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    lr_scale: float = 1.0


@dataclass(slots=True)
class Update:
    """A client's answer. The tensors are only lent: they may be overwritten once `Coordinator.handle` has returned.

    Attributes:
        tensors: trained values, or trained minus received ones, as the algorithm's merge asks (`Merge.sends`); until the
            coordinator has looked at it, with the bundles behind them (`raafl.core.payload`).
        num_samples: training samples processed per epoch, |D_n|; the weight of the update in a mean.
        metrics: means over the task of the training loss and of what the module logged.
        train_s: seconds the client spent in the task, on the runtime's clock.
        fingerprint: hex digest of the tensors' bytes, for the journal.
        extra: what the local part tells the merge beside the tensors: small plain data, as JSON can say it. It comes from
            the client: a merge that uses it looks at it in `Merge.reject_reason`.
        bundles: what the local part sends beside the values, `Local.up`, by name; lent as the tensors are.
    """

    assignment: int
    client: int
    incarnation: int
    tensors: FlatTensors
    num_samples: int
    num_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    fingerprint: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    bundles: Mapping[str, FlatTensors] = field(default_factory=dict)
    refusal: str | None = None  # set by the transport when the content may not be merged (non-finite, wrong layout)


# ---- events: what the coordinator is told ----


@dataclass(frozen=True, slots=True)
class Joined:
    """A client is there and idle."""

    client: ClientInfo


@dataclass(frozen=True, slots=True)
class Arrived:
    """An update has come in whole."""

    update: Update


@dataclass(frozen=True, slots=True)
class Lost:
    """A client is gone, with whatever it was working on; ``failure`` is what it said of the user's code, if that is why.

    ``counts``: it let a task's time go by without an answer, which counts as a refused update does.
    """

    client: int
    reason: str
    incarnation: int | None = None
    failure: TaskFailed | None = None
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer set by `SetTimer` is due."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The runtime wants the run to end: a target was met, time is up, the user asked."""

    reason: str


Event = Joined | Arrived | Lost | Timer | Stop


# ---- actions: what the coordinator asks for ----


@dataclass(frozen=True, slots=True)
class Assign:
    """Send this assignment with its submodel, cut from the state as it is now."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `Timer(id)` at this time."""

    id: int
    at: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure the global model as it is now."""

    version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save the state as it is now."""

    version: int


@dataclass(frozen=True, slots=True)
class Settled:
    """An assignment has met its end; said exactly once for each.

    Attributes:
        outcome: merged, refused:REASON, lost:REASON or unused.
        version: global version after the merge, or at the time.
        staleness: merges between the assignment's version and its own merge, t - tau.
    """

    assignment: Assignment | None
    client: int
    outcome: str
    version: int
    staleness: int
    update: Update | None = None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Let a client go that no work suits, or whose words raised ``error``; it is in the fleet no more."""

    client: int
    incarnation: int
    reason: str
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Suspend:
    """A client whose updates were refused too often in a row is asked for nothing until then; it may stay connected."""

    client: int
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on: save it as it is, then send `Stop` with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing more will be asked."""

    reason: str


Action = Assign | SetTimer | Evaluate | Checkpoint | Settled | Dismiss | Suspend | Fail | Finish

ENDS = ("max_updates", "max_time", "target")
"""Reasons of a run that has come to its end; one that ends for any other can be resumed."""

RESTART = "restart"
"""Why clients are lost whose server was started anew."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When the run starts, measures, saves and ends.

    Attributes:
        min_clients: work starts once this many have joined.
        count_lost: those lost before the start count as joined, since they cannot come back.
        max_updates: end after this many merged updates.
        max_time_s: end at this time.
        eval_every: versions between evaluations.
        checkpoint_every: versions between checkpoints; None = only at the end.
        num_clients: of the run; it fails for refused updates only when so many have taken part, and all of them are bad.
        max_weight: a client's own data weigh no more than so many times the (lower) median of the clients there; None =
            whatever it says. A share of the run's data is bounded by what was dealt.
        max_refused: updates of one client refused in a row, after which it is kept out for a while, growing.
    """

    min_clients: int = 1
    count_lost: bool = True
    max_updates: int | None = None
    max_time_s: float | None = None
    eval_every: int = 1
    checkpoint_every: int | None = None
    num_clients: int = 1
    max_weight: float | None = None
    max_refused: int = 3


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part, e.g. (run seed, client, task number)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
