"""What the encoder made of items, kept by their content as far as a budget allows."""

from __future__ import annotations

from collections import OrderedDict

import torch

from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.media.encoder import MediaEncoder


class EncoderOutputs:
    """Embeddings by their items' content. The least recently used go first; the newest stays, however large it is."""

    def __init__(self, encoder: MediaEncoder, budget_bytes: int) -> None:
        self._encoder, self._budget_bytes = encoder, budget_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_bytes = 0
        self.counters = {"media_encoded": 0.0, "media_reused": 0.0}

    def of(self, item: MediaItem) -> torch.Tensor:
        """Embeddings [length, E] of an item, encoded now if they aren't there. Raises what the encoder raises."""
        found = self._kept.get(item.digest)
        if found is not None:
            self._kept.move_to_end(item.digest)
            self.counters["media_reused"] += 1
            return found
        made = self._encoder.encode(item)
        assert len(made) == item.length, f"{len(made)} embeddings of an item of {item.length} tokens"
        self.counters["media_encoded"] += 1
        self._kept[item.digest] = made
        self._num_bytes += made.nbytes
        while self._num_bytes > self._budget_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def check_integrity(self) -> None:
        assert self._num_bytes == sum(kept.nbytes for kept in self._kept.values()), "kept bytes are miscounted"
