"""What pushing KV to a peer GPU costs and how fast it is, in one process with two GPUs, by the product's own push path.

    python benchmarks/push.py MODEL [--load-format dummy] [--tokens 8192] [--programs 8 16] [--repeat 24]

1. 1 GiB of blocks from scattered places to scattered places of a pool on the other GPU, beside a plain peer copy of as
   many bytes: whole and layer by layer, as the transport does it, and by its kernel of so many programs.
2. One prompt's prefill with nothing pushed, with every layer pushed, and with every layer pushed and digested. Kinds
   take turns, in an order drawn anew for each turn: clocks depend on what ran just before.
3. The sink's check of the digests of that prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, LayerPlace, push_groups
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import NewSlot, SampleRow, ScheduledRow, SchedulerOutput
from tandem.kernels.blocks.digest import BlockSums, digests_of_sums
from tandem.kernels.blocks.digest_pass import SumPasses
from tandem.kernels.check.measure import median_event_seconds
from tandem.kv_connector.layouts.geometry import pool_stride_bytes
from tandem.kv_connector.protocol.jobs import BlockPush, Finalize, ReadySent, StepMoves, digest_key
from tandem.kv_connector.transfer.layer_hooks import ConnectorWorker
from tandem.kv_connector.transfer.thread import TransferWorker
from tandem.kv_connector.transports.base import PairSums, RegisteredPool, Write
from tandem.kv_connector.transports.mapped import cuda_ipc
from tandem.kv_connector.transports.mapped.base import MappedChannel
from tandem.node.setup import LoadedModel, load, with_device_defaults

AS_CHOSEN = cuda_ipc.way_of
GIB = 1 << 30
LLAMA_8B = KVLayout((KVGroup(32, 8, 128, "bfloat16"),), 64)
TARGET_GB_S = 330.0
ALONE = "nothing pushed"
Pools = tuple[torch.Tensor, torch.Tensor]


class SameProcessMapping(cuda_ipc.CudaMapping):
    """The second pool as the first one's device sees it; in one process no handle is needed."""

    def __init__(self, pools: Pools) -> None:
        source, sink = pools
        sink[:1].copy_(source[:1])  # torch lets the devices reach each other
        super().__init__(source.device, sink.data_ptr(), 0, pool_stride_bytes(sink))

    def _unmap(self) -> None: ...


@dataclass(frozen=True)
class Way:
    """How blocks travel: as the transport chooses, or by its kernel alone."""

    name: str
    num_programs: int = 0

    def choose(self) -> None:
        by_kernel = cuda_ipc.CopyPath.KERNEL, self.num_programs
        cuda_ipc.way_of = (lambda *asked: by_kernel) if self.num_programs else AS_CHOSEN


def ways_of(programs: Sequence[int]) -> list[Way]:
    return [Way("as chosen"), *(Way(f"kernel, {number} programs", number) for number in programs)]


def seconds(run: Callable[[], object], repeat: int) -> float:
    """Median seconds of a call, on the current device's stream."""
    return median_event_seconds(run, repeat, warm=1)


def measure_wire(ways: Sequence[Way], repeat: int) -> dict[str, float]:
    """Measures how fast blocks travel."""
    found: dict[str, float] = {}
    num_blocks = GIB // LLAMA_8B.payload_bytes
    pools = tuple(allocate_pool(LLAMA_8B, 2 * num_blocks, f"cuda:{index}") for index in range(2))
    source, sink = pools
    source.normal_()
    mapping = SameProcessMapping((source, sink))
    places = [random.Random(seed).sample(range(2 * num_blocks), num_blocks) for seed in range(2)]
    pairs = list(zip(*places, strict=True))
    valid = [LLAMA_8B.block_size] * num_blocks
    grant = make_grant(AttemptKey("wire", 0), places[1], num_blocks * LLAMA_8B.block_size)
    plain = seconds(lambda: sink[:num_blocks].copy_(source[:num_blocks], non_blocking=True), repeat)

    def push(layers: range | None, with_sums: bool) -> None:
        sums = PairSums(BlockSums.of_none(source, num_blocks, 7), range(num_blocks)) if with_sums else None
        for chosen in [None] if layers is None else push_groups(len(layers)):
            mapping.copy_in(source, Write(grant, pairs, chosen, valid, sums))

    print(f"1 GiB of {num_blocks} scattered blocks to scattered places, GB/s; plain peer copy {GIB / plain / 1e9:.0f}")
    print(f"  {'':24}{'whole':>10}{'digested':>10}{'by layer':>10}{'digested':>10}   (target {TARGET_GB_S:.0f} whole)")
    for way in ways:
        way.choose()
        rates = []
        for layers in (None, range(LLAMA_8B.group.num_layers)):
            for with_sums in (False, True):
                sink.zero_()
                torch.cuda.synchronize(sink.device)
                took = seconds(lambda layers=layers, with_sums=with_sums: push(layers, with_sums), repeat)
                rates.append(GIB / took / 1e9)
                assert torch.equal(sink[places[1]], source[places[0]].to(sink.device)), f"{way.name}: not what was sent"
        print(f"  {way.name:24}{''.join(f'{rate:10.0f}' for rate in rates)}", flush=True)
        found = found or {"plain_gb_s": GIB / plain / 1e9, "whole_gb_s": rates[0]}
    return found


