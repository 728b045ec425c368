"""Tiers of a node of two ranks: whole blocks in host memory and on disk, whoever reads them."""

from __future__ import annotations

from pathlib import Path

from node_child import NodeChild
from tier_nodes import LENGTHS, NUM_BLOCKS, NUM_HITS, Asker, always_loading, make_references

from in_process_cluster import BLOCK, Client, Node, node_options
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.contracts.wire.requests import FlushBlocks
from tiny_models import tiny_model

FULL_BLOCKS = [length // BLOCK for length in LENGTHS]


def until_counted(client: Client, node: NodeInfo, name: str, least: int) -> None:
    def counters() -> dict[str, float]:
        return dict(client.statuses[node.node_id].counters) if node.node_id in client.statuses else {}

    try:
        client.until(lambda: counters().get(name, 0) >= least)
    except AssertionError as error:
        raise AssertionError(f"{name} below {least}: {counters()}") from error


def test_two_ranks_keep_what_one_rank_finds(tmp_path: Path) -> None:
    """First what the two hand on comes back from host memory, then a node of one rank reads their disk."""
    references, disk = make_references(), {"disk_tier_bytes": 4 << 20, "disk_tier_dir": str(tmp_path)}
    child = NodeChild(("prefill",), "shm", num_blocks=NUM_BLOCKS, num_ranks=2, always_loads=True, **disk)
    decode = Node(node_options("decode", tiny_model("llama"), num_blocks=96, transport="shm"))
    (prefill,) = child.infos
    asker = Asker(decode, prefill=prefill)
    client = asker.client
    try:
        for turn in range(2):
            for index, wanted in enumerate(references):
                asker.ask(wanted)
                until_counted(
                    client, prefill, "tier_host_blocks", sum(FULL_BLOCKS[: index + 1] if not turn else FULL_BLOCKS)
                )
                client.send(decode.info, FlushBlocks())
        until_counted(client, prefill, "tier_host_hits", NUM_HITS)
        until_counted(client, prefill, "tier_disk_blocks", sum(FULL_BLOCKS))
        assert not client.statuses[prefill.node_id].counters["tier_loads_failed"]
    finally:
        client.close()
        decode.stop()
        child.stop()
    one = always_loading(Node(node_options("unified", tiny_model("llama"), num_blocks=NUM_BLOCKS, **disk)))
    asker = Asker(one)
    try:
        for wanted in references:
            asker.ask(wanted)
        assert asker.counts(one)["tier_disk_hits"] >= NUM_HITS
        one.wait_until_whole()
    finally:
        asker.client.close()
        one.stop()
