"""Steps for which a rank had no memory, on their way to rank 0: a pipe, into which every other rank writes.

A rank writes before it takes part in what it has left to exchange of such a step. So when rank 0 has seen the step's
end on its device, the pipe holds the number, and asking costs a read that doesn't wait.
"""

from __future__ import annotations

import os
import struct

NUMBER = struct.Struct("<q")


def write_lost(fd: int, step_id: int) -> None:
    """Tells rank 0 that this rank had no memory for a step. Raises OSError when rank 0 is gone."""
    os.write(fd, NUMBER.pack(step_id))  # so few bytes are never torn


class LostSteps:
    """Rank 0's end of the pipe."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._lost: list[int] = []

    def started(self) -> None:
        """Closes this process's copy of the end that is written to, which the other ranks have by now."""
        os.close(self.write_fd)

    def have(self, step_id: int) -> bool:
        """Whether this step was lost, or one before it that nobody has asked for since; asked in the order of steps."""
        try:
            data = os.read(self._read_fd, 1 << 16)
        except BlockingIOError:
            data = b""
        self._lost += [lost for (lost,) in NUMBER.iter_unpack(data)]
        over = [lost for lost in self._lost if lost <= step_id]
        self._lost = [lost for lost in self._lost if lost > step_id]
        return bool(over)

    def close(self) -> None:
        os.close(self._read_fd)
