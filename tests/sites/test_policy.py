"""A site's policy is read by the checks of a config: each problem is a line with field, value, remedy and place."""

from __future__ import annotations

from datetime import date

import pytest

from raafl.errors import BadInput
from raafl.sites.admit import open_gate
from raafl.sites.policy import SiteBooks, SitePolicy, load_policy, same_part


def written(tmp_path, text):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    return str(file)


def test_an_empty_table_allows_everything_and_all_fields_are_read(tmp_path):
    assert load_policy(written(tmp_path, "{}")) == SitePolicy()
    text = """
        models: [MLP, "model_zoo.CNN@0123456789abcdef"]
        hours: [mon-fri 20:00-06:00]
        bytes_per_day: 1.5GB
        state: site-state
    """
    policy = load_policy(written(tmp_path, text))
    assert policy.models == ["MLP", "model_zoo.CNN@0123456789abcdef"]
    assert (policy.max_bytes, len(policy.windows()), policy.min_samples) == (1.5e9, 1, 1)
    assert SitePolicy(bytes_per_day=1000, state="s").max_bytes == 1000


SPOOL = "state: site-state\nconsent: {how: spool, folder: asked}\n"


def folders(file):
    policy = load_policy(file)
    return policy.state, policy.consent.folder


def test_a_policy_s_folders_lie_beside_it_wherever_a_client_is_started(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    file = written(tmp_path / "site", SPOOL)
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        assert folders(file) == (str(tmp_path / "site" / "site-state"), str(tmp_path / "site" / "asked"))
    monkeypatch.chdir(tmp_path / "site")
    SiteBooks(folders("site.yaml")[0]).add_bytes(7, date(2026, 1, 1))
    assert SiteBooks(folders("site.yaml")[0]).used().bytes == 7
    assert load_policy(written(tmp_path, f"state: {tmp_path / 'there'}\n")).state == str(tmp_path / "there")


def test_what_an_earlier_version_kept_where_it_was_started_is_not_forgotten(tmp_path, monkeypatch, caplog):
    (tmp_path / "site").mkdir()
    (tmp_path / "started").mkdir()
    file = written(tmp_path / "site", SPOOL)
    monkeypatch.chdir(tmp_path / "started")
    SiteBooks("site-state").add_bytes(7, date(2026, 1, 1))
    (tmp_path / "started" / "asked").mkdir()
    for is_made in (False, True):
        if is_made:
            (tmp_path / "site" / "site-state").mkdir()  # without books
        assert folders(file) == (str(tmp_path / "started" / "site-state"), str(tmp_path / "started" / "asked"))
    assert f"its place is beside the policy: move it to '{tmp_path / 'site' / 'site-state'}'" in caplog.text
    SiteBooks(str(tmp_path / "site" / "site-state"))
    with pytest.raises(BadInput, match=r"policy.state is 'site-state', but there are two, '.*' and '.*': remove one"):
        load_policy(file)


def test_each_problem_is_a_line_of_its_own(tmp_path):
    file = written(tmp_path, "models: [MLPP]\nmax_parameters: many\nhourz: 5\nmin_samples: 0\nhours: [noon]\n")
    with pytest.raises(BadInput) as refused:
        load_policy(file)
    assert str(refused.value).splitlines() == [
        f"policy.models has 'MLPP': did you mean 'MLP'?; for your own class give its import path ({file}, line 1)",
        f"policy.max_parameters is 'many': give a whole number or null ({file}, line 2)",
        f"unknown field policy.hourz: did you mean 'hours'? ({file}, line 3)",
        f"policy.min_samples is 0: give 1 or more ({file}, line 4)",
        f"policy.hours[0] is 'noon': give days and hours, such as 'mon-fri 20:00-06:00' or 'sat,sun 00:00-24:00' ({file}, line 5)",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [MLP@12]", "policy.models has 'MLP@12': give NAME, or NAME@DIGEST with the 16 digits"),
        ("bytes_per_day: lots\nstate: s", "policy.bytes_per_day is lots: give bytes above 0, such as 500MB or 2GB"),
        ("bytes_per_day: 2GB", "policy.state is null, and policy.bytes_per_day is given: name a folder"),
        ("hours: []", "policy.hours is empty: give hours"),
        ("max_share: 0", "policy.max_share is 0.0: give a number above 0, up to 1"),
        ("max_share: .nan", "policy.max_share is nan: give a number above 0, up to 1"),
        (
            "partners: [north, 'south@AB12']",
            "policy.partners has 'south@AB12': give the NAME of a site, or NAME@FINGERPRINT",
        ),
        ("privacy: {clip_norm: 1.0}", "policy.privacy.noise_multiplier is missing: give it, or leave privacy out ("),
        ("models: [MLP]\nconsent: {every: task}", "policy.consent.how is missing: give it, or leave consent out ("),
        (
            "consent: ask",
            "policy.consent is 'ask': give a mapping with some of the fields how, every, folder, wait_s or null (",
        ),
        ("- models", "holds ['models']: write fields"),
        ("models: [", "is not valid YAML: "),
        ("max_hours: 1\nmax_hours: 2", "is not valid YAML: line 2, column 1: 'max_hours' is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, text, said):
    with pytest.raises(BadInput) as refused:
        load_policy(written(tmp_path, text))
    assert said in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        BadInput, match=r"policy is '.*none.yaml', which cannot be read \(No such file or directory\): name a YAML"
    ):
        load_policy(str(tmp_path / "none.yaml"))


def test_a_plain_name_is_of_a_part_of_raafls_own_and_of_no_other():
    assert same_part("models", "MLP", "model_zoo.MLP") and same_part("models", "MLP", "model_zoo.mlp.MLP")
    assert same_part("algorithms", "fed_avg", "raafl.fed_avg") and same_part(
        "data", "raafl.data.Digits", "raafl.data.Digits"
    )
    assert same_part("models", "model_zoo.MLP", "model_zoo.mlp.MLP")
    assert not same_part("models", "MLP", "mine.MLP") and not same_part("models", "MLP", "model_zoo.CNN")
    assert same_part("models", "mine.MLP", "mine.MLP") and not same_part("models", "mine.MLP", "model_zoo.MLP")


@pytest.mark.parametrize(
    ("variables", "checks"),
    [
        ({}, True),
        ({"RANK": "3"}, True),  # left over from a batch system: this process is a client of its own
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),  # a follower does only what the first process passes on
    ],
)
def test_a_policy_is_checked_by_each_process_that_talks_to_a_server(tmp_path, monkeypatch, variables, checks):
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (variables | (torchrun if "WORLD_SIZE" in variables else {})).items():
        monkeypatch.setenv(name, value)
    assert (open_gate(written(tmp_path, "min_samples: 7"), print) is not None) is checks
