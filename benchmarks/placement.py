"""How long a router takes to place one request: hash the prompt, look its blocks up, decide.

    python benchmarks/placement.py [--nodes 64] [--entries 1000000] [--tokens 8192] [--requests 2000]

The mirror holds `--entries` block hashes of `--nodes` nodes. Half of the prompts are cold; of the others one to eight
nodes hold all, or a prefix of random length. Hashing and lookup alone are of whole prompts, with all their hashes, as
nodes make them; a placement hashes what it needs. The elastic rule finds ten prompts on each
node. Beside each figure: its ratio to plain SHA-256 of the same bytes,
timed in the same run, so that figures of different machines compare. Target: 150 us median and 1 ms p99 for 8k tokens,
with a million entries and 64 nodes, at most 100 bytes an entry.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tandem.engine.contracts.hashing import PromptHashes, hash_blocks
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Targets
from tandem.engine.contracts.wire.work import NodeReport
from tandem.kv_connector.directory.mirror import Mirror
from tandem.kv_connector.directory.records import Batch, TierChange
from tandem.router.placing.elastic_finder import find_elastic, told_of
from tandem.router.placing.placement import PlacementRequest, find_placement
from tandem.router.placing.policies import PlacementPolicy, make_policy
from tandem.router.placing.view import NodeView

BLOCK = 64
ROOT = bytes(16)
BATCH_HASHES = 4096
QUEUED = 10  # prompts that each node reports


@dataclass
class Bed:
    """A mirror, nodes, and prompts that hit or miss it."""

    arguments: argparse.Namespace
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    bytes_per_entry: float = 0.0

    def __post_init__(self) -> None:
        count = self.arguments.nodes
        roles = ["prefill" if index % 2 else "decode" for index in range(count)]
        self.owners = [NodeKey(f"node-{index:03}", index + 1) for index in range(count)]
        self.nodes = [
            NodeView(
                NodeInfo(node_id=owner[0], epoch=owner[1], role=role),  # type: ignore[arg-type]
                Status(
                    node_id=owner[0],
                    epoch=owner[1],
                    num_blocks=1 << 20,
                    num_free_blocks=1 << 19,
                    block_size=BLOCK,
                    work=self._work(),
                ),
            )
            for owner, role in zip(self.owners, roles, strict=True)
        ]
        self.prompts = [self._tokens() for _ in range(self.arguments.requests)]
        self.mirror = Mirror(max_entries=2 * self.arguments.entries)

    def _work(self) -> NodeReport:
        prompts = [(self.rng.uniform(-1.0, 2.0), self.rng.randrange(100, 20_000)) for _ in range(QUEUED)]
        return NodeReport(2.3e-5, 2.3e-5, 3e-5, prompts=tuple(sorted(prompts)), num_streams=30, step_s=0.008,
                          stream_s_per_token=3e-8, targets=Targets(2.0, 0.025))  # fmt: skip

    def _tokens(self) -> np.ndarray:
        seed = self.rng.getrandbits(32)
        return np.random.default_rng(seed).integers(0, 128_000, self.arguments.tokens, dtype=np.int32)

    def held(self) -> Iterator[tuple[tuple[str, int], bytes]]:
        """(owner, hashes) of what somebody holds: of every fourth prompt all, of another a part."""
        for index, tokens in enumerate(self.prompts[::2]):
            hashes = hash_blocks(tokens, BLOCK, ROOT)
            prefix = b"".join(hashes[: self.rng.randrange(1, len(hashes) + 1)] if index % 2 else hashes)
            for owner in self.rng.sample(self.owners, min(len(self.owners), self.rng.choice((1, 1, 2, 8)))):
                yield owner, prefix

    def fill_mirror(self) -> None:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        mirror = self.mirror
        sequence = dict.fromkeys(self.owners, 0)

        def store(owner: tuple[str, int], hashes: bytes) -> None:
            sequence[owner] += 1
            change = TierChange("gpu", hashes)
            number, first = sequence[owner], sequence[owner] == 1
            node_id, epoch = owner
            mirror.apply(
                Batch(node_id=node_id, epoch=epoch, generation=1, sequence=number, reset=first, changes=(change,))
            )

        for owner in self.owners:
            mirror.adopt(owner)
        for owner, prefix in self.held():
            store(owner, prefix)
        while mirror.num_entries < self.arguments.entries:
            size = min(BATCH_HASHES, self.arguments.entries - mirror.num_entries)
            store(self.rng.choice(self.owners), self.rng.randbytes(16 * size))
        gc.collect()
        self.bytes_per_entry = (tracemalloc.get_traced_memory()[0] - before) / mirror.num_entries
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 64), ("entries", 1_000_000), ("tokens", 8192), ("requests", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    bed = Bed(arguments)
    bed.fill_mirror()
    gc.collect()
    gc.freeze()
    plain_s = timed(lambda tokens: hashlib.sha256(tokens.tobytes()).digest(), bed.prompts)[0]
    print(f"{arguments.tokens} tokens, {bed.mirror.num_entries} entries, {arguments.nodes} nodes; plain SHA-256 of the "
          f"tokens {plain_s * 1e6:.1f} us; {bed.bytes_per_entry:.1f} bytes an entry")  # fmt: skip
    print(f"{'step':28}{'median us':>10}{'p99 us':>10}{'max us':>10}{'x SHA-256':>11}")
    hashes = [hash_blocks(tokens, BLOCK, ROOT) for tokens in bed.prompts]
    report("hash", timed(lambda tokens: hash_blocks(tokens, BLOCK, ROOT), bed.prompts), plain_s)
    report("lookup", timed(bed.mirror.longest_prefix, hashes), plain_s)
    for name in ("elastic", "prefix_aware", "least_loaded", "power_of_two", "round_robin"):
        policy = make_policy(name, seed=1)  # type: ignore[arg-type]
        for what, prompts in (("held", bed.prompts[::4]), ("part", bed.prompts[2::4]), ("cold", bed.prompts[1::2])):
            of = policy if name != "elastic" else None
            seconds = timed(lambda tokens, of=of: place(bed, of, tokens), prompts)
            report(f"all, {name}, {what}", seconds, plain_s)


def place(bed: Bed, policy: PlacementPolicy | None, tokens: np.ndarray) -> None:
    """Places as `Cluster` does; by the elastic rule without a policy."""
    now = time.monotonic()
    found = bed.mirror.longest_prefix(PromptHashes(tokens, BLOCK, lambda salt: ROOT))
    cached = {owner: BLOCK * length for owner, length in found.items()}
    request = PlacementRequest(len(tokens), 64)
    if policy is None:
        placement = find_elastic(request, bed.nodes, cached, now)
    else:
        placement = find_placement(request, bed.nodes, cached, 256, policy, now)
    assert placement is not None
    for told, choice in zip(told_of(placement, request), placement.choices, strict=True):
        choice.node.note_placement(1, told.num_tokens, 1, now, told.num_new_tokens)
        if policy is None:  # else the queues would grow without end
            choice.node.note_status(choice.node.status, now)


def timed(step: Callable[..., object], items: list) -> list[float]:
    """CPU seconds of each call, so that other programs on the machine don't show: median, 99th percentile, maximum."""
    seconds = []
    for item in items:
        started = time.thread_time()
        step(item)
        seconds.append(time.thread_time() - started)
    seconds.sort()
    return [seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100], seconds[-1]]


def report(name: str, seconds: list[float], plain_s: float) -> None:
    cells = "".join(f"{value * 1e6:10.1f}" for value in seconds)
    print(f"{name:28}{cells}{seconds[0] / plain_s:11.2f}")


if __name__ == "__main__":
    main()
