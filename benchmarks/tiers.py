"""Time to first token of a prompt that is computed, and of the same prompt found in each tier. One node, in-process.

    python benchmarks/tiers.py MODEL_FOLDER [--load-format dummy] [--prompt-tokens 8192] [--repeats 5]
                               [--disk-dir DIR --disk-bytes N] [--num-blocks N] [--host-bytes N] [--host-dtype fp8_e4m3]

For each repeat: a fresh prompt (computed), again (device pool), then after other prompts have displaced it from the
pool (host); and another one after as many have displaced it from host memory too (disk: give a small --host-bytes).
Prints milliseconds, medians.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import threading
import time

import numpy as np
import zmq

from tandem.decode_node.main import make_logic
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.contracts.wire.requests import RequestFailed, Submit, Tokens
from tandem.node.process import NodeProcess

SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class OneNode:
    """A unified node on a thread, and a connection to it as a router has one."""

    def __init__(self, options: NodeOptions) -> None:
        self.process = NodeProcess(options, make_logic)
        self.process.warm_up()
        self.process.start()
        self._thread = threading.Thread(target=self.process.run, daemon=True)
        self._thread.start()
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        router = NodeInfo(node_id=f"router-{secrets.token_hex(3)}", epoch=secrets.randbits(64), role="router")
        self._socket.setsockopt(zmq.IDENTITY, router.node_id.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.process.info.control_address)
        self._socket.send(codec.encode(Hello(wire_version=WIRE_VERSION, info=router)))

    def ttft_ms(self, prompt: np.ndarray) -> float:
        began = time.perf_counter()
        submit = Submit(
            request_id=secrets.token_hex(8),
            attempt=0,
            mode="full",
            prompt_token_ids=prompt.astype("<i4").tobytes(),
            num_prior_output_tokens=0,
            sample_indices=(0,),
            sampling=SAMPLING,
            priority=0,
            deadline_s=60.0,
            peer=None,
        )
        self._socket.send(codec.encode(submit))
        while True:
            message = codec.decode_from_node(self._socket.recv())
            if isinstance(message, RequestFailed):
                raise RuntimeError(message.message)
            if isinstance(message, Tokens) and any(d.request_id == submit.request_id for d in message.deltas):
                return (time.perf_counter() - began) * 1e3

    def settle(self) -> None:
        """Waits until an idle node has written back what it will."""
        last = None
        while (counts := self.counts()) != last:
            last = counts
            time.sleep(0.3)

    def counts(self) -> dict[str, float]:
        assert self.process.tiers is not None
        return self.process.tiers.counters()

    def close(self) -> None:
        self.process.loop.begin_drain()
        self._thread.join(20)
        self._socket.close()


def displace(node: OneNode, prompt: np.ndarray, num_tokens: int, rng: np.random.Generator) -> None:
    """Computes other prompts of `num_tokens` in all, each as long as `prompt`."""
    vocab_size = node.process.info.vocab_size
    for _ in range(-(-num_tokens // len(prompt)) + 1):
        node.ttft_ms(rng.integers(0, vocab_size, len(prompt)))
        node.settle()


def measure(node: OneNode, num_prompt_tokens: int, repeats: int, with_disk: bool) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    block_size, pool = node.process.options.cache.block_size, node.process.pool
    times: dict[str, list[float]] = {}
    displace(node, np.zeros(num_prompt_tokens, np.int32), 1, rng)  # warm
    for _ in range(repeats):
        prompt = rng.integers(0, node.process.info.vocab_size, num_prompt_tokens)
        for place, num_others in (("computed", 0), ("device", 0), ("host", pool.num_blocks * block_size)):
            if num_others:
                node.settle()
                displace(node, prompt, num_others, rng)
            times.setdefault(place, []).append(node.ttft_ms(prompt))
        if with_disk:
            assert node.process.tiers is not None
            prompt = rng.integers(0, node.process.info.vocab_size, num_prompt_tokens)
            node.ttft_ms(prompt)
            node.settle()
            displace(node, prompt, (pool.num_blocks + node.process.tiers.num_host_blocks) * block_size, rng)
            times.setdefault("disk", []).append(node.ttft_ms(prompt))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-blocks", type=int, default=0, help="of the device pool; default: two prompts")
    parser.add_argument("--host-bytes", type=int, default=-1)
    parser.add_argument("--host-dtype", default="auto", choices=("auto", "fp8_e4m3"))
    parser.add_argument("--disk-dir", default="")
    parser.add_argument("--disk-bytes", type=int, default=0)
    given = parser.parse_args()
    num_blocks = given.num_blocks or 2 * (given.prompt_tokens // CacheOptions.block_size + 1)
    cache = CacheOptions(
        num_blocks=num_blocks,
        host_tier_bytes=given.host_bytes,
        host_tier_dtype=given.host_dtype,
        disk_tier_bytes=given.disk_bytes,
        disk_tier_dir=given.disk_dir,
    )
    node = OneNode(NodeOptions("unified", ModelOptions(given.model, load_format=given.load_format), cache=cache))
    times = measure(node, given.prompt_tokens, given.repeats, with_disk=bool(given.disk_bytes))
    for place, values in times.items():
        print(f"{place:10} {statistics.median(values):9.2f} ms   all {[round(value, 2) for value in values]}")
    print({name: int(value) for name, value in node.counts().items() if name.startswith("tier_")})
    node.close()


if __name__ == "__main__":
    main()
