"""An adapter in host memory, laid out as its slot on the device is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.adapters.adapter_files import AdapterFiles, read_adapter
from tandem.engine.adapters.layout import MOST_PARTS, AdapterLayout, Projection
from tandem.engine.contracts.errors import AdapterError
from tandem.engine.parallel.sharding import Cut


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """An adapter as its slot holds it: `words` [layout.num_elements] in the model's dtype, page-locked for a GPU;
    `ranks` int32 [projections, 3]."""

    digest: bytes
    words: torch.Tensor
    ranks: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.ranks.nbytes


class AdapterLoader:
    """Reads adapters for one rank of a model. Calls are independent of each other, from any thread."""

    def __init__(self, layout: AdapterLayout, dtype: torch.dtype, pinned: bool) -> None:
        self.layout, self._dtype, self._pinned = layout, dtype, pinned

    def load(self, path: str, digest: bytes = b"") -> HostAdapter:
        """The adapter in the folder `path`. Raises AdapterError, also when it isn't the one of `digest` (b"": any)."""
        files = read_adapter(path)
        if digest and files.digest != digest:
            raise AdapterError(f"{path} holds another adapter here than where it was loaded first; make them equal")
        files.check(self.layout)
        words = torch.zeros(self.layout.num_elements, dtype=self._dtype, pin_memory=self._pinned)
        ranks = torch.zeros((len(self.layout.projections), MOST_PARTS), dtype=torch.int32, pin_memory=self._pinned)
        try:
            with safe_open(files.weights, framework="pt", device="cpu") as stored:
                for projection, of_parts in zip(self.layout.projections, ranks, strict=True):
                    self._fill(files, stored, projection, words, of_parts)
        except (SafetensorError, OSError) as error:
            raise AdapterError(f"can't read {files.weights}: {error}") from None
        if not words.isfinite().all():
            raise AdapterError(f"{files.weights} holds numbers that are not finite in {self._dtype}")
        return HostAdapter(files.digest, words, ranks)

    def _fill(
        self, files: AdapterFiles, stored: safe_open, projection: Projection, words: torch.Tensor, ranks: torch.Tensor
    ) -> None:
        padded, parts = self.layout.rank, projection.site.parts
        a = words[projection.a_start : projection.b_start].view(len(parts), padded, projection.num_inputs)
        b = words[projection.b_start : projection.end].view(-1, padded).split(projection.part_sizes)
        for index, part in enumerate(parts):
            if part.module not in files.shapes:
                continue
            rank = files.shapes[part.module][0][0]
            name = f"base_model.model.{part.module}.lora_"
            a[index, :rank] = _cut(stored.get_tensor(f"{name}A.weight"), part.cut, 1)
            # Scaled in fp32, so that it is rounded once.
            scaled = _cut(stored.get_tensor(f"{name}B.weight"), part.cut, 0).float() * files.scaling(rank)
            b[index][:, :rank] = scaled
            ranks[index] = rank


def _cut(matrix: torch.Tensor, cut: Cut | None, dim: int) -> torch.Tensor:
    """This rank's part of A or B; `dim` is the dimension of the layer's weight that the matrix shares. `cut` None: the
    rank takes all of the weight."""
    return matrix if cut is None or cut.dim != dim else matrix.narrow(dim, cut.start, cut.stop - cut.start)
