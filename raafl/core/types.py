"""Define the records of a run: clients, work, assignments, updates, events and actions; and the base class of parts.

Times are seconds on the run's clock since its start: virtual time in a simulation, else the wall clock.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raafl.core.options import Subfederation
from raafl.devices.profiles import Profile
from raafl.errors import BadInput, TaskFailed
from raafl.submodel.flat import FlatTensors
from raafl.submodel.spec import FULL, Spec

_CLOSE = 0.8
"""Share of equal characters above which a name counts as a misspelt hook: weight and weigh have 0.91."""


class Part:
    """Base class of an algorithm's five parts.

    The runtime calls only the public methods that a part's base class defines. To define another public method with
    nearly the same name as one of these is an error, since it is probably a misspelt override.
    """

    __slots__ = ()

    def __init_subclass__(cls, **more: object) -> None:
        """Check a new subclass: raise `BadInput` for a method named nearly as a hook; let a user's hooks check what they return."""
        super().__init_subclass__(**more)
        bases = [base for base in cls.__mro__[1:] if issubclass(base, Part) and base is not Part]
        known = {name for base in bases for name in vars(base) if not name.startswith("_")}
        for name, value in vars(cls).items():
            is_method = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if name.startswith("_") or name in known or not is_method:
                continue
            if close := difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE):
                raise BadInput(
                    f"{cls.__name__} has a method '{name}', which nothing calls: {bases[0].__name__} has no "
                    f"'{name}', did you mean '{close[0]}'? A helper method needs another name, such as '_{name}'"
                )
        if not cls.__module__.startswith("raafl."):
            from raafl.core.returned import check_returns

            check_returns(cls)


OUT_OF_MEMORY = "out-of-memory"
"""Why an update is refused, `Update.refusal`, of a client whose memory was too small for the task."""


POLICY = "policy"
"""Why an update is refused, `Update.refusal`, of a client whose site does not allow the task; no more is told of it."""

UNANSWERED = frozenset({OUT_OF_MEMORY, POLICY})
"""Reasons with which a client itself reports that it sends no update."""

HUGE_NORM, OVERFLOW = "huge-norm", "overflow"
"""Why an update is refused: its norm is far above those accepted before; its merge would leave numbers that are not finite."""

DIVERGED = frozenset({"non-finite", HUGE_NORM, OVERFLOW})
"""Reasons of refusals that may be due to the global model that the client received."""

NUM_TESTED = "test/num_samples"
"""Key in `Update.metrics`: number of samples on which the client has tested the model that it trained."""


class Warn(str):
    """A warning about a setting that is probably a mistake.

    It is logged and written to the summary; ``strict`` makes it an error.
    """


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """The server's description of a client.

    Attributes:
        id: client id, 1 to N; the rank under torchrun.
        num_samples: number of training samples |D_n|.
        profile: speed, memory and network link of the client's device.
        incarnation: number of times that the client had joined before, which distinguishes the present visit from
            earlier ones.
        own_data: whether the client trains on its own data instead of its share of the run's data.
        below: number of clients of a subfederation, a client whose local training is a federation; 0 = a plain client.
    """

    id: int
    num_samples: int
    profile: Profile = field(default_factory=Profile)
    incarnation: int = 0
    own_data: bool = False
    below: int = 0

    @property
    def stands_for(self) -> int:
        """Number of clients that this one stands for: those below it, or 1."""
        return max(self.below, 1)


@dataclass(frozen=True, slots=True)
class Work:
    """Work that a `select` part has chosen for a client: the submodel, and how long to train it.

    Attributes:
        spec: submodel to train.
        region: index j of the region, a separately counted part of the model, whose merge count q(j) this work
            increases; 0 for a whole model.
        num_epochs: number of local epochs; None = the run's setting.
        num_steps: number of local steps; None = the run's setting.
        extra: small plain data, as JSON can hold it, that the local part reads.
    """

    spec: Spec = FULL
    region: int = 0
    num_epochs: int | None = None
    num_steps: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One task for one client: train a submodel of a given version, for a given length, from a given seed.

    Attributes:
        id: number of the assignment, unique in the run, counted from 1.
        client: id of the client.
        incarnation: number of times that the client had joined before, as in `ClientInfo`.
        task: number of tasks that the client had before.
        version: global version tau from which the submodel is cut.
        spec: submodel to train, as in `Work`.
        region: index j of the region, as in `Work`.
        num_epochs: number of local epochs, as in `Work`.
        num_steps: number of local steps, as in `Work`.
        seed: seed of every random choice in the task, such as data order and dropout.
        assigned_s: time of the assignment on the run's clock, in seconds.
        pace_s: shortest duration of the task in a wall-clock run, in seconds, which emulates a slow device; 0 = no
            pause.
        lr_scale: factor on the optimizer's learning rate, from the run's schedule.
        extra: plain data that the local part reads, from `Work.extra`.
        next_seed: seed of the client's next task, if it may begin that before it arrives; None = it may not.
        next_lr_scale: expected factor ``lr_scale`` of that task.
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
    next_seed: int | None = None
    next_lr_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SumGroup:
    """Group of updates that the server may read only as a sum (secure aggregation, docs/secure-aggregation.md)."""

    members: tuple[int, ...]  # ids of the assignments whose updates form the sum
    scale: float  # largest weight in the group, by which all weights were divided
    masked: bool = False  # whether random masks hide the update's tensors, so that a digest of them is useless


