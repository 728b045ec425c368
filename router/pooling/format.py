"""Answers of models that pool."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.router.pooling.body import EmbeddingsBody, RerankBody
from tandem.router.requests.sample_output import Piece

LENGTH_ERROR = 1e-3  # far above rounding of normalized float32, a guess
_encode = msgspec.json.Encoder().encode
Fields = dict[str, Any]
Answer = Callable[[list[bytes]], Fields]
"""Makes the fields of an answer besides its id, model and usage, from each input's values in order."""


class PoolingFormat:
    """Gathers the values of each input; there is nothing to stream."""

    def __init__(self, answer_id: str, model: str, num_inputs: int, answer: Answer) -> None:
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._values = [b""] * num_inputs
        self._answer = answer

    def pooled(self, index: int, values: bytes) -> None:
        self._values[index] = values

    def choice(self) -> PoolingChoice:
        return PoolingChoice()

    def whole(self, choices: list[Fields], usage_dict: Fields) -> bytes:
        usage = {name: usage_dict[name] for name in ("prompt_tokens", "total_tokens")}
        return _encode({**self._head, **self._answer(self._values), "usage": usage})

    def writer(self) -> Any:
        raise AssertionError("nobody streams vectors")

    def usage_details(self) -> Fields:
        return {}


class PoolingChoice:
    """Stands where other formats gather text: a model that pools makes none."""

    def add(self, piece: Piece) -> None:
        raise AssertionError("a model that pools makes no text")

    def as_dict(self, index: int, echo: Piece | None) -> Fields:
        return {}  # the format has the values


def embeddings(body: EmbeddingsBody) -> Answer:
    def answer(values: list[bytes]) -> Fields:
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(each, body)}
            for index, each in enumerate(values)
        ]
        return {"object": "list", "data": data}

    return answer


def _vector(values: bytes, body: EmbeddingsBody) -> str | list[float]:
    if body.dimensions is not None:
        values = _cut(np.frombuffer(values, "<f4"), body.dimensions).tobytes()
    return (
        base64.b64encode(values).decode() if body.encoding_format == "base64" else np.frombuffer(values, "<f4").tolist()
    )


def _cut(vector: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """The first `size` entries (Matryoshka). Vectors of length 1 are scaled to that length again."""
    had_length_1 = abs(float(np.linalg.norm(vector)) - 1) < LENGTH_ERROR
    vector = vector[:size]
    return vector / max(np.linalg.norm(vector), np.float32(1e-12)) if had_length_1 else vector


def scores(values: list[bytes]) -> Fields:
    data = [{"object": "score", "index": index, "score": _score(each)} for index, each in enumerate(values)]
    return {"object": "list", "data": data}


def ranking(body: RerankBody) -> Answer:
    def answer(values: list[bytes]) -> Fields:
        found = [(index, _score(each)) for index, each in enumerate(values)]
        best = sorted(found, key=lambda each: -each[1])[: body.top_n or len(found)]
        shows = body.return_documents is not False
        return {
            "results": [
                {"index": index, "relevance_score": score}
                | ({"document": {"text": body.documents[index]}} if shows else {})
                for index, score in best
            ]
        }

    return answer


def _score(values: bytes) -> float:
    return float(np.frombuffer(values, "<f4")[0])
