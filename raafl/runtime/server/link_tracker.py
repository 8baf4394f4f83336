"""Record in the server's main loop which clients have lost their connection and which have come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raafl.core.roster import Roster
from raafl.core.types import Event
from raafl.runtime.server.inbox import ForExtension, Item
from raafl.runtime.server.link import Away, Back, Resumption
from raafl.units import duration


class LinkTracker:
    """Tracker of broken connections: it marks their clients as away until they are back, and writes to journal and log.

    The coordinator gets no event for a broken or resumed connection, since the client's task goes on.
    """

    def __init__(
        self,
        roster: Roster,
        write: Callable[[Mapping[str, Any]], None],
        note: Callable[[str], None],
        offer: Callable[[Resumption], bool],
    ) -> None:
        self._roster, self._write, self._note, self._offer = roster, write, note, offer

    def process(self, item: Item | None) -> Event | ForExtension | None:
        """Process an item of the inbox if it is about a broken or resumed connection, and return None; return any other item."""
        if isinstance(item, Resumption):
            item.is_taken.put(self._offer(item))
        elif isinstance(item, Away | Back):
            client = self._roster.find(item.client)
            # otherwise the session was replaced meanwhile
            if client is not None and client.incarnation == item.incarnation:
                self._tell(item)
        else:
            return item
        return None

    def _tell(self, item: Away | Back) -> None:
        row = {"client": item.client, "incarnation": item.incarnation, "assignment": item.assignment}
        if isinstance(item, Away):
            self._roster.away.add(item.client)
            self._write({"event": "away", **row, "reason": item.reason})
            kept = f"its task {item.assignment} is kept for {duration(item.wait_s)}"
            self._note(f"client {item.client} is away ({item.reason}); {kept}")
            return
        self._roster.away.discard(item.client)
        self._write({"event": "back", **row, "chunks": item.num_chunks, "away_s": item.away_s})
        here = f"; {item.num_chunks} chunks of its update had arrived" if item.num_chunks else ""
        self._note(f"client {item.client} is back after {duration(item.away_s)}{here}")
