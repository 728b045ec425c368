"""Processes whose wall clock jumps while their monotonic clock goes on, by a small library that is preloaded."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


class WallClock:
    """Compiles the library into `folder`; every process that starts with `environment` sees the same clock."""

    def __init__(self, folder: Path) -> None:
        compiler = find_compiler()
        assert compiler is not None, "no C compiler"
        library, self._file = folder / "wall_clock.so", folder / "wall_clock.offset"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-pthread"], check=True)
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(self._file)}

    def jump_to(self, offset_s: int) -> None:
        """At once, of all processes: so many seconds ahead of the real clock."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("<q", offset_s))
