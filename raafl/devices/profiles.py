"""Describe the device of a client: its speed, network links, memory, and hours of availability.

A profile is plain data and knows nothing of models: it turns FLOPs and bytes into seconds. The simulator uses it as its cost
model, selectors use it to size submodels. Times are seconds, sizes bytes, rates per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from raafl.errors import nearest

Pairs = tuple[tuple[float, float], ...]
Presence = Literal["always", "diurnal", "markov", "leaves"]
Kernels = tuple[tuple[float, float, float], ...]
"""Kernels of a GPU: how many there are, with FLOPs and bytes of each."""

_INF = math.inf
# default of a field that is not given: then the bundled profile's value counts, else that of `Profile`
_AS_NAMED = math.nan

PRODUCT, PLAIN, STEP = 2.5, 0.4, 40.0
"""How many operations' time a host needs for a product, for an operation without autograd, and for what a step has beside its
operations; by the steps of an H200 in benchmarks/results/gpu.json, see `benchmarks.gpu_times`."""
KERNEL_S = 2e-6
"""Least seconds of a kernel on a GPU."""


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Duration of one task in seconds: download of the submodel, training, upload of the update."""

    down_s: float
    compute_s: float
    up_s: float
    # part of ``down_s`` and ``up_s`` that does not depend on the number of bytes
    latency_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole task."""
        return self.down_s + self.compute_s + self.up_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Speed, memory, network links and hours of availability of a client's device.

    `availability`: time windows `[start, stop)` in seconds in which the client may work; None = always.
    `period_s`: seconds after which the windows repeat (a day is 86400); None = they do not repeat.
    `bytes_per_s`: memory traffic in bytes per second that the device reaches; its time is added to that of the FLOPs.
    Small submodels need more traffic for each FLOP. None = ``flops_per_s`` covers both.
    `speed_changes`: pairs of `[seconds, factor]`: from that time on the speed is multiplied by the factor, until the
    next pair; None = no changes. Predicted times do not include this nor the following fields;
    `raafl.devices.variation.real_time` does.
    `link_changes`: pairs of `[seconds, factor]` for the link speed in both directions; None = no changes.
    `host_op_s`: seconds that the host of a GPU needs to launch an operation with its gradient recorded; 0 = no GPU, or one
    whose host is not known. A step then takes the longer of its launches by the host and its kernels on the device.
    `host_product_s`: the same of a matrix product, convolution or attention; 0 = `PRODUCT` times ``host_op_s``.
    `bandwidth_bytes_per_s`: bytes of operands and results per second that a GPU's kernels reach; infinite = ``flops_per_s``
    covers them.
    `repeat_s`: seconds after which both lists of changes start again; None = never.
    `drift_s`: seconds between draws of a slowly changing factor, independent after twice as long; None = no drift.

    Raises:
        ValueError: a field is out of range; the message says what to write instead.
    """

    name: str = "default"
    flops_per_s: float = 1e9
    down_bytes_per_s: float = _INF
    up_bytes_per_s: float = _INF
    latency_s: float = 0.0
    memory_bytes: float = _INF
    availability: Pairs | None = None
    period_s: float | None = None
    bytes_per_s: float | None = None
    speed_changes: Pairs | None = None
    launch_s: float = 0.0
    link_changes: Pairs | None = None
    repeat_s: float | None = None
    speed_jitter: float = 0.0
    link_jitter: float = 0.0
    speed_drift: float = 0.0
    link_drift: float = 0.0
    drift_s: float | None = None
    host_op_s: float = 0.0
    host_product_s: float = 0.0
    bandwidth_bytes_per_s: float = _INF

    def __post_init__(self) -> None:
        """Check all fields, and join adjacent windows of availability, so that no boundary lies within an available time."""
        from raafl.devices import checks

        if problems := checks.problems(self):
            raise ValueError(f"device profile {self.name!r}: " + "; ".join(problems))
        if self.availability is not None:
            object.__setattr__(self, "availability", checks.merge_windows(self.availability))
        for name in checks.CHANGES:
            if (pairs := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple((float(at_s), float(factor)) for at_s, factor in pairs))

    def task_time(
        self,
        flops: float,
        down_bytes: int,
        up_bytes: int,
        moved_bytes: float = 0.0,
        padding_flops: float = 0.0,
        num_exchanges: int = 0,
        num_kernels: float = 0.0,
    ) -> TaskTime:
        """Predict the duration of a task in seconds, from its FLOPs and the bytes sent and received."""
        latency_s = (1 + num_exchanges) * self.latency_s
        more_s = 0.0 if self.bytes_per_s is None else moved_bytes / self.bytes_per_s + padding_flops / self.flops_per_s
        return TaskTime(
            down_s=latency_s + down_bytes / self.down_bytes_per_s,
            compute_s=flops / self.flops_per_s + more_s + num_kernels * self.launch_s,
            up_s=latency_s + up_bytes / self.up_bytes_per_s,
            latency_s=latency_s,
        )

    def gpu_s(self, steps: float, operations: float, products: float, plain: float, kernels: Kernels) -> float:
        """Predict the seconds of steps on a GPU with ``host_op_s``: the longer of the host's and the device's.

        The arguments are those of `host_s` and `device_s`, and the fields of `raafl.submodel.cost.ledger.Launches`.
        """
        return max(self.host_s(steps, operations, products, plain), self.device_s(kernels))

    def host_s(self, steps: float, operations: float = 0.0, products: float = 0.0, plain: float = 0.0) -> float:
        """Predict the seconds in which the host launches so many steps on a GPU.

        `operations`: number of operations with autograd that are no products.
        `plain`: number of operations without autograd.
        """
        product_s = self.host_product_s or PRODUCT * self.host_op_s
        return self.host_op_s * (STEP * steps + operations + PLAIN * plain) + product_s * products

    def device_s(self, kernels: Kernels) -> float:
        """Predict the seconds of kernels on a GPU: each takes the longer of its FLOPs and its bytes, and at least `KERNEL_S`."""
        return sum(
            number * max(flops / self.flops_per_s, num_bytes / self.bandwidth_bytes_per_s, KERNEL_S)
            for number, flops, num_bytes in kernels
        )

    @property
    def varies(self) -> bool:
        """Whether the speed of the device or of its links changes over time."""
        drifts = (self.speed_jitter, self.link_jitter, self.speed_drift, self.link_drift)
        return any(drifts) or self.speed_changes is not None or self.link_changes is not None

    @property
    def has_series(self) -> bool:
        """Whether a field is a series of times, which may be long."""
        return (self.availability, self.speed_changes, self.link_changes) != (None, None, None)

    def available(self, at_s: float) -> bool:
        """Check whether the client is available at the time ``at_s``, in seconds."""
        if self.availability is None:
            return True
        return any(start <= at_s < stop for start, stop in self._windows_near(at_s))

    def next_change_s(self, at_s: float) -> float:
        """Return the first time after ``at_s`` at which the client becomes available or unavailable; infinite if it never does.

        `available` changes at exactly this time, without a rounding error.
        """
        if self.availability is None or self.availability == ((0.0, self.period_s),):
            return _INF
        edges: dict[float, int] = {}
        for start, stop in self._windows_near(at_s):
            edges[start] = edges.get(start, 0) + 1
            edges[stop] = edges.get(stop, 0) - 1
        changes = [edge for edge, step in edges.items() if step != 0 and edge > at_s]
        return min(changes, default=_INF)

    def _windows_near(self, at_s: float) -> Iterator[tuple[float, float]]:
        """Yield (start, end) in seconds of each time of availability; if they repeat, only those of the cycles around ``at_s``."""
        windows = self.availability or ()
        if self.period_s is None:
            yield from windows
            return
        cycle = math.floor(at_s / self.period_s)
        for k in range(cycle - 1, cycle + 3):
            for start, stop in windows:
                # exactly the start of the next cycle: the other formula could differ in the last bit
                end = (k + 1) * self.period_s if stop == self.period_s else k * self.period_s + stop
                yield k * self.period_s + start, end


