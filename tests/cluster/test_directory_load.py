"""What a real node tells Redis about itself while it works."""

from __future__ import annotations

import time
from collections.abc import Callable

from split_pair import GREEDY, changed
from waiting import PATIENCE_S

from in_process_cluster import Client, Node, node_options
from redis_process import running_redis
from tandem.kv_connector.directory.records import KeySpace, NodeRecord, decode_record
from tiny_models import random_prompt, tiny_model


def test_a_nodes_record_follows_its_load() -> None:
    with running_redis() as server:
        options = node_options("unified", tiny_model("llama"), redis_url=server.url, namespace="load", max_num_seqs=2)
        node = Node(options)
        client, redis = Client(node.info), server.client()

        def record() -> NodeRecord:
            packed = redis.get(KeySpace("load").node(node.info.node_id))
            assert packed is not None
            return decode_record(packed)

        def wait_for(condition: Callable[[NodeRecord], bool]) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while not (redis.exists(KeySpace("load").node(node.info.node_id)) and condition(record())):
                assert time.monotonic() < deadline, record()
                client.poll(0.01)

        try:
            wait_for(lambda found: found.load.num_free_blocks == found.num_blocks == node.process.pool.num_blocks)
            assert (record().load.num_running, record().load.num_waiting) == (0, 0)
            long = changed(GREEDY, max_tokens=1900)
            for number in range(4):
                client.submit(f"r{number}", random_prompt(40, seed=number), long, decode=node.info)
            wait_for(lambda found: (found.load.num_running, found.load.num_waiting) == (2, 2))
            assert record().load.num_free_blocks < record().num_blocks
            assert record().load.num_waiting_tokens == 80
            for number in range(4):
                client.cancel(f"r{number}", 0, node.info)
            wait_for(lambda found: found.load.num_free_blocks == found.num_blocks and not found.load.num_running)
        finally:
            client.close()
            node.stop()
        assert redis.get(KeySpace("load").node(node.info.node_id)) is None
