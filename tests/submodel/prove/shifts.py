"""Cut a wrong slice of one tensor, as an axis does whose offset is off by one unit."""

from __future__ import annotations

from raafl.submodel.extract import CopyPlan

GATHER = CopyPlan.gather


def shift_by_a_unit(monkeypatch, member, axis):
    """Let each cut take `member` of `axis` one unit further."""

    def shifted(plan, full, out=None):
        other = full.clone()
        part = other[member.name].narrow(member.dim, member.offset, member.unit * axis.size)
        part.copy_(part.roll(member.unit, member.dim))
        return GATHER(plan, other, out)

    monkeypatch.setattr(CopyPlan, "gather", shifted)
