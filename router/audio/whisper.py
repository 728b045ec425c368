"""How Whisper's decoder begins: language, task, no timestamps, and the text before, as its generation_config.json names
their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tandem.engine.contracts.errors import ConfigError, InvalidRequestError
from tandem.engine.contracts.generation_config import FILE, read_json_object

Task = Literal["transcribe", "translate"]


class WhisperTokens(msgspec.Struct, frozen=True):
    """The fields of generation_config.json that count. A model without `lang_to_id` knows English alone."""

    lang_to_id: dict[str, int] = {}
    task_to_id: dict[str, int] = {}
    no_timestamps_token_id: int | None = None
    prev_sot_token_id: int | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> WhisperTokens:
        """The settings that a model's folder holds. Raises ConfigError when the file holds something else."""
        try:
            return msgspec.convert(read_json_object(folder / FILE) or {}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{folder / FILE}: {error}; repair the file") from error

    def language_id(self, language: str) -> int:
        """The token of a language. Raises InvalidRequestError for one that the model doesn't know."""
        found = self.lang_to_id.get(f"<|{language.lower()}|>")
        if found is None:
            known = ", ".join(sorted(name.strip("<|>") for name in self.lang_to_id)) or "en alone"
            text = f"the model doesn't know the language {language!r}; it knows {known}"
            raise InvalidRequestError(text, param="language")
        return found

    def language_of(self, token_id: int) -> str:
        return next((name.strip("<|>") for name, known in self.lang_to_id.items() if known == token_id), "")

    def begin(self, start: tuple[int, ...], language: int | None, task: Task, before: list[int]) -> list[int]:
        """The decoder's first tokens. `before`: those of text that may have come before. Raises InvalidRequestError for
        what the model can't do."""
        if task == "translate" and task not in self.task_to_id:
            raise InvalidRequestError("the model doesn't translate: it knows English alone", param="model")
        spoken = [] if language is None else [language, self.task_to_id[task]]
        silent = [] if self.no_timestamps_token_id is None else [self.no_timestamps_token_id]
        earlier = [self.prev_sot_token_id, *before] if before and self.prev_sot_token_id is not None else []
        return [*earlier, *start, *spoken, *silent]
