import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def raafl_data() -> Path:
    """The folder of real data sets; without one the test is skipped, or fails where RAAFL_REQUIRE_DATA=1."""
    folder = os.environ.get("RAAFL_DATA", "")
    if folder and Path(folder).is_dir():
        return Path(folder)
    reason = f"RAAFL_DATA is {folder!r}: set it to a folder with torchvision/MNIST/raw and cifar10/*.parquet"
    if os.environ.get("RAAFL_REQUIRE_DATA") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
