"""Where an adapter's matrices lie in its slot.

A slot is one run of elements of the model's dtype: for each product that adapters are added to, the A of each of its
parts [P * R, inputs], then B [outputs, R]. So one copy fills a slot, and all slots together are one stack for each
product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.engine.models.adapter_sites import Site
from tandem.kernels.products.adapter_rows import padded_rank

MOST_PARTS = 3  # of a merged product: q, k and v


@dataclass(frozen=True)
class Projection:
    """A site's matrices in the slot, as this rank computes it; offsets are in elements."""

    site: Site
    a_start: int
    b_start: int
    end: int

    @property
    def part_sizes(self) -> tuple[int, ...]:
        return tuple(part.own_outputs for part in self.site.parts)

    @property
    def num_inputs(self) -> int:
        return self.site.parts[0].own_inputs


@dataclass(frozen=True)
class AdapterLayout:
    """The projections of a model in order. `rank` is R; every adapter's is at most `max_rank`."""

    projections: tuple[Projection, ...]
    max_rank: int
    rank: int

    @property
    def num_elements(self) -> int:
        return self.projections[-1].end

    @classmethod
    def of(cls, sites: Iterable[Site], max_rank: int) -> AdapterLayout:
        """The layout of adapters of at most `max_rank` for these sites, at least one."""
        rank, start = padded_rank(max_rank), 0
        projections = []
        for site in sites:
            b_start = start + len(site.parts) * rank * site.parts[0].own_inputs
            end = b_start + sum(part.own_outputs for part in site.parts) * rank
            projections.append(Projection(site, start, b_start, end))
            start = end
        return cls(tuple(projections), max_rank, rank)
