"""What the table of a task's copies and waits says of few and of more pieces."""

from __future__ import annotations

from benchmarks import wire


def test_a_task_between_emulated_gpus_is_never_waited_for_whatever_its_pieces():
    few, more = {}, {}
    for row in wire.counts((1, 3)):
        (few if row["pieces"] == 1 else more)[row["transport"]] = row
    for name in ("gloo", "tcp"):
        for row, number in ((few[name], 1), (more[name], 3)):
            # down and up, each from a GPU and onto the other
            assert (row["copies_to_host"], row["copies_to_device"]) == (2 * number, 2 * number)
            assert row["copied_bytes"] == 4 * row["bytes"] == 4 * number * few[name]["bytes"]
            assert row["synchronisations"] == 0
            assert row["events_waited_for"] == 4 * number  # each copy's, once
