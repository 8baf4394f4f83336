"""A client's side of a run on real ranks: set up, receive tasks, train them, answer; rejoin after a lost connection."""
