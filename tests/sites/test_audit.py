"""A run between machines, audited at its sites: the operator rewrites and signs the books anew, a client computes wrongly."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from raafl.commands.cli import main
from raafl.config.parse import parse
from raafl.local.train import LocalTrainer
from raafl.runfolder.append_file import START, link
from raafl.runfolder.books import check_books, unlink
from raafl.runfolder.seals import Signer
from raafl.runtime.lifecycle.resume import reopened
from raafl.sites.receipts import SiteReceipts, compare, server_keys
from tests.helpers import cached_models
from tests.helpers.joining_clients import SERVER, remote

pytestmark = pytest.mark.timeout(120)
WRONG = 2  # the task of client 2 whose result is not what training gives


def two_sites(folder, changed, *options):
    """Run two clients that keep all inputs; return the run's folder, and each client's folder of receipts."""
    usual = (
        "--config=configs/quickstart.yaml",
        "--progress=quiet",
        "--clients=2",
        "--max_updates=12",
        "--devices=null",
        "--train.num_epochs=null",
        "--train.num_steps=2",
        "--checkpoint_every=4",
        f"--output={folder / 'run'}",
    )
    changed.setenv("XDG_STATE_HOME", str(folder / "state"))
    found = parse("serve", [*usual, *options])
    with remote(found.experiment, found.config_yaml, folder, [(i, {"keep_inputs": 1.0}) for i in (1, 2)]) as fleet:
        fleet.serve()
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
        assert all("keeps receipts in" in joiner.words() for joiner in fleet.joiners)
    return folder / "run", {i: next((folder / "state" / "raafl" / "receipts").glob(f"client-{i}-*")) for i in (1, 2)}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A finished run of two sites, of which the second has computed a task wrongly."""
    run = LocalTrainer.run

    def wrong(self, assignment, *args):
        update = run(self, assignment, *args)
        if (assignment.client, assignment.task) == (2, WRONG):
            next(iter(update.tensors.buffers.values()))[0] += 1e-6
        return update

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(LocalTrainer, "run", wrong)
        return two_sites(tmp_path_factory.mktemp("sites"), changed)


@pytest.fixture
def run(recorded, tmp_path, monkeypatch):
    """A copy of the run, with the key that signed it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(recorded[0].parent / "state"))
    shutil.copytree(recorded[0], tmp_path / "run")
    return tmp_path / "run"


def rewrite(run, change):
    """Change rows of the journal as ``change`` says, link them anew and sign all of it: what an operator can do."""
    head, new = START, []
    for line in (run / "events.jsonl").read_bytes().splitlines(keepends=True):
        row = change(json.loads(unlink(line)[0]))
        line, head = link(head, (json.dumps(row, separators=(",", ":")) + "\n").encode())
        new.append(line)
    (run / "events.jsonl").write_bytes(b"".join(new))
    (run / "seals.jsonl").unlink()
    with reopened(run) as folder:
        folder.signer = Signer.load(SERVER.key)
        folder.seal(folder.sealed(), 12, [], final=True)


def test_receipts_fit_the_journal_and_one_head_came_with_each(recorded, run):
    for client, folder in recorded[1].items():
        site = SiteReceipts.read(folder)
        assert site.findings == [] and len(site.receipts) >= 3 and site.client == client
        keys = server_keys(site.receipts)
        books = check_books(run, keys=keys, heads=True)
        assert (books.findings, keys) == ([], [Signer.load(SERVER.key).public])
        findings, notes = compare(site, run, books)
        assert findings == [] and len(notes) <= 1  # the last update may be under way when the run ends
        assert len({receipt.head["head"] for receipt in site.receipts}) == len(site.receipts)


def test_an_update_to_which_the_server_adds_what_it_has_not_sent_is_no_other_update(tmp_path, monkeypatch):
    """With ``compress.down`` top_k a client trains from less than the server has, and the journal's digest has all."""
    folder, sites = two_sites(tmp_path, monkeypatch, "--algorithm=fed_avg", "--compress.down=top_k")
    for receipts in sites.values():
        assert compare(SiteReceipts.read(receipts), folder, check_books(folder, heads=True))[0] == []


def test_an_operator_who_rewrites_and_signs_the_books_anew_is_found_by_each_site(recorded, run):
    def change(row):
        if row["event"] == "arrived" and row["client"] == 1:
            row["fingerprint"] = "0" * 32
        return row

    rewrite(run, change)
    assert check_books(run).findings == []  # the operator's own books are in order
    findings, _ = compare(SiteReceipts.read(recorded[1][1]), run, check_books(run, heads=True))
    assert "assignment 1 of client 1: the journal records another update than the site sent" in findings
    findings, _ = compare(SiteReceipts.read(recorded[1][2]), run, check_books(run, heads=True))
    assert findings and all(
        "the journal was rewritten since" in line and "its signature proves" in line for line in findings
    )


def test_an_update_that_a_site_never_sent_and_an_assignment_that_it_never_got_are_named(recorded, run):
    site = SiteReceipts.read(recorded[1][1])
    second, third = site.receipts[1].assignment["id"], site.receipts[2].assignment["id"]

    def change(row):
        if row["event"] == "assigned" and row["id"] == third:
            row["seed"] += 1
        if row["event"] == "arrived" and row["assignment"] == second:
            row["client"] = 2
        return row

    rewrite(run, change)
    findings, _ = compare(site, run, check_books(run, heads=True))
    assert f"assignment {second} of client 1: the site sent an update, the journal has none" in findings
    assert f"assignment {third} of client 1: the journal records another assignment than the site was sent" in findings
    findings, _ = compare(SiteReceipts.read(recorded[1][2]), run, check_books(run, heads=True))
    assert any(f"assignment {second} of client 2: the journal has an update" in line for line in findings)


