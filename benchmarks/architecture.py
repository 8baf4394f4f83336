"""Draw the picture of docs/architecture.md: the path of one task and its update through the code, by real names.

`python -m benchmarks.pictures` draws it. Each step has a lane, a name, and what happens there; a test imports all names.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from benchmarks.drawing import BLUE, BROWN, FAINT, GREEN, INK, WIDTH, Picture

LANES: Final = (
    ("decides", "raafl.core, raafl.parts", GREEN),
    ("server", "raafl.runtime", BLUE),
    ("wire", "compression, transport", FAINT),
    ("client", "raafl.runtime, raafl.local", BROWN),
)
_LEFT, _GAP, _HEIGHT, _ROW = 14.0, 10.0, 40.0, 54.0


class Step(NamedTuple):
    """One step in the picture: number of its lane, module, a name in it, and what it does."""

    lane: int
    module: str
    name: str
    what: str


STEPS: Final = (
    Step(0, "raafl.core.coordinator", "Coordinator.handle", "an event in, actions out"),
    Step(0, "raafl.core.algorithm", "Select.__call__", "which submodel, how much work"),
    Step(1, "raafl.runtime.server.wall_clock", "Server.run", "does what is said: Assign"),
    Step(1, "raafl.core.snapshots", "Snapshots.cut", "the submodel's values now"),
    Step(2, "raafl.compression.streams", "DownlinkCodec.pack", "made small, if asked"),
    Step(2, "raafl.transport.connection", "Connection.send", "ASSIGN and its tensors"),
    Step(3, "raafl.runtime.client.worker", "Client.run", "receives; checks the layout"),
    Step(3, "raafl.local.train", "LocalTrainer.run", "the task: a pure function"),
    Step(3, "raafl.submodel.submodels", "Submodels.shrink", "the user's module, smaller"),
    Step(3, "raafl.core.local", "Local.hook", "what the method adds to a step"),
    Step(2, "raafl.compression.streams", "UplinkCodec.pack", "what changed, or all of it"),
    Step(2, "raafl.transport.connection", "Connection.recv", "UPDATE, into what was agreed"),
    Step(1, "raafl.runtime.server.session_loop", "LoopSession.perform", "a thread for all clients"),
    Step(1, "raafl.runtime.server.link", "Inbox.put", "one queue, one loop behind it"),
    Step(0, "raafl.core.algorithm", "Merge.reject_reason", "refused, with a reason?"),
    Step(0, "raafl.core.algorithm", "Trigger.due", "merge now?"),
    Step(0, "raafl.core.algorithm", "Merge.apply", "only what the update covers"),
    Step(1, "raafl.runfolder.record", "RunRecord", "rows, journal, summary"),
)


def draw() -> str:
    """Draw the picture as SVG: time goes down, with a lane for each side."""
    picture = Picture(56 + _ROW * 0.86 * len(STEPS), "The way of a task and its update through raafl's code")
    wide = (WIDTH - 2 * _LEFT + _GAP) / len(LANES)
    for number, (title, where, colour) in enumerate(LANES):
        x = _LEFT + number * wide
        picture.text(x, 22, title, size=15, bold=True, fill=colour)
        picture.text(x, 40, where, size=12)
    before: tuple[float, float] | None = None
    for row, step in enumerate(STEPS):
        x, y, colour = _LEFT + step.lane * wide, 52 + row * _ROW * 0.86, LANES[step.lane][2]
        middle = x + (wide - _GAP) / 2
        if before is not None:
            picture.line([before, (before[0], y - 3), (middle, y - 3), (middle, y)], FAINT, width=1.2)
        picture.rect(x, y, wide - _GAP, _HEIGHT, colour, radius=4, more=' fill-opacity="0.16"')
        picture.text(x + 8, y + 17, step.name, size=13.5, bold=True, fill=INK)
        picture.text(x + 8, y + 33, step.what, size=12)
        before = (middle, y + _HEIGHT)
    return picture.svg()
