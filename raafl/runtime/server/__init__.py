"""The server's side of a run on real ranks: the wall clock, one session per client, and evaluation beside them."""