@pytest.mark.parametrize(("overlaps", "last_is_lost"), [(True, True), (False, True), (True, False)])
def test_at_the_end_two_updates_may_be_on_their_way_where_one_is_sent_beside_the_next_task(
    recorded, run, overlaps, last_is_lost
):
    """They come in the order in which they were sent: if the last is there, the one before it was not under way."""
    rows = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    arrived = {row["assignment"] for row in rows if row["event"] == "arrived"}
    site = SiteReceipts.read(recorded[1][1])
    # the last update of the recorded run may have been under way, too
    site = replace(site, receipts=[receipt for receipt in site.receipts if receipt.assignment["id"] in arrived])
    *_, before, last = (receipt.assignment["id"] for receipt in site.receipts)
    link = {"client": 1, "incarnation": 0}

    def change(row):
        if row["event"] != "arrived" or row["assignment"] not in (before, *[last] * last_is_lost):
            return row
        kind = "sending" if overlaps and row["assignment"] == before else "away"
        return {"time_s": row["time_s"], "event": kind, **link, "assignment": row["assignment"], "reason": "slow"}

    rewrite(run, change)
    findings, notes = compare(site, run, check_books(run, heads=True))
    texts = [
        f"assignment {number} of client 1: the site sent an update, the journal has none" for number in (before, last)
    ]
    may_come = overlaps and last_is_lost
    assert (texts[1] in notes) == last_is_lost and texts[1] not in findings
    assert (texts[0] in notes) == may_come and (texts[0] in findings) != may_come


@pytest.mark.parametrize(("event", "cause"), [("lost", "the client was lost"), ("resumed", "the server was restarted")])
@pytest.mark.parametrize("is_true", [True, False])
def test_an_update_on_its_way_when_client_or_server_went_is_no_contradiction_if_they_did(
    recorded, run, event, cause, is_true
):
    """A client that was lost joins anew, and has another incarnation then; an operator may only say that it was lost."""
    site = SiteReceipts.read(recorded[1][1])
    second = site.receipts[1].assignment["id"]

    def change(row):
        if row["event"] == "arrived" and row["assignment"] == second:
            return {"time_s": row["time_s"], "event": event, **({"client": 1} if event == "lost" else {"kept": 5})}
        return row

    rewrite(run, change)
    if is_true:
        for receipt in site.receipts[2:]:
            receipt.assignment["incarnation"] += 1
    findings, notes = compare(site, run, check_books(run, heads=True))
    name = f"assignment {second} of client 1"
    text = f"{name}: the site sent an update, the journal has none, since {cause}"
    third = site.receipts[2].assignment["id"]
    if is_true:
        assert text in notes and not any("the journal has none" in line for line in findings if line.startswith(name))
    else:
        assert f"{text}: but assignment {third} came by the same connection" in findings and text not in notes


def test_a_client_that_joined_after_the_last_checkpoint_may_have_its_incarnation_again(recorded, run):
    site = SiteReceipts.read(recorded[1][1])
    second = site.receipts[1].assignment["id"]

    def change(row):
        if row["event"] == "arrived" and row["assignment"] == second:
            return {"time_s": row["time_s"], "event": "resumed", "kept": 0}
        return row

    rewrite(run, change)
    _, notes = compare(site, run, check_books(run, heads=True))
    assert any("the journal has none, since the server was restarted" in line for line in notes)


def audit(capsys, run, site, *options):
    with cached_models.reuse_findings():
        code = main(["audit", str(run), "--site", str(site), "--share", "1", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_site_trains_its_tasks_again_and_finds_the_one_that_was_computed_wrongly(recorded, run, capsys):
    code, found = audit(capsys, run, recorded[1][1])
    assert (code, found["findings"], found["books"]) == (0, [], "signed")
    (site,) = found["sites"]
    assert site["trained_again"] == site["receipts"] >= 3
    code, found = audit(capsys, run, recorded[1][2])
    (finding,) = found["findings"]
    assert code == 1 and "of client 2: trained again it gives" in finding
    wrong = next(one for one in SiteReceipts.read(recorded[1][2]).receipts if one.assignment["task"] == WRONG)
    assert finding.startswith(f"assignment {wrong.assignment['id']} ") and wrong.trained in finding


def test_receipts_and_inputs_that_were_altered_are_named(recorded, run, tmp_path, capsys):
    site = tmp_path / "site"
    shutil.copytree(recorded[1][1], site)
    lines = (site / "receipts.jsonl").read_text().splitlines(keepends=True)
    (site / "receipts.jsonl").write_text(
        lines[0].replace('num_samples\\":', 'num_samples\\":1') + "".join(lines[1:]) + "{"
    )
    inputs = sorted((site / "inputs").iterdir())
    torch.save({name: value + 1 for name, value in torch.load(inputs[1]).items()}, inputs[1])
    inputs[2].write_bytes(b"x")
    _, found = audit(capsys, run, site)
    first, *others = found["findings"]
    assert first == "receipts.jsonl: receipt 1 was altered"
    assert any("its inputs in" in line and "were altered" in line for line in others)
    assert any("are damaged or of another model" in line for line in others)
    with suppress(FileNotFoundError):
        (site / "site.json").unlink()
    assert main(["audit", str(run), "--site", str(site)]) == 2
    assert "not a folder of receipts written by raafl join" in capsys.readouterr().err
