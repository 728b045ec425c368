"""The product's wings, read off the links in tandem/, so that no rule about all of them can miss a new one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WINGS = tuple(sorted(path.name for path in (ROOT / "tandem").iterdir() if path.is_symlink()))
