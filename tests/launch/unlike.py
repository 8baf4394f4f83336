"""Run by torchrun: two processes of one client that have not the same config."""

from __future__ import annotations

import os
import sys

from raafl.errors import RunFailed
from raafl.runtime.client.multiprocess import together
from tests.launch.one_task import site


def main():
    """Exit with 1 once they have found out."""

    def make(config_yaml):
        found = site(f"{sys.argv[1]}/{os.environ['RANK']}", "fed_raa")
        found.sections["seed"] = os.environ["RANK"]
        return found

    try:
        together(make, lambda make_site: make_site(None) and 0, 1, print)
    except RunFailed as error:
        print(error, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