@dataclass(frozen=True, slots=True)
class Contribution:
    """Contribution of the clients with one submodel to a subfederation's update; numbers are sums over these clients.

    Where a task had several merges below, they are divided by their number.
    """

    spec: Spec
    num_updates: float
    num_samples: int
    num_steps: int


@dataclass(slots=True)
class Update:
    """A client's answer to an assignment.

    The tensors are only valid until `Coordinator.handle` returns; then their storage may be reused.

    Attributes:
        tensors: trained values, or their difference from the received ones (see `Merge.sends`). Before the coordinator
            separates them, the bundles (extra tensors) follow in the same storage.
        num_samples: number of training samples |D_n| of the client; weight of the update in a mean.
        metrics: means over the task of the training loss and of the other values that the module logged.
        train_s: duration of the whole task on the client in seconds of the run's clock.
        down_s, up_s: seconds of that duration that the download and the upload took.
        fingerprint: hex digest of the tensors' bytes, for the journal.
        extra: small plain data from the client for the merge. A merge that uses it must check it in
            `Merge.reject_reason`, since a client may send anything.
        bundles: extra tensors that the local part sends beside the values (`Local.up`), by name; valid as long as
            ``tensors``.
        group: group of updates that the server can read only as a sum; None = the server reads this update by itself.
        work: plain data of the task that the update answers, `Assignment.extra`, as the coordinator has it.
        contributions: what the update of a subfederation is the mean of: an element weighs as much as the clients that
            have trained it. Empty = the update of one client.
        journal: head of the journal of a subfederation's run, when this update was made; empty from other clients.
    """

    assignment: int
    client: int
    incarnation: int
    tensors: FlatTensors
    num_samples: int
    num_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    fingerprint: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    bundles: Mapping[str, FlatTensors] = field(default_factory=dict)
    group: SumGroup | None = None
    work: Mapping[str, Any] = field(default_factory=dict)
    contributions: tuple[Contribution, ...] = ()
    journal: str = ""
    # reason for which the transport found the content unfit to merge (non-finite, wrong layout)
    refusal: str | None = None

    def limit_samples(self, most: int) -> None:
        """Let this update count as ``most`` samples, where it has more."""
        parts = self.contributions
        self.contributions = tuple(
            replace(one, num_samples=max(one.num_samples * most // self.num_samples, 1)) for one in parts
        )
        self.num_samples = most

    def difference(self, other: Update) -> str:
        """Describe the first difference from another update of the same task; empty = they are equal to the bit."""
        if self.tensors.fingerprint() != other.tensors.fingerprint():
            return "other values"
        if repr(self.metrics) != repr(other.metrics):
            return f"other metrics ({self.metrics} and {other.metrics})"
        one, two = ((update.num_samples, update.num_steps, update.extra, update.refusal) for update in (self, other))
        return "" if one == two else "another answer"

    @property
    def num_updates(self) -> float:
        """Number of clients' updates in this one: 1, or as many as a subfederation has merged."""
        return sum(one.num_updates for one in self.contributions) if self.contributions else 1.0

    @property
    def needs_fingerprint(self) -> bool:
        """Whether a digest of the tensors must still be computed for the journal; masked tensors need none."""
        return not self.fingerprint and (self.group is None or not self.group.masked)


# ---- events: passed to the coordinator ----


@dataclass(frozen=True, slots=True)
class Joined:
    """Event: a client has joined and is idle."""

    client: ClientInfo


@dataclass(frozen=True, slots=True)
class Arrived:
    """Event: an update has arrived completely."""

    update: Update


@dataclass(frozen=True, slots=True)
class Sending:
    """Event: a client has trained a task and begun to send its update, so that it can be given the next task.

    Occurs only where a client may train its next task while it sends its last update (`Coordinator.overlap`).
    """

    client: int  # id of the client
    incarnation: int  # number of times that the client had joined before
    assignment: int  # id of the trained task's assignment


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a client disconnected. Its current task is lost, as is an update of which only a part has arrived.

    Attributes:
        failure: error of the user's code on the client, if it caused the loss; else None.
        counts: whether this loss counts like a refused update, because the client missed a task's deadline.
    """

    client: int
    reason: str
    incarnation: int | None = None
    failure: TaskFailed | None = None
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Timer:
    """Event: a timer that `SetTimer` had set has expired."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Event: the runtime ends the run, because of a target, a limit or the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """Event: the server above has sent a subfederation its next task, and the values that it starts from.

    Attributes:
        task: id of the task's assignment, as the server above counts.
        version: version of the model above.
        spec: submodel that was sent, within which clients train.
        tensors: its values, in the layout that is sent.
        fingerprint: hex digest of the tensors' bytes, for the journal.
    """

    task: int
    version: int
    spec: Spec
    tensors: FlatTensors = field(compare=False)
    fingerprint: str = ""


Event = Joined | Arrived | Sending | Lost | Timer | Stop | Received


# ---- actions: returned by the coordinator, for the runtime to perform ----


@dataclass(frozen=True, slots=True)
class Assign:
    """Action: send an assignment with its submodel, cut from the current global state."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Action: deliver the event `Timer(id)` at the given time."""

    id: int
    at: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Action: evaluate the current global model."""

    version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Action: save a checkpoint of the current state."""

    version: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Action: record the end of an assignment; issued exactly once for each."""

    assignment: Assignment | None
    client: int
    outcome: str  # end of the assignment: merged, refused:REASON, lost:REASON or unused
    version: int  # global version after the merge, or at the time of the end
    staleness: int  # number of merges between the assignment's version and the merge of its update
    update: Update | None = None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Action: disconnect a client. No submodel is small enough for it, or its data raised ``error``."""

    client: int
    incarnation: int
    reason: str
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Suspend:
    """Action: give a connected client no work until the given time, since too many of its updates were refused."""

    client: int
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: end the run as failed: save the state, then send `Stop` with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Action: end the run; no further action follows it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Action: record that a part of the algorithm has changed a setting of its own after measuring the run.

    Attributes:
        setting: name of the setting, an argument of the algorithm's factory.
        before: value of the setting until now.
        after: value of the setting from now on.
        measured: measured value of the quantity that the setting follows.
        predicted: predicted value of this quantity, for which the configured setting was chosen.
        quantity: name of the quantity, in words.
    """

    setting: str
    before: float
    after: float
    measured: float
    predicted: float
    quantity: str


Action = Assign | SetTimer | Evaluate | Checkpoint | Settled | Dismiss | Suspend | Fail | Finish | Adjusted

EPSILON = "epsilon"
"""Reason of a run that has ended because its next merge would have spent more privacy than it may."""

ENDS = ("max_updates", "max_time", "target", EPSILON)
"""Reasons with which a run is finished; it is resumed only for a farther goal, one that ended for another reason always."""

RESTART = "restart"
"""Reason of a loss: the server was started again."""

ERROR = "error"
"""Reason of a loss and of a refusal: a message of the client raised an exception."""

LATE = "late"
"""Reason of a refusal: the update arrived after its round was closed."""

NO_SPACE = "no-space"
"""Reason of a loss: the server's disk has no room for the client's task or update."""

LOSSES = frozenset(
    {
        "disconnected",
        ERROR,
        "failed",
        "gpu",
        "kept-out",
        NO_SPACE,
        "other",
        "replaced",
        RESTART,
        "stopped",
        "timeout",
        "unavailable",
        "unfit",
    }
)
"""Every REASON of lost:REASON; any other text of a client or session is written to the journal and the log only."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Conditions for the start and the end of a run, and intervals of evaluations and checkpoints.

    Attributes:
        min_clients: number of clients that must have joined before the first work is assigned.
        count_lost: whether clients lost before the start count towards ``min_clients``, since they cannot come back.
        max_updates: number of merged updates after which the run ends; None = no limit.
        max_time_s: time at which the run ends, in seconds of its clock; None = no limit.
        eval_every: distance from one evaluation to the next, in ``eval_unit``.
        eval_unit: unit of this distance: versions; seconds of the run's clock; or samples that merged updates were trained
            on. For seconds and samples, the first version at or after each multiple of the distance is evaluated.
        checkpoint_every: number of versions from one checkpoint to the next; None = only at the end.
        num_clients: number of clients N. The run fails because of refused updates only after all N have taken part and
            all are refused.
        max_weight: bound on the weight of a client with its own data, as a multiple of the lower median of the present
            clients' numbers of samples; None = no bound. Other clients cannot claim more samples than their share has.
        max_refused: number of refusals in a row after which a client is suspended.
        suspends_by_time: whether a client that leaves tasks unanswered is suspended for as long as these tasks took.
        subfederation: length of a task of the server above, without which nobody trains; None = there is no such server.
    """

    min_clients: int = 1
    count_lost: bool = True
    max_updates: int | None = None
    max_time_s: float | None = None
    eval_every: float = 1
    eval_unit: Literal["versions", "seconds", "samples"] = "versions"
    checkpoint_every: int | None = None
    num_clients: int = 1
    max_weight: float | None = None
    max_refused: int = 3
    suspends_by_time: bool = True
    subfederation: Subfederation | None = None


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed: a hash of all arguments, such as (run seed, client, task number)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
