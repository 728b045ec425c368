"""Tables as text: those that come with Tandem and those that a node made for itself. Pure.

A made table says for which device, libraries and kernels it holds, and has a digest of its plans: one that was cut
short, or comes from elsewhere, is not taken for this device's.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from tandem.kernels.products.matmul_plans import MULTIPROCESSORS, Table, parse_table


class TableKey(NamedTuple):
    """What a table holds for: other plans would be best, or right, with anything else."""

    device: str
    multiprocessors: int
    torch: str
    triton: str
    kernels: str  # a digest of the kernels' source

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(self).encode()).hexdigest()[:12]
        return f"matmul_{self.device.replace(' ', '_').replace('/', '_')}_{digest}.json"


def table_text(key: TableKey, table: Table) -> str:
    """JSON, a line for each weight: what `made_table` reads and, but for the key, `parse_table`."""
    products = {f"{outputs},{inputs}": steps for (outputs, inputs), steps in sorted(table.items())}
    lines = ",\n".join(f"    {json.dumps(sizes)}: {json.dumps(steps)}" for sizes, steps in products.items())
    fields = {**key._asdict(), "digest": _digest(products)}
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in fields.items())
    return f'{{\n{head}  "products": {{\n{lines}\n  }}\n}}\n'


def made_table(text: str, key: TableKey) -> Table:
    """The table that was made for `key`. Raises ValueError for any other text."""
    made = _object_of(text)
    for name, value in key._asdict().items():
        if made.get(name) != value:
            raise ValueError(f"its {name} is {made.get(name)!r}, here it is {value!r}")
    if made.get("digest") != _digest(made.get("products")):
        raise ValueError("its digest is not that of its plans")
    return parse_table(text)


def device_of(text: str) -> tuple[str, int]:
    """Name and number of multiprocessors of the device that a table was measured on. Raises ValueError."""
    made = _object_of(text)
    return str(made.get("device")), int(made.get("multiprocessors", MULTIPROCESSORS))


def merged(older: Table, newer: Table) -> Table:
    """Both; of a number of rows that both measured for a weight, the newer."""
    sizes = {**older, **newer}
    return {size: tuple(sorted({**dict(older.get(size, ())), **dict(newer.get(size, ()))}.items())) for size in sizes}


def _object_of(text: str) -> dict[str, Any]:
    made = json.loads(text)
    if not isinstance(made, dict):
        raise ValueError("it is no object")
    return made


def _digest(products: object) -> str:
    return hashlib.sha256(json.dumps(products, sort_keys=True).encode()).hexdigest()[:16]
