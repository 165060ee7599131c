"""Standard output and error that outlive whoever reads them: a pager, a pipe, a terminal that is closed."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


class Lasting(io.FileIO):
    """A descriptor that leads nowhere from when its reader has ended: the run has not."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """Puts such streams in place of this process's own, but not of what stands in for them in a notebook or a test."""
    for name in "stdout", "stderr":
        stream: Any = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and type(getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            raw = io.BufferedWriter(Lasting(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))
