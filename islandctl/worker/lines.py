"""The log's lines on disk: each one whole, or none where the disk is full."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from islandctl.config.secrets import hide


class WholeLines(logging.Handler):
    """Writes each record at once to a file that is open for appending."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; on a full disk it is lost whole, so that the next one begins its own line."""
        try:
            data = (hide(self.format(record)) + "\n").encode(errors="replace")
        except Exception:  # a wrong format must not end the training
            self.handleError(record)
            return
        with suppress(OSError):
            written = os.write(self._descriptor, data)
            if written < len(data):  # where the disk ends, the beginning of a line is written without an error
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
