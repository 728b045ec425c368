"""Where this device's tables lie: those that come with Tandem in `tuned/`, those made here in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tandem.kernels.products.matmul_plans import Table, parse_table
from tandem.kernels.products.tuning.table_file import TableKey, device_of, made_table, merged, table_text

logger = logging.getLogger(__name__)

PRODUCTS = Path(__file__).parents[1]
SHIPPED = PRODUCTS / "tuned"
SOURCES = (
    PRODUCTS / "matmul_plans.py",
    *(
        PRODUCTS.parent / "triton_kernels" / "products" / f"matmul_{name}.py"
        for name in ("launch", "ring", "rows", "stream")
    ),
)


def made_folder() -> Path:
    """Where tables that were made on this machine lie. Raises RuntimeError for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tandem" / "products"


@functools.cache
def key_of(device: torch.device) -> TableKey:
    import triton

    properties = torch.cuda.get_device_properties(device)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    count = properties.multi_processor_count
    return TableKey(properties.name, count, torch.__version__, triton.__version__, digest)


def made_path(key: TableKey) -> Path:
    return made_folder() / key.file_name


def load_made(key: TableKey, *, warns: bool = True) -> Table:
    """What was made for `key` on this machine; empty where nothing was, or what lies there can't be used: `warns`."""
    try:
        return made_table(made_path(key).read_text(encoding="utf-8"), key)
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, ValueError) as error:
        logger.log(
            logging.WARNING if warns else logging.DEBUG,
            "the table of matrix products for %s is passed over: %s; delete it, or make it anew by `tandem kernels "
            "--tune MODEL`", key.device, error,
        )  # fmt: skip
        return {}


@contextlib.contextmanager
def measuring_alone() -> Iterator[bool]:
    """Whether no other process of this user measures on this machine, nor begins to within the context. False also
    where nothing can be written."""
    with contextlib.ExitStack() as stack:
        try:
            made_folder().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((made_folder() / "measuring.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except (OSError, RuntimeError):
            is_alone = False
        yield is_alone


def store_made(key: TableKey, table: Table) -> Path | None:
    """Adds to what lies there; None, and a warning, where nothing can be written."""
    try:
        path = made_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table_text(key, merged(load_made(key, warns=False), table)))
    except (OSError, RuntimeError) as error:
        logger.warning("the table of matrix products can't be kept, the next start measures again: %s", error)
        return None
    return path


def write_atomically(path: Path, text: str) -> None:
    """Raises OSError; what lay there is then unchanged."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    try:
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def shipped_tables(device: str, multiprocessors: int) -> tuple[Table, Table]:
    """(the table that comes for this device, what those for others with as many multiprocessors say of other sizes)."""
    own: Table = {}
    like: Table = {}
    for path in sorted(SHIPPED.glob("matmul_*.json")):
        text = path.read_text(encoding="utf-8")
        name, count = device_of(text)
        if count != multiprocessors:
            continue
        if name == device:
            own = parse_table(text)
        else:
            like = {**parse_table(text), **like}
    return own, like


def tables_to_try(device: str, multiprocessors: int) -> list[Table]:
    """The shipped tables whose kernels may suit a device: its own, or else all."""
    own, _ = shipped_tables(device, multiprocessors)
    if own:
        return [own]
    return [parse_table(path.read_text(encoding="utf-8")) for path in sorted(SHIPPED.glob("matmul_*.json"))]
