"""What everybody but the model itself asks of its configuration, whoever computes it. No torch."""

from __future__ import annotations

from typing import Protocol

from tandem.engine.contracts.wire.parts import EncoderFacts


class ModelShape(Protocol):
    """Sizes in elements, lengths in tokens."""

    @property
    def architecture(self) -> str: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def latent_size(self) -> int | None:
        """None: the keys and values of each head are kept. Otherwise latents are: rows of `head_dim` elements, of which
        the first so many are the values."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def encoder(self) -> EncoderFacts | None: ...