def make_grant(key: AttemptKey, block_ids: Sequence[int], num_tokens: int) -> KVGrant:
    return KVGrant(
        request_id=key.request_id, attempt=0, grant_id=hash(key) & (1 << 62) - 1, source_id="p", source_epoch=1,
        sink_id="d", sink_epoch=2, first_block=0, block_ids=tuple(block_ids), num_prompt_tokens=num_tokens,
        lease_s=60.0,
    )  # fmt: skip


@dataclass
class Prefill:
    """One engine's runner that pushes what it computes into a pool on the other device."""

    loaded: LoadedModel
    runner: ModelRunner
    sink_pool: torch.Tensor  # the mapping knows its address only
    transfer: TransferWorker
    events: list[object]
    grant_of: Callable[[AttemptKey, int], KVGrant]
    num_steps: int = 0

    def run(self, num_tokens: int, pushes: bool, digests: bool) -> tuple[float, float]:
        """Seconds until the prompt's token is on the host, and until the sink has been told that all is there."""
        block_size = self.loaded.layout.block_size
        num_blocks = -(-num_tokens // block_size)
        self.num_steps += 1
        key = AttemptKey(f"r{self.num_steps}", 0)
        grant, meta = self.grant_of(key, num_blocks), None
        blocks, last = tuple(range(num_blocks)), num_tokens - (num_blocks - 1) * block_size
        valid = (*[block_size] * (num_blocks - 1), last)
        if pushes:
            meta = StepMoves(self.num_steps, (BlockPush(key, grant, blocks, grant.block_ids, valid),), ())
        vocabulary = self.loaded.config.vocab_size
        tokens = np.random.default_rng(self.num_steps).integers(10, vocabulary, num_tokens, dtype=np.int32)
        step = SchedulerOutput(
            self.num_steps,
            (ScheduledRow(0, 0, num_tokens),),
            (SampleRow(0, 0, num_tokens, 0, 0),),
            (NewSlot(0, tokens, num_tokens, blocks, SamplingParams(temperature=0.0), 0),),
            connector_meta=meta,
        )
        self.transfer.sent_digests.are_wanted = digests
        began = time.perf_counter()
        self.runner.execute(step).result()
        took = time.perf_counter() - began
        if pushes:
            self.transfer.submit(Finalize(key, grant, 0, blocks, last, digest_key(key, grant.grant_id), (), digests))
            while not any(isinstance(event, ReadySent) and event.key == key for event in self.events):
                time.sleep(2e-5)
        return took, time.perf_counter() - began


def make_prefill(model: str, load_format: str, num_tokens: int) -> Prefill:
    options = NodeOptions(
        "prefill",
        ModelOptions(model, load_format=load_format, max_model_len=num_tokens + 64),  # type: ignore[arg-type]
        CacheOptions(),
        SchedulerOptions(max_num_seqs=8),
    )
    loaded = load(options)
    options = with_device_defaults(options, loaded.device)
    num_blocks = -(-num_tokens // loaded.layout.block_size) + 1
    pools = allocate_pool(loaded.layout, num_blocks, "cuda:0"), allocate_pool(loaded.layout, num_blocks, "cuda:1")
    registered = RegisteredPool(pools[0], loaded.layout, NodeKey("p", 1))
    sink = NodeInfo(node_id="d", epoch=2, role="decode", layout=loaded.layout)
    events: list[object] = []
    mapping = SameProcessMapping(pools)
    transfer = TransferWorker(
        pools[0], loaded.layout, NodeKey("p", 1),
        lambda peer, on_lost: MappedChannel(registered, peer, mapping, on_lost),
        events.append, lambda sink_id, ready: None, lambda *lost: print("lost:", *lost),
    )  # fmt: skip
    layers = {name: LayerPlace(0, index) for index, name in enumerate(loaded.model.attention_layers)}
    runner = ModelRunner(
        loaded.model, pools[0], options.scheduler, loaded.layout.block_size, loaded.max_model_len, (),
        ConnectorWorker(transfer, layers),
    )  # fmt: skip
    transfer.start()
    transfer.connect_peer(sink)

    def grant_of(key: AttemptKey, count: int) -> KVGrant:
        return make_grant(key, random.Random(key.request_id).sample(range(num_blocks), count), num_tokens)

    return Prefill(loaded, runner, pools[1], transfer, events, grant_of)


def measure_prefill(prefill: Prefill, ways: Sequence[Way], tokens: int, repeat: int) -> dict[str, float]:
    """What pushing adds to a prefill, and what digests add to that or to the hand-off's end, as shares; of the first
    way."""
    kinds: list[tuple[str, Way | None, bool]] = [(ALONE, None, False)]
    kinds += [(f"{what}, {way.name}", way, what == "digested") for way in ways for what in ("pushed", "digested")]
    times: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    ends: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    order = random.Random(0)
    for turn in range(repeat + 1):  # the first compiles
        for name, way, digests in order.sample(kinds, len(kinds)):
            if way is not None:
                way.choose()
            took, told = prefill.run(tokens, way is not None, digests)
            times[name] += [took] if turn else []
            ends[name] += [told] if turn else []
    alone = statistics.median(times[ALONE])
    print(
        f"prefill of {tokens} tokens, and until KVReady, median of {repeat}; differences are of the same turn, with "
        "the error of their mean; targets: pushed +1 %, digests +0.5 % of it"
    )
    for name, own in times.items():
        added, ready = difference(own, times[ALONE], alone), statistics.median(ends[name])
        print(f"  {name:36} {1e3 * statistics.median(own):7.2f} ms ({added}) {1e3 * ready:8.2f} ms")
    pushed, digested = (name for name, *_ in kinds[1:3])
    during, at_end = (difference(each[digested], each[pushed], alone) for each in (times, ends))
    print(f"  digests on top of pushes: {during} of the prefill, {at_end} until KVReady")
    with torch.cuda.device(1):
        on_device, until_compared = measure_check(prefill, repeat)
    print(
        f"  digests checked by the sink in {1e3 * on_device:.2f} ms of the device ({on_device / alone:.2%}), "
        f"{1e3 * until_compared:.2f} ms until they are compared",
        flush=True,
    )
    assert prefill.transfer.stop(10.0)
    pushes = difference(times[pushed], times[ALONE], alone)
    return {"pushed": pushes.share, "digests": max(during.share, at_end.share)}


def measure_check(prefill: Prefill, repeat: int) -> tuple[float, float]:
    """Seconds that a check of all blocks of the sink takes of the device, and of its thread; medians."""
    pool, size = prefill.sink_pool, prefill.loaded.layout.block_size
    passes, blocks, waits = SumPasses(pool), range(len(pool)), []
    on_device = seconds(lambda: passes.begin(blocks, 7, [size] * len(pool)), repeat)
    for _ in range(repeat):
        began = time.perf_counter()
        digests_of_sums(torch.from_numpy(passes.begin(blocks, 7, [size] * len(pool)).sums()), 7, size, size)
        waits.append(time.perf_counter() - began)
    return on_device, statistics.median(waits)


@dataclass(frozen=True)
class Difference:
    """A relative difference between two kinds of runs."""

    share: float  # median
    error: float  # of the mean

    def __str__(self) -> str:
        return f"{self.share:+.2%} +- {self.error:.2%}"


def difference(own: Sequence[float], other: Sequence[float], whole: float) -> Difference:
    """The difference of what was measured in the same turns, as shares of `whole`."""
    shares = [(each - beside) / whole for each, beside in zip(own, other, strict=True)]
    return Difference(statistics.median(shares), statistics.stdev(shares) / len(shares) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--programs", type=int, nargs="*", default=[], help="of the kernel, where it alone pushes")
    parser.add_argument("--repeat", type=int, default=24)
    parser.add_argument("--json", default="", help="write figures that have targets into this file")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("this needs two GPUs that reach each other's memory")
    torch.cuda.set_device(0)
    ways = ways_of(options.programs)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = measure_wire(ways, options.repeat)
    prefill = make_prefill(options.model, options.load_format, options.tokens)
    found |= measure_prefill(prefill, ways, options.tokens, options.repeat)
    if options.json:
        Path(options.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
