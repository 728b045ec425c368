"""Nodes with lower tiers and a device pool for one prompt, and who asks them and checks every answer."""

from __future__ import annotations

from waiting import wait_until

from in_process_cluster import BLOCK, Client, Node
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import NodeInfo
from tiny_models import Greedy, random_prompt, reference_greedy, tiny_model

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
NUM_BLOCKS = 24  # room for one prompt and its output
LENGTHS = (17 * BLOCK + 5, 18 * BLOCK, 19 * BLOCK + 1)
NUM_HITS = sum((length - 1) // BLOCK for length in LENGTHS)  # blocks, when each prompt is asked again
References = list[tuple[list[int], Greedy]]


def make_references(model: str = "llama") -> References:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    return [(prompt, reference_greedy(tiny_model(model), prompt, SAMPLING.max_tokens)) for prompt in prompts]


def until_saved(node: Node) -> None:
    """Until everything cached in the device pool is in the host pool as well."""
    manager = node.process.tiers.manager

    def is_saved() -> bool:
        cached = node.cached_hashes()
        return bool(cached) and all(map(manager.is_on_host, cached))

    wait_until(is_saved, "an idle node to save")


def always_loading(node: Node) -> Node:
    """Whatever the machine's load makes of the rates."""
    node.process.tiers.manager.compute_rate = Rate()
    return node


class Asker:
    def __init__(self, *nodes: Node, prefill: NodeInfo | None = None) -> None:
        """`prefill`: of a node in another process."""
        infos = [*(node.info for node in nodes), *([] if prefill is None else [prefill])]
        self.nodes, self.client, self._infos, self._count = nodes, Client(*infos), infos, 0

    def ask(self, *wanted: tuple[list[int], Greedy]) -> list[int]:
        """All at once; prompt tokens found in caches, of each."""
        self._count += 1
        decode, prefill = (*self._infos, None)[:2]
        results = [
            self.client.submit(f"{self._count}-{index}", prompt, SAMPLING, decode=decode, prefill=prefill)
            for index, (prompt, _) in enumerate(wanted)
        ]
        self.client.wait()
        for result, (_, greedy) in zip(results, wanted, strict=True):
            assert result.failed is None, result.failed
            assert result.output() == greedy.token_ids
        return [result.num_cached_tokens for result in results]

    def counts(self, node: Node) -> dict[str, float]:
        return node.process.tiers.manager.counts()
