"""Two folders share an identity exactly when KV of one is KV of the other; a second start doesn't read the weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.model_config import load_model_config
from tandem.engine.models import identity
from tandem.engine.models.identity import CACHE_NAME, model_identity
from tiny_models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(tiny_model("llama_sharded"), copied)
    return copied


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "CACHE_FROM_BYTES", 0)


def identify(folder: Path, hash_block_size: int = 64, dtype: str = "float32", **options: str) -> ModelIdentity:
    return model_identity(folder, load_model_config(folder), hash_block_size, dtype, **options)


def changed(one: ModelIdentity, other: ModelIdentity) -> set[str]:
    return {name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)}


def test_a_copy_elsewhere_has_the_same_identity(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(folder, other)
    assert identify(folder) == identify(other)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_any_weight_byte_changes_it(folder: Path, place: str) -> None:
    first = identify(folder)
    shards = sorted(folder.glob("*.safetensors"))
    shard = {"first": shards[0], "middle": shards[1], "last": shards[-1]}[place]
    data = bytearray(shard.read_bytes())
    offset = {"first": int.from_bytes(data[:8], "little") + 8, "middle": len(data) // 2, "last": len(data) - 1}[place]
    data[offset] ^= 1
    shard.write_bytes(data)
    assert changed(identify(folder), first) == {"weights"}


def test_tokenizer_config_rope_dtype_and_hash_block_size_change_it(folder: Path) -> None:
    first = identify(folder)
    assert changed(identify(folder, hash_block_size=32), first) == {"hash_block_size"}
    assert changed(identify(folder, dtype="bfloat16"), first) == {"config"}
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    second = identify(folder)
    assert changed(second, first) == {"tokenizer"}
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "rms_norm_eps": 1e-5}))
    assert changed(identify(folder), second) == {"config"}
    path.write_text(json.dumps({**raw, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}))
    assert changed(identify(folder), second) == {"config", "rope"}
    path.write_text(json.dumps(raw, indent=7))
    assert identify(folder) == second


def test_dummy_weights_have_an_identity_of_their_own(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert identify(folder, load_format="dummy").weights.startswith("dummy/")
    with pytest.raises(CheckpointError, match="is missing"):
        identify(folder)


@pytest.mark.usefixtures("cached")
def test_a_second_start_hashes_only_what_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    digest = identity._digest
    monkeypatch.setattr(identity, "_digest", lambda path: hashed.append(path.name) or digest(path))
    first = identify(folder)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(hashed) == shards
    hashed.clear()
    assert identify(folder) == first
    assert hashed == []
    os.utime(folder / shards[1], ns=(1, 1))
    assert identify(folder) == first
    assert hashed == [shards[1]]


@pytest.mark.usefixtures("cached")
def test_a_folder_that_cannot_be_written_is_cached_in_the_users_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / CACHE_NAME).mkdir()  # nothing can be put in its place, whoever runs this test
    first = identify(folder)
    assert len(list((tmp_path / "cache" / "tandem" / "digests").iterdir())) == 1
    monkeypatch.setattr(identity, "_digest", lambda path: pytest.fail(f"hashed {path} again"))
    assert identify(folder) == first
    assert not [path for path in folder.iterdir() if path.name.startswith("tmp")]


@pytest.mark.usefixtures("cached")
def test_a_damaged_cache_is_made_again(folder: Path) -> None:
    first = identify(folder)
    for damage in (b"{", b"[1]", b'{"a": 1}', b"\xff\xfe"):
        (folder / CACHE_NAME).write_bytes(damage)
        assert identify(folder) == first


def test_a_torn_shard_is_named_before_anything_is_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_digest", lambda path: pytest.fail(f"hashed {path}"))
    last = max(folder.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{last.name} is truncated"):
        identify(folder)


def test_small_models_leave_no_cache_behind(folder: Path) -> None:
    before = sorted(folder.iterdir())
    identify(folder)
    assert sorted(folder.iterdir()) == before


def test_the_key_is_made_of_every_field(folder: Path) -> None:
    first = identify(folder)
    keys = {msgspec.structs.replace(first, **{name: "x"}).key() for name in ("config", "weights", "tokenizer", "rope")}
    assert len(keys | {first.key()}) == 5
