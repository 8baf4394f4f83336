"""Check at the site what a server asks of it, whatever that is (`raafl join --policy`)."""
