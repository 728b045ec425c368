"""What names stand for: tables that have heard the same are equal, in whatever order they heard it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.contracts.wire import adapter_table
from tandem.engine.contracts.wire.adapter_table import AdapterTable
from tandem.engine.contracts.wire.adapters import AdapterEntry

entries = st.builds(
    AdapterEntry, st.sampled_from("ab"), st.integers(0, 3), st.sampled_from(["", "/x", "/y"]), st.just(b"d")
)


@given(said=st.lists(entries, max_size=8), data=st.data())
def test_the_order_does_not_matter(said: list[AdapterEntry], data: st.DataObject) -> None:
    one, other = AdapterTable(), AdapterTable()
    for entry in said:
        one.merge([entry])
    changed = other.merge(data.draw(st.permutations(said)))
    assert one.entries == other.entries
    assert changed == bool(said)
    assert not one.merge(other.entries)


def test_what_was_unloaded_stays_so_until_a_later_word() -> None:
    table = AdapterTable()
    table.merge([AdapterEntry("a", 5, "/x", b"d"), AdapterEntry("a", 6)])
    assert not table.merge([AdapterEntry("a", 5, "/x", b"d")])
    assert table.next_stamp("a", 3) == 7, "a clock that is behind loads all the same"
    assert table.merge([AdapterEntry("a", 7, "/x", b"d")])


def test_the_first_unloaded_are_forgotten(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(adapter_table, "MAX_ENTRIES", 3)
    table = AdapterTable()
    table.merge([AdapterEntry("kept", 0, "/x", b"d"), *(AdapterEntry(f"gone{i}", i) for i in range(4))])
    assert [entry.name for entry in table.entries] == ["gone2", "gone3", "kept"]
