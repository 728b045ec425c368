"""Guesses by prompt lookup: what followed the newest tokens where they stood before (docs/speculation.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.speculation.options import PromptLookup
from tandem.engine.scheduling.speculation.token_index import TokenIndex


class LookedUpTokens:
    """Implements `Guesser`."""

    def __init__(self, options: PromptLookup) -> None:
        self._options = options
        self._indices: dict[Request, TokenIndex] = {}
        self._found: dict[Request, list[int]] = {}

    @property
    def num_speculative_tokens(self) -> int:
        return self._options.num_speculative_tokens

    def could_guess(self, request: Request, count: int) -> int:
        if request not in self._indices:
            least, most = self._options.prompt_lookup_min, self._options.prompt_lookup_max
            self._indices[request] = TokenIndex(request.prompt.token_ids, least, most)
        index = self._indices[request]
        index.extend(request.output_token_ids[len(index) - request.num_prompt_tokens :])
        self._found[request] = index.continuation(count)
        return len(self._found[request])

    def seconds(self, num_sequences: int) -> float:
        return 0.0

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        return {request: self._found[request][:count] for request, count in wanted.items()}

    def keep(self, running: Collection[Request]) -> None:
        self._indices = {each: self._indices[each] for each in running if each in self._indices}
        self._found = {}
