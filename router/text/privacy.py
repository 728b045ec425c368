"""Who may find a prompt's blocks: its tenant, and of what the operator listed as public everybody. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tandem.router.access.api_keys import Tenant
from tandem.router.text.completion import PromptPlan
from tandem.router.text.tokenizer import Tokenizer


class Privacy:
    """Decides with whom a prompt's KV is shared. `public_prefixes`: texts or token ids whose KV all tenants share."""

    def __init__(self, tokenizer: Tokenizer, public_prefixes: Sequence[str | Sequence[int]]) -> None:
        prefixes = [tokenizer.encode(prefix) if isinstance(prefix, str) else prefix for prefix in public_prefixes]
        self._public = [np.array(prefix, dtype=np.int32) for prefix in prefixes]

    def apply(self, plan: PromptPlan, tenant: Tenant, cache_salt: str) -> PromptPlan:
        salt = tenant.salt_for(cache_salt)
        if not salt:
            return plan
        secrecy = replace(plan.secrecy, salt=salt, num_public_tokens=self.num_public_tokens(plan.token_ids))
        return replace(plan, secrecy=secrecy, cache_share=tenant.cache_share)

    def num_public_tokens(self, token_ids: npt.NDArray[np.int32]) -> int:
        """How many leading tokens of a prompt, int32 [num_tokens], are also those of some public prefix. A part of a
        prefix is as public as the whole."""
        return max((_num_common(prefix, token_ids) for prefix in self._public), default=0)


def _num_common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
