"""What a real node tells Redis about itself while it works."""

from __future__ import annotations

from waiting import wait_until

from in_process_cluster import Node, node_options
from redis_process import running_redis
from tandem.kv_connector.directory.records import KeySpace, decode_record
from tiny_models import tiny_model


def test_a_nodes_record_lives_as_long_as_it() -> None:
    with running_redis() as server:
        node = Node(node_options("unified", tiny_model("llama"), redis_url=server.url, namespace="record"))
        key, redis = KeySpace("record").node(node.info.node_id), server.client()
        try:
            wait_until(lambda: redis.exists(key), "the record")
            packed = redis.get(key)
            assert packed is not None
            record = decode_record(packed)
            assert (record.owner, record.role, record.control_address) == (
                node.info.key, "unified", node.info.control_address,
            )  # fmt: skip
            assert record.num_blocks == node.process.pool.num_blocks
        finally:
            node.stop()
        assert redis.get(key) is None