@dataclass(frozen=True, slots=True)
class Device(Profile):
    """One entry of `devices:` in a config or a device file: a device profile, and the number of clients that have it.

    A field that is left out has the value of raafl's own profile of that name (`raafl plan --profiles` lists them), or
    else the default of `Profile`. If the name means random devices, such as flash-phones, each client gets a different
    one.

    Args:
        count: number of clients with this device.
        presence: always = the client is always available; diurnal, markov or leaves = its hours are drawn at random,
            see `raafl.devices.catalog.presence`.
        on_s: seconds for which a client is available, if its hours are drawn.
        off_s: seconds for which a client is away, if its hours are drawn.
        seed: seed of all random draws.
        recorded: CSV file of a recording, from which changes of speed and link and the availability are taken, see
            `raafl.devices.recordings`; None = no file. If the file has several devices, each client takes the next one.

    Raises:
        ValueError: a field is out of range, or the speed is unknown, since raafl has no profile of that name.
    """

    flops_per_s: float = _AS_NAMED
    down_bytes_per_s: float = _AS_NAMED
    up_bytes_per_s: float = _AS_NAMED
    latency_s: float = _AS_NAMED
    memory_bytes: float = _AS_NAMED
    host_op_s: float = _AS_NAMED
    host_product_s: float = _AS_NAMED
    bandwidth_bytes_per_s: float = _AS_NAMED
    count: int = 1
    presence: Presence = "always"
    on_s: float | None = None
    off_s: float | None = None
    seed: int = 0
    recorded: str | None = None
    given: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill in fields from the bundled profile of the device's name, and check the profile, ``count`` and ``presence``."""
        from raafl.devices import catalog

        known, named = catalog.figures(self.name), (*catalog.FIGURES, *catalog.HOST_FIGURES)
        unsaid = [name for name in named if isinstance(value := getattr(self, name), float) and math.isnan(value)]
        if not known and set(catalog.FIGURES) <= set(unsaid) and self._says_nothing():
            raise ValueError(
                f"device {self.name!r} is not in raafl's catalogue, and flops_per_s is missing: give flops_per_s, "
                f"such as 1.0e9, or a name in the catalogue; {nearest(self.name, catalog.names())}"
            )
        object.__setattr__(self, "given", tuple(name for name in catalog.FIGURES if name not in unsaid))
        for name in unsaid:
            object.__setattr__(self, name, known.get(name, _DEFAULTS[name]))
        Profile.__post_init__(self)
        problems = catalog.presence_problems(self.presence, self.on_s, self.off_s, self.availability is not None)
        for name, least in (("count", 1), ("seed", 0)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                problems.append(f"{name} is {number!r}; it must be a whole number, {least} or more")
        if self.recorded is not None:
            from raafl.devices.recordings import problems as problems_of_file

            problems += problems_of_file(self)
        if problems:
            raise ValueError(f"device {self.name!r}: " + "; ".join(problems))

    def _says_nothing(self) -> bool:
        """Check that a device entry has nothing but a name: no rate and no availability."""
        more = (self.bytes_per_s, self.availability, self.period_s)
        return self.name != _DEFAULTS["name"] and self.presence == "always" and more == (None,) * len(more)

    @property
    def profile(self) -> Profile:
        """Profile of this device; the profile of the first client if each client gets a different random device."""
        return self._drawn(0)

    def profiles(self) -> list[Profile]:
        """Return a profile for each of the ``count`` clients."""
        from raafl.devices import catalog

        if self.presence == "always" and not catalog.is_drawn(self.name) and self.recorded is None:
            return [self.profile] * self.count
        return [self._drawn(number) for number in range(self.count)]

    def _drawn(self, number: int) -> Profile:
        from raafl.devices import catalog

        own = {f.name: getattr(self, f.name) for f in fields(Profile)}
        if catalog.is_drawn(self.name):
            law = catalog.catalogue()["generators"][self.name]
            own |= {k: v for k, v in catalog.draw(law, self.seed, number).items() if k not in self.given}
        if self.presence != "always":
            windows, period_s = catalog.presence(self.presence, self.on_s, self.off_s, self.seed, number)
            own |= {"availability": windows, "period_s": period_s}
        if self.recorded is not None:
            from raafl.devices.recordings import load

            devices = load(self.recorded)
            own |= devices[number % len(devices)].fields(self)
        return Profile(**own)


_DEFAULTS = {f.name: f.default for f in fields(Profile)}


def assign(devices: Sequence[Profile], num_clients: int) -> list[Profile]:
    """Assign a device profile to each client; entry `i - 1` of the result belongs to client `i`.

    The devices, each repeated `count` times, form a list that is repeated until every client has a device. If there are
    fewer clients than entries in the list, only the first entries are used.

    Raises:
        ValueError: there are no devices or no clients; or a count is above 1, and the counts add up to more
            than there are clients.
    """
    if num_clients < 1:
        raise ValueError(f"clients is {num_clients}; there must be at least 1 client")
    if not devices:
        raise ValueError("devices is empty; name at least one device, or leave it out")
    pattern: list[Profile] = []
    for device in devices:
        pattern += device.profiles() if isinstance(device, Device) else [device]
    counted = any(isinstance(device, Device) and device.count > 1 for device in devices)
    if counted and len(pattern) > num_clients:
        raise ValueError(
            f"the counts in devices add up to {len(pattern)} but clients is {num_clients}; "
            f"lower the counts or set clients to {len(pattern)}"
        )
    return [pattern[i % len(pattern)] for i in range(num_clients)]
