"""Copy a folder to and from an object store, which a URL names: s3://, gs://, abfs://, file:// and what else fsspec knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from raafl.errors import BadInput, one_line
from raafl.sanitize import URL, sanitize_text

_WITH_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


def _whole_url(url: str, field: str) -> str:
    """Normalise a URL: scheme in lower case, no slash at the end.

    Raises BadInput if it lacks its scheme, bucket or folder, for example because a shell variable was empty.
    """
    found = URL.fullmatch(url)
    scheme, rest = ("", "") if found is None else (found[1].lower(), found[2].rstrip("/"))
    if not scheme or not rest or (scheme in _WITH_BUCKETS and rest.startswith("/")):
        raise BadInput(
            f"{field} is '{sanitize_text(url, 200)}', which names no folder of a store: give its scheme, bucket and path, "
            "such as s3://bucket/run"
        )
    return f"{scheme}://{rest}"


class ObjectStore:
    """A folder in an object store such as S3; its files are named by paths relative to the folder.

    Methods may raise any error of the store's own library; most of these are an `OSError`.

    `url`: URL of the folder.
    """

    def __init__(self, url: str, field: str = "output") -> None:
        """Find the file system for ``url``, without a request to it.

        Raises BadInput if the URL lacks a part, no file system has its scheme, or a package is missing.
        """
        from fsspec.core import url_to_fs

        self.url = _whole_url(url, field)
        try:
            self._files, self._root = url_to_fs(self.url)
        except Exception as error:  # each file system has its own types of error for a wrong URL
            raise BadInput(
                f"{field} is '{sanitize_text(url, 200)}', which cannot be used ({sanitize_text(error, 200)}): install the "
                "package for this kind of store, such as s3fs, gcsfs or adlfs, or name a folder"
            ) from error
        self._root = self._root.rstrip("/")

    @classmethod
    @contextmanager
    def answering(cls, url: str, field: str) -> Iterator[ObjectStore]:
        """Open an object store for a `with` block; errors of the store in the block become a `BadInput` about ``field``."""
        store = cls(url, field)
        try:
            yield store
        except BadInput:
            raise
        except Exception as error:  # each store's library has its own types of error
            why = one_line(f"{type(error).__name__}: {error}")
            raise BadInput(
                f"{field} is '{sanitize_text(url, 200)}', which cannot be used ({why}): check the URL, the credentials and "
                "the network"
            ) from error

    def names(self) -> list[str]:
        """List the paths of all files in the folder but hidden ones, sorted; an empty list if the folder does not exist."""
        self._files.invalidate_cache()
        found = self._files.find(self._root)
        names = (path.removeprefix(self._root).lstrip("/") for path in found)
        return sorted(name for name in names if "/." not in f"/{name}")

    def put(self, file: Path, name: str, moved: Callable[[], None] = lambda: None) -> None:
        """Upload a file; readers see the whole file or none of it."""
        from fsspec.callbacks import Callback

        class Sent(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                moved()

        with self._whole(name) as path:
            self._files.put_file(str(file), path, callback=Sent())

    def write(self, data: bytes, name: str) -> None:
        """Write a small file to the store; readers see the whole file or none of it."""
        with self._whole(name) as path:
            self._files.pipe_file(path, data)

    def remove(self, name: str) -> None:
        """Remove the file ``name`` from the store."""
        self._files.rm(f"{self._root}/{name}")

    def rename(self, suffix: str) -> None:
        """Rename the folder by appending ``suffix`` to its name."""
        self._files.mv(self._root, self._root + suffix, recursive=True)

    def fetch(self, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Download files into a local folder; return the number of files.

        Raises:
            BadInput: a file's path leads out of the local folder, so somebody else has written to the store.
        """
        names = [name for name in self.names() if wanted(name)]
        for name in names:
            target = folder / _inside(name, self.url)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(f"{self._root}/{name}", str(target))
        return len(names)

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """Yield the path to write to; in a local folder that is a temporary file, renamed when the ``with`` block ends."""
        path = f"{self._root}/{name}"
        from fsspec.implementations.local import LocalFileSystem

        if not isinstance(self._files, LocalFileSystem):
            yield path
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = str(Path(path).with_name(f".{Path(path).name}.tmp"))
        yield temporary
        os.replace(temporary, path)


def _inside(name: str, url: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise BadInput(
            f"'{sanitize_text(url, 200)}' has a file '{sanitize_text(name, 100)}', which is not part of a run "
            "folder: remove it"
        )
    return path
