"""Start a server and its clients as processes of this machine, and keep them alive."""
