"""Options of protection that have no effect are refused, for they would promise what the run does not do."""

from __future__ import annotations

from dataclasses import fields

import pytest

from raafl.core.options import Guard, Privacy, SecureAggregation
from raafl.errors import BadInput


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Privacy(noise_multiplier=2.0),
            "privacy.noise_multiplier is 2.0, but privacy.clip_norm is null, so privacy is off: give a clip_norm, or set "
            "privacy.noise_multiplier to 1.0, or leave out privacy.noise_multiplier, which would have no effect",
        ),
        (
            lambda: Privacy(delta=1e-6, seed_file="seed"),
            "privacy.delta is 1e-06, privacy.seed_file is seed, but privacy.clip_norm is null, so privacy is off: give a "
            "clip_norm, or set privacy.delta to 1e-05, or set privacy.seed_file to null, or leave out "
            "privacy.delta and privacy.seed_file, which would have no effect",
        ),
        (
            lambda: SecureAggregation(threshold=0.9),
            "secure_aggregation.threshold is 0.9, but secure_aggregation.min_cover is null, so the server reads each update: "
            "give a min_cover, such as 3, or set secure_aggregation.threshold to 0.6666666666666666, or "
            "leave out secure_aggregation.threshold, which would have no effect",
        ),
        (
            lambda: Guard(trim=0.2, combine="median"),
            "guard.trim is 0.2, but it belongs to guard.combine trimmed_mean: give guard.combine trimmed_mean, or set guard.trim "
            "to 0.1, or leave out guard.trim, which would have no effect",
        ),
        (
            lambda: Guard(radius=1.0),
            "guard.radius is 1.0, but it belongs to guard.combine centred_clip: give guard.combine centred_clip, or set "
            "guard.radius to null, or leave out guard.radius, which would have no effect",
        ),
        (
            lambda: Guard(clip_norm=1.0, warm_up=3),
            "guard.warm_up is 3, but it belongs to guard.outlier: give guard.outlier, or set guard.warm_up to 5, or leave out "
            "guard.warm_up, which would have no effect",
        ),
    ],
)
def test_an_option_without_effect_is_refused(make, message):
    with pytest.raises(BadInput) as refused:
        make()
    assert str(refused.value) == message


def test_a_config_that_gives_each_field_its_default_is_taken():
    for cls in (Guard, Privacy, SecureAggregation):
        assert cls(**{field.name: field.default for field in fields(cls)}) == cls()
