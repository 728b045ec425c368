"""`tandem kernels --tune MODEL`: measures the matrix products of a model's decode steps on this device, for a table."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.models.choice import load_config
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.products import matmul_device
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP, Table, parse_table
from tandem.kernels.products.tuning import stored
from tandem.kernels.products.tuning.candidates import LADDER, Product
from tandem.kernels.products.tuning.run import tune_products
from tandem.kernels.products.tuning.table_file import TableKey, device_of, merged, table_text
from tandem.kernels.products.tuning.tuner import Times

MOST_WORKERS = 16  # processes that compile, each with a context on the device; a guess


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Prints each product's best plans beside torch. Raises ConfigError for a model or device that has nothing to tune,
    or a file that can't be written."""
    config = load_config(resolve_model(arguments.tune, ""), ModelOptions(arguments.tune))
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"--tune {arguments.tune}: it runs by transformers' modules; its products are measured at start"
        )
    products = products_of(config, Shard(0, arguments.tensor_parallel_size))
    if not matmul_device.is_hopper(device):
        raise ConfigError("--tune: the kernels to choose from need a Hopper GPU; elsewhere products are torch's")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    key, into = stored.key_of(device), Path(arguments.tune_into) if arguments.tune_into else None
    before = {} if into is None else _read(into, key)
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    found = tune_products(device, products, LADDER, arguments.tune_seconds, workers, _tell)
    if into is None:
        path = stored.store_made(key, found.table)
    else:
        path = _write(into, table_text(key, merged(before, found.table)))
    left = f", {found.left} not, for which --tune-seconds was too short" if found.left else ""
    print(f"{len(found.times)} products measured{left}; written: {path}")
    return 0 if found.times and path is not None else 1


def products_of(config: ModelConfig, shard: Shard) -> list[Product]:
    """The products of 16 bits of a rank's decode steps. Raises ConfigError where ranks can't share the model."""
    own, hidden = shard.config(config), config.hidden_size
    first, last = shard.vocab(config)
    heads = own.num_heads * own.head_dim
    products = [Product(last - first, hidden)]
    if config.quantisation is None or config.quantisation.has_plain_layers:
        products += [
            Product(heads + 2 * own.num_kv_heads * own.head_dim, hidden),
            Product(hidden, heads),
        ]
        if config.mixture is None:
            outputs = 2 * own.intermediate_size
            gated = not config.mlp_bias and outputs % (2 * GATE_UP_GROUP) == 0
            products += [Product(outputs, hidden, gated), Product(hidden, own.intermediate_size)]
    return products


def _tell(rows: int, product: Product, times: Times) -> None:
    best = sorted((seconds, plan) for plan, seconds in times.items() if plan is not None)[:3]
    listed = "; ".join(f"{seconds * 1e6:.1f} {','.join(map(str, plan))}" for seconds, plan in best)
    sizes = f"{product.outputs} x {product.inputs}"
    print(f"  {rows:3} rows of {sizes:14} torch {times[None] * 1e6:8.1f} us; ours {listed or 'none'}", flush=True)


def _read(path: Path, key: TableKey) -> Table:
    """What the file holds already. Raises ConfigError unless it is of such a device, or can be made: before minutes of
    measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        text = path.read_text(encoding="utf-8")
        if device_of(text) != key[:2]:
            raise ConfigError(f"--tune-into {path}: it is a table for {device_of(text)[0]}; choose another file")
        return parse_table(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tune-into {path}: {error}; choose another file") from None


def _write(path: Path, text: str) -> Path:
    try:
        stored.write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"--tune-into {path}: {error.strerror}; choose another file") from None
    return path
