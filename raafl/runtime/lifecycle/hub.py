"""Upload the final model of a run to the Hugging Face Hub, if the config asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.core.hooks import RunHooks
from raafl.errors import one_line
from raafl.runfolder.schema import BREAKS, MODEL

if TYPE_CHECKING:
    from raafl.runtime.run import Run


class HubUpload(RunHooks):
    """Observer that uploads the final model of a finished run."""

    def __init__(self, run: Run) -> None:
        """Create the observer that uploads the final model of ``run`` to the repository in ``push_to_hub``."""
        self._run = run

    def publish(self, summary: dict[str, Any]) -> None:
        """Upload the model, and add what came of it to the summary."""
        run, repository = self._run, self._run.parts.experiment.push_to_hub
        if not summary["finished"].startswith(BREAKS):
            run.progress.note(f"uploading the final model to {repository}")
        summary["hub"] = push_model(str(repository), run.folder, summary["finished"], run.progress.warn)


def push_model(repository: str, run_folder: Path, finished: str, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """Upload the folder `model` of a run to a private repository, which is created if needed.

    An error does not end the run; the model stays in the run folder.

    `repository`: OWNER/NAME.

    Returns:
        Entry for the run's summary: ``repo``, ``url`` of the commit, and ``error``; None if nothing was to be uploaded.
    """
    if finished.startswith(BREAKS):
        return None
    folder, url, why = run_folder / MODEL, None, None
    try:
        from huggingface_hub import HfApi

        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="raafl")
        hub.create_repo(repository, private=True, exist_ok=True)
        url = str(hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"raafl: {run_folder.name}"))
    except Exception as error:  # errors of the network, the hub, or a folder that cannot be written
        why = one_line(f"{type(error).__name__}: {error}")
        warn(f"the final model cannot be uploaded to {repository} ({why}): it is in {folder}")
    return {"repo": repository, "url": url, "error": why}
