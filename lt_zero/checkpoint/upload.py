"""Writes files and folders at URLs, so that what can be seen there is whole.

Note [Uploads]
    Files are written in a transaction of fsspec: object stores complete an upload, and others rename a temporary file,
    only when it is committed; before that, an upload that fails is discarded, and what lies at the URL is unchanged.
    The files of a folder are committed together, after the index of an earlier export is removed and before their own
    index. So a folder without an index is one where a commit failed. Some file systems have no transactions: there
    each file appears when it is closed, so the files of an earlier export are removed first, and after an error what
    was written is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fsspec.spec import AbstractBufferedFile
from torch import Tensor

from lt_zero.checkpoint.native.directory import inside, naming_url, own_file_system
from lt_zero.checkpoint.native.torchfile import Write
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.pinned import view_of

_MANY = 256 << 30  # bytes of a file that has more parts of the usual size than a store may allow (S3: 10,000)
_PARTS = 5000  # of such a file
_INDEX = ".index.json"
_UNCHANGED = "existing files are unchanged"
_INCOMPLETE = "files of an earlier export may be missing there"


@contextmanager
def whole_file(url: str, expected: int = 0) -> Iterator[Write]:
    """Context that yields a function to write a file with; unless there is an error, it then appears at ``url``.

    Args:
        url: of the file.
        expected: its approximate size in bytes.

    Raises:
        CheckpointError: the file cannot be written; names the URL.
    """
    upload = _Upload(url, [])
    with upload:
        with upload.file(url, expected) as write:
            yield write
        upload.publish()


@contextmanager
def whole_folder(folder: str, earlier: Sequence[str]) -> Iterator[_Upload]:
    """Context for files that appear in ``folder`` (a URL) at its end, and replace the files ``earlier`` there.

    Raises:
        CheckpointError: the files cannot be written; names a URL.
    """
    with _Upload(folder, [inside(folder, name) for name in earlier]) as upload:
        yield upload
        upload.publish()


class _Upload(AbstractContextManager["_Upload"]):
    """Files that are written at one file system, and published together. See Note [Uploads].

    Args:
        url: of the file or folder.
        earlier: URLs of files that the new ones replace, or that are removed.
    """

    def __init__(self, url: str, earlier: list[str]) -> None:
        # Others may use an instance that they share with us: it must not be in a transaction.
        self._fs = own_file_system(url)
        self._earlier = earlier
        self._files: list[_File] = []
        self._state = _UNCHANGED
        self._fs.start_transaction()

    @contextmanager
    def file(self, url: str, expected: int = 0) -> Iterator[Write]:
        """Context that yields a function to write a new file with; ``expected``: its approximate size in bytes."""
        with self._naming(url):
            with contextlib.suppress(Exception):  # some stores have no folders; others say below what is wrong
                self._fs.makedirs(self._fs._parent(url), exist_ok=True)
            file = _File(self._fs, url, expected)
            self._files.append(file)
            if not file.is_held_back:
                if not file.is_buffered:
                    self._state = _INCOMPLETE  # what was there is gone since the file was opened
                self._remove_earlier(keep=[url])
                self._earlier = []

        def write(data: bytes | Tensor) -> None:
            with self._naming(url):
                file.write(bytes(view_of(data)) if isinstance(data, Tensor) else data)

        yield write
        with self._naming(url):
            file.close()

    def publish(self) -> None:
        """Make all files visible, the last one last, and remove earlier ones."""
        *files, last = self._files
        if files and self._earlier:
            self._state = _INCOMPLETE
        indices = [url for url in self._earlier if url.endswith(_INDEX)]
        for url in indices:
            with self._naming(url):
                self._remove(url)
        for file in files:
            with self._naming(file.url):
                file.commit()
        with self._naming(last.url):
            self._remove_earlier(keep=[file.url for file in self._files])
            last.commit()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._fs.transaction.files.clear()  # they are committed or discarded here
        if kind is not None:
            for file in self._files:
                file.discard()

    def _remove_earlier(self, keep: Sequence[str]) -> None:
        for url in (url for url in self._earlier if url not in keep):
            self._remove(url)

    def _remove(self, url: str) -> None:
        self._state = _INCOMPLETE
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(url)

    def _naming(self, url: str) -> AbstractContextManager[None]:
        """Context that turns any error of the file system into a CheckpointError that names ``url``."""
        return naming_url(
            lambda: f"Cannot write {url} ({self._state})",
            "Check the address and that your credentials allow writing and removing there, or export to a local path, "
            "and copy it.",
        )


class _File:
    """A file that is written front to back at a URL."""

    def __init__(self, fs: Any, url: str, expected: int) -> None:
        self.url = url
        self._fs = fs
        self._written = 0
        self._is_closed = self._is_committed = False
        self._stream: Any = fs.open(url, "wb", block_size=expected // _PARTS if expected > _MANY else None)
        commit = getattr(type(self._stream), "commit", AbstractBufferedFile.commit)
        self.is_held_back = commit is not AbstractBufferedFile.commit  # until ``commit``
        self.is_buffered = isinstance(self._stream, AbstractBufferedFile)

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._written += len(data)

    def close(self) -> None:
        """Send what is left. Without transactions the file appears."""
        self._stream.close()
        self._is_closed = True

    def commit(self) -> None:
        """Make the file visible, and check its size.

        Raises:
            CheckpointError: the file system has another number of bytes.
        """
        if self.is_held_back:
            self._stream.commit()
        self._is_committed = True
        size = self._fs.size(self.url)
        if size is not None and size != self._written:
            raise CheckpointError(
                f"{self.url} has {size} bytes, and {self._written} were written: the upload is damaged. Export again."
            )

    def discard(self) -> None:
        """Drop the file after an error, which is the one to report."""
        with contextlib.suppress(Exception):
            if not self._is_committed and hasattr(self._stream, "discard"):
                self._stream.discard()
        if self.is_buffered:
            # When it is collected, fsspec closes a file, which would complete its upload.
            self._stream.closed = True
        elif not self._is_closed:
            with contextlib.suppress(Exception):
                self._stream.close()
        is_visible = self._is_committed or not self.is_held_back and (self._is_closed or not self.is_buffered)
        if is_visible:
            with contextlib.suppress(Exception):
                self._fs.rm_file(self.url)
