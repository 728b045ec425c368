"""What a simulated node's work takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Tokens of the steps that a node measures at its start, for times, and behind CONTEXT tokens for which sizes are fast.
LADDER = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SIZES, CONTEXT = range(128, 2113, 128), 8192


@dataclass(frozen=True)
class CostModel:
    """The costs of a node's work in seconds. The defaults are those of an 8B model in bf16 on one H200, as steps took
    in serving: docs/simulator.md#what-steps-take."""

    prefill_s_per_token: float = 1 / 52_000  # without context
    prefill_s_per_token_and_context: float = 0.795e-9  # attention, of full waves: as much again at 24k of context
    # Attention computes tiles of so many queries of a head, a multiprocessor one at a time: what is left over for the
    # last wave takes as long as a full one.
    tile_tokens: int = 128
    num_heads: int = 32
    num_multiprocessors: int = 132
    step_s: float = 0.0045  # of a step, whatever is in it: weights are read once
    sequence_s: float = 25e-6  # of a step, for each sequence that decodes
    context_s_per_token: float = 31e-9  # of a step, for each token of context that decodes attend to
    host_s_per_token: float = 2.6e-6  # a hit in host memory, brought back
    fetch_s_per_token: float = 0.0  # a hit on a peer, brought here; 0: nodes don't fetch
    push_s_per_token: float = 131_072 / 330e9  # a token's KV, over the source's link
    handover_s: float = 0.0032  # from a prompt's last push to its place in the decode batch, but for steps that run
    num_layers: int = 32
    layer_handover_s: float = 0.0005  # of one layer's KV to a node that waits for it, beside its bytes; a guess
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256

    def prompt_s(self, begin: int, num_tokens: int) -> float:
        """Seconds of computing `num_tokens` of a prompt behind `begin` tokens of context, alone in its step."""
        return self.prompts_s([(begin, num_tokens)])

    def prompts_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of computing one step's chunks of prompts: the tokens before each, and its own."""
        num_tokens = num_tiles = pairs = 0.0
        for begin, size in chunks:
            tiles = math.ceil(size / self.tile_tokens)
            num_tokens, num_tiles = num_tokens + size, num_tiles + tiles * self.num_heads
            pairs += tiles * self.tile_tokens * (begin + size / 2)
        if not num_tiles:
            return 0.0
        waves = math.ceil(num_tiles / self.num_multiprocessors) * self.num_multiprocessors / num_tiles
        return num_tokens * self.prefill_s_per_token + waves * pairs * self.prefill_s_per_token_and_context

    def decode_s(self, num_sequences: int, context: int) -> float:
        """Seconds of a step of decodes alone, which attend to `context` tokens together."""
        return self.step_s + num_sequences * self.sequence_s + context * self.context_s_per_token

    def lag_s(self, begin: int, num_tokens: int) -> float:
        """Seconds by which the chunk after this one ends later, if another node computes it at the same time."""
        layer_s = self.prompt_s(begin, num_tokens) / self.num_layers
        return layer_s + num_tokens * self.push_s_per_token / self.num_layers + self.layer_handover_s

    def table(self, ladder: Iterable[int] = LADDER, begin: int = 0) -> dict[int, float]:
        """What a node would measure at its start: seconds of a step by its tokens, behind `begin` tokens of context."""
        return {num: self.step_s + self.prompt_s(begin, num) for num in ladder}
