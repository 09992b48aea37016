"""Output that cannot be written is dropped, so a reader that goes away does not end a run."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Output:
    """A text stream that drops what it cannot write, to a closed pipe or a lost terminal.

    A character that the stream's encoding does not have becomes its code, such as \\u03c0.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or open(os.devnull, "w")  # None: it was closed before Python began
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters
            with contextlib.suppress(OSError):  # it flushes first
                stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()


@contextlib.contextmanager
def unread_output_is_dropped() -> Iterator[None]:
    """Within this context nothing that is printed raises an error, progress bars included."""
    streams = Output(sys.stdout), Output(sys.stderr)
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            yield
        finally:
            for stream in streams:
                try:
                    stream.stream.flush()
                except OSError:  # Python flushes at exit again; an error would change the status.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
