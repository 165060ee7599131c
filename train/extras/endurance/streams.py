"""Standard output and error that outlive whoever reads them: a pager, a pipe, a terminal that is closed."""

import errno
import io
import os
import sys
from typing import Any


class Lasting(io.FileIO):
    """Discards what is written once its reader is gone, so that the run continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Puts such streams in place of this process's own; what notebooks and tests put there stays."""
    for name in "stdout", "stderr":
        stream: Any = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and type(getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            stream.flush()
            raw: Any = Lasting(stream.fileno(), "w", closefd=False)
            buffer = io.BufferedWriter(raw) if hasattr(stream.buffer, "raw") else raw  # python -u has none
            style: Any = {"line_buffering": True, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", **style))
