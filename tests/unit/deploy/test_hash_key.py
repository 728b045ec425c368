"""`tandem hash-key` prints what a keys file takes in a key's place."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tandem.deploy.cli import main
from tandem.router.access.api_keys import ApiKeys


def test_a_hash_stands_for_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-mine\n"))
    assert main(["hash-key"]) == 0
    assert main(["hash-key", "--new"]) == 0
    said = capsys.readouterr()
    made = said.err.strip().rpartition(" ")[2]
    path = tmp_path / "keys"
    path.write_text(said.out)
    keys = ApiKeys(str(path), lambda name: b"")
    for key in ("sk-mine", made):
        assert keys.check([(b"authorization", f"Bearer {key}".encode())]).name in said.out
    monkeypatch.setattr("sys.stdin", io.StringIO("two words\n"))
    assert main(["hash-key"]) == 2
