"""Drive a run on the wall clock or on a virtual clock: protocol, driver, setup, server, client, executors, lifecycle."""
