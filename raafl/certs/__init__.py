"""Make and manage the X.509 certificates by which a server and its sites know each other; behind `raafl certs`."""
