"""Tandem: large language models served with prefill and decode on separate nodes.

`from tandem import LLM, SamplingParams`; what is named here is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.engine.contracts import errors as errors
    from tandem.llm.async_llm import AsyncLLM as AsyncLLM
    from tandem.llm.llm import LLM as LLM
    from tandem.llm.lora_request import LoRARequest as LoRARequest
    from tandem.llm.outputs import BeamSearchOutput as BeamSearchOutput
    from tandem.llm.outputs import CompletionOutput as CompletionOutput
    from tandem.llm.outputs import Logprob as Logprob
    from tandem.llm.outputs import RequestOutput as RequestOutput
    from tandem.llm.params import BeamSearchParams as BeamSearchParams
    from tandem.llm.params import SamplingParams as SamplingParams
    from tandem.llm.params import StructuredOutputsParams as StructuredOutputsParams

_WHERE = {
    "LLM": "tandem.llm.llm",
    "AsyncLLM": "tandem.llm.async_llm",
    "BeamSearchParams": "tandem.llm.params",
    "BeamSearchOutput": "tandem.llm.outputs",
    "LoRARequest": "tandem.llm.lora_request",
    "SamplingParams": "tandem.llm.params",
    "StructuredOutputsParams": "tandem.llm.params",
    "RequestOutput": "tandem.llm.outputs",
    "Logprob": "tandem.llm.outputs",
    "CompletionOutput": "tandem.llm.outputs",
    "errors": "tandem.engine.contracts.errors",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("tandem.engine.process.version").version()
    if name not in _WHERE:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    return module if name == "errors" else getattr(module, name)
