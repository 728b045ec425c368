"""The adapter that a call is for, as vLLM's LoRARequest says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, by the name under which the server has it, or gets it.

    `lora_path` is its folder as the server's nodes see it, which is loaded in place of what the name stood for when it
    is first asked for; that needs an admin's key. "": the server has it. `lora_int_id` is vLLM's, names suffice here.
    Raises ValueError for no name.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise ValueError("a LoRARequest needs a lora_name")
