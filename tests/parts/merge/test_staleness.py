from __future__ import annotations

import pytest

from raafl.errors import BadInput
from raafl.parts.merge.mean import Staleness


def test_the_three_functions_of_fed_async():
    assert [Staleness()(x) for x in (0, 5)] == [1.0, 1.0]
    poly = Staleness("polynomial", a=0.5)
    assert poly(0) == 1.0 and poly(3) == pytest.approx(0.5)  # 4^-0.5
    hinge = Staleness("hinge", a=10.0, b=4.0)
    assert hinge(4) == 1.0 and hinge(6) == pytest.approx(1 / 21)  # 1 / (10 * 2 + 1)


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'polynomial'"):
        Staleness("polinomial")


@pytest.mark.parametrize(
    ("kind", "more", "line"),
    [
        ("constant", {"a": 0.6}, "staleness_a is 0.6, but staleness is constant"),
        ("constant", {"b": 5.0}, "staleness_b is 5.0, but staleness is constant"),
        ("polynomial", {"b": 5.0}, "staleness_b is 5.0, but staleness is polynomial: leave it out, or use hinge"),
        ("hinge", {"a": -1.0}, "staleness_a is -1.0"),
    ],
)
def test_a_coefficient_that_would_do_nothing_is_an_error(kind, more, line):
    with pytest.raises(BadInput, match=line):
        Staleness(kind, **more)
