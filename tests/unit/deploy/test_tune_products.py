"""`tandem kernels --tune`: which products a model has, and what is refused where nothing can be tuned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tandem.deploy.cli import main
from tandem.deploy.options import DEMO_MODEL
from tandem.deploy.tune_products import _read, products_of
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.contracts.weights.quantisation import Quantisation, made_fp8
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.products.tuning import stored
from tandem.kernels.products.tuning.candidates import Product
from tandem.kernels.products.tuning.table_file import TableKey, table_text

LLAMA_8B = msgspec.structs.replace(
    load_model_config(DEMO_MODEL),
    hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_products_are_those_of_the_shipped_table(ranks: int) -> None:
    products = products_of(LLAMA_8B, Shard(0, ranks))
    shipped, _ = stored.shipped_tables("NVIDIA H200", 132)
    assert {product[:2] for product in products} <= shipped.keys()
    assert [product.inputs for product in products if product.gated] == [4096]


def test_of_a_quantised_model_the_output_matrix_is_tuned() -> None:
    quantised = msgspec.structs.replace(LLAMA_8B, quantisation=made_fp8())
    assert products_of(quantised, Shard(0, 1)) == [Product(128256, 4096)]
    of_experts = Quantisation(stored="mxfp4", bits=4, group=32)
    assert len(products_of(msgspec.structs.replace(LLAMA_8B, quantisation=of_experts), Shard(0, 1))) == 5


def test_without_a_hopper_gpu_nothing_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--tune", str(DEMO_MODEL), "--device", "cpu"]) == 2
    assert "need a Hopper GPU" in capsys.readouterr().err


def test_a_file_of_another_device_is_not_added_to(tmp_path: Path) -> None:
    key, path = TableKey("NVIDIA H100", 132, "2", "3", "k"), tmp_path / "table.json"
    assert _read(path, key) == {}
    path.write_text(table_text(key, {(64, 64): ((1, None),)}))
    assert _read(path, key) == {(64, 64): ((1, None),)}
    with pytest.raises(ConfigError, match="a table for NVIDIA H100; choose another"):
        _read(path, key._replace(device="NVIDIA H200"))
    path.write_text("{")
    with pytest.raises(ConfigError, match="choose another file"):
        _read(path, key)


def test_a_file_that_cant_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    key = TableKey("NVIDIA H100", 132, "2", "3", "k")
    assert _read(tmp_path / "new" / "folder" / "table.json", key) == {}
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another file"):
        _read(tmp_path / "file" / "table.json", key)


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_shipped_plans_can_run(device: str) -> None:
    table, _ = stored.shipped_tables(device, 132)
    assert table.keys() >= {product[:2] for ranks in (1, 2) for product in products_of(LLAMA_8B, Shard(0, ranks))}
    for (outputs, inputs), steps in table.items():
        assert all(plan is None or plan.is_valid(rows, outputs, inputs) for rows, plan in steps)
