"""Models of transformers, and the vectors or scores that are made of their last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.pooling.config import DECODERS, PoolingConfig
from tandem.engine.pooling.input import PoolingInput


class PoolingModel:
    """Makes a vector, or a score, of each input. Raises ConfigError if transformers can't load the model."""

    def __init__(self, folder: Path, config: PoolingConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device = config, device
        transformers_logging.disable_progress_bar()
        kind: Any = AutoModel if config.task == "embed" else AutoModelForSequenceClassification
        try:
            model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers can't load {folder}: {error}") from None
        self._model = model.to(device).eval()
        self._is_decoder = config.model_type in DECODERS
        self._has_types = getattr(model.config, "type_vocab_size", 1) > 1

    @torch.inference_mode()
    def run(self, inputs: Sequence[PoolingInput]) -> npt.NDArray[np.float32]:
        """The vector of each input, [num_inputs, hidden_size], or its score in [0, 1], [num_inputs, 1]."""
        lengths = torch.tensor([len(each.token_ids) for each in inputs])
        width = int(lengths.max())
        ids = torch.zeros((len(inputs), width), dtype=torch.long)
        types = torch.zeros_like(ids)
        for row, each in enumerate(inputs):
            ids[row, : len(each.token_ids)] = torch.from_numpy(each.token_ids)
            if each.pair_start:
                types[row, each.pair_start : len(each.token_ids)] = 1
        mask = (torch.arange(width)[None] < lengths[:, None]).long()
        ids[mask == 0] = self._model.config.pad_token_id or 0  # some encoders number positions by it
        fields = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        if self._has_types:
            fields["token_type_ids"] = types.to(self._device)
        more = {"use_cache": False} if self._is_decoder else {}  # nobody reads the keys and values that it would keep
        output = self._model(**fields, **more)
        if self._config.task == "score":
            found = torch.sigmoid(output.logits.float())
        else:
            found = self._pool(output.last_hidden_state.float(), mask.to(self._device), lengths.to(self._device))
        values: npt.NDArray[np.float32] = found.cpu().numpy()
        return values

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[num_inputs, width, hidden_size] -> [num_inputs, hidden_size]."""
        kind, real = self._config.pooling, mask[:, :, None].bool()
        if kind == "cls":
            pooled = hidden[:, 0]
        elif kind == "lasttoken":
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        elif kind == "max":
            pooled = hidden.masked_fill(~real, -torch.inf).amax(1)
        else:
            pooled = hidden.masked_fill(~real, 0.0).sum(1) / lengths[:, None]
        return torch.nn.functional.normalize(pooled, dim=-1) if self._config.normalize else pooled
