"""`tandem calibrate`: measures the scales of fp8 KV on prompts and writes the file that `--kv-scales` reads."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from tandem.deploy.explain import table
from tandem.engine.contracts.config import ModelOptions, NodeOptions
from tandem.engine.contracts.errors import ConfigError

TEXTS = (
    "The river rises in the mountains and runs for two hundred miles to the sea. In spring, when the snow melts, it "
    "floods the meadows; in autumn one can walk across it in places without getting one's knees wet.",
    "def mean(values: list[float]) -> float:\n    if not values:\n        raise ValueError('no values')\n"
    "    return sum(values) / len(values)\n\n\nclass Stack:\n    def __init__(self):\n        self._items = []\n",
    "Question: A train leaves at 9:15 and arrives at 13:40. How long does it take?\nAnswer: From 9:15 to 13:15 are 4 "
    "hours, and 25 minutes more: 4 h 25 min.\n\n| year | sales |\n| 2023 | 1,204 |\n| 2024 | 1,377.5 |\n",
    "Die Würde des Menschen ist unantastbar. La vie est belle, n'est-ce pas? 今日はいい天気ですね。 Что делать? 😀",
)


def run(arguments: argparse.Namespace) -> int:
    """Writes the file and prints each layer's scales and errors. Raises ConfigError for what can't be read, served or
    written."""
    from tandem.engine.precision.kv_scales import measure_kv_scales
    from tandem.node.setup import load, with_device_defaults
    from tandem.router.text.tokenizer import Tokenizer

    texts = _texts(arguments.prompts_file)
    model = ModelOptions(arguments.model, dtype=arguments.dtype, revision=arguments.revision)
    options = NodeOptions(role="unified", model=model, device=arguments.device)
    loaded = load(options)
    tokenizer = Tokenizer(loaded.folder)
    prompts = [ids for ids in map(tokenizer.encode, texts) if ids]
    scheduler = with_device_defaults(options, loaded.device).scheduler
    max_model_len = min(loaded.max_model_len, 1 + 2 * max(map(len, prompts)) + 64)
    found = measure_kv_scales(loaded.model, loaded.layout, scheduler, max_model_len, loaded.device, prompts)
    path = Path(arguments.output)
    try:
        path.write_bytes(msgspec.json.encode(found.scales) + b"\n")
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}; choose another file with --output") from None
    columns = zip(found.scales.k, found.k_errors, found.scales.v, found.v_errors, strict=True)
    rows = [[str(i), *(f"{value:.4g}" for value in layer)] for i, layer in enumerate(columns)]
    print(table(["layer", "K scale", "K error", "V scale", "V error"], rows))
    print(f"{sum(map(len, prompts))} tokens; written: serve with --kv-cache-dtype fp8_e4m3 --kv-scales {path}")
    return 0


def _texts(file: str) -> list[str]:
    """The prompts, one a line of `file`, else those above. Raises ConfigError."""
    if not file:
        return list(TEXTS)
    try:
        texts = [line for line in Path(file).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read --prompts-file {file}: {error}") from None
    if not texts:
        raise ConfigError(f"--prompts-file {file} holds no prompt: write one a line")
    return texts
