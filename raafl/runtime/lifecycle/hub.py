"""Upload a run's final model to the Hugging Face Hub, where the config asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raafl.errors import one_line
from raafl.runfolder.schema import MODEL


def push_model(
    repository: str | None, run_folder: Path, finished: str, warn: Callable[[str], None]
) -> dict[str, Any] | None:  # fmt: skip
    """Upload `RUN/model` to a private repository, which is made if need be; return what the summary says of it.

    A failure ends no run: the model stays in the folder.

    Args:
        repository: OWNER/NAME; None = nothing is uploaded.
        run_folder: folder of the run.
        finished: reason for which the run ended; of a run that failed or was interrupted nothing is uploaded.
        warn: function called with an error.

    Returns:
        ``repo``, ``url`` of the commit, and ``error``, one of which is None; None where nothing was to be uploaded.
    """
    if repository is None or finished.startswith(("failed", "interrupted")):
        return None
    folder, url, why = run_folder / MODEL, None, None
    try:
        from huggingface_hub import HfApi

        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="raafl")
        hub.create_repo(repository, private=True, exist_ok=True)
        url = str(hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"raafl: {run_folder.name}"))
    except Exception as error:  # of the network, of the hub, or of a folder that could not be written
        why = one_line(f"{type(error).__name__}: {error}")
        warn(f"the final model cannot be uploaded to {repository} ({why}): it is in {folder}")
    return {"repo": repository, "url": url, "error": why}
