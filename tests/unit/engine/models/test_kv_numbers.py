from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tandem.engine.contracts.config import CacheOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.device.kv_encoding import KVEncoding, LayerScales, choose_kv_encoding

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def choose(dtype: str, scales: str = "", device: torch.device = CPU) -> KVEncoding:
    return choose_kv_encoding(CacheOptions(kv_cache_dtype=dtype, kv_scales=scales), torch.bfloat16, device, 2)  # type: ignore[arg-type]


def test_names() -> None:
    assert choose("auto") == KVEncoding(torch.bfloat16)
    assert choose("float32") == KVEncoding(torch.float32)
    assert choose("fp8_e4m3", device=GPU) == KVEncoding(torch.float8_e4m3fn)
    assert choose("bfloat16", device=GPU) == KVEncoding(torch.bfloat16)
    with pytest.raises(ConfigError, match="choose auto or fp8_e4m3"):
        choose("float16", device=GPU)


def test_scales_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"k": [0.5, 1], "v": [2, 0.25]}))
    assert choose("fp8_e4m3", str(path)).scales == LayerScales((0.5, 1.0), (2.0, 0.25))
    with pytest.raises(ConfigError, match="give both or neither"):
        choose("bfloat16", str(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "expected"),
        ('{"k": [1, 1]}', "expected"),
        ('{"k": [1, 1], "v": [1, 1], "q": []}', "expected"),
        ('{"k": [1, 1], "v": [1]}', "2 layers"),
        ('{"k": [1, 1], "v": [1, 0]}', "above 0"),
        ('{"k": [1, -1], "v": [1, 1]}', "above 0"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        choose("fp8_e4m3", str(path))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        choose("fp8_e4m3", str(tmp_path / "nowhere"))
