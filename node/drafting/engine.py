"""A draft model's engine on this node: its weights, its pool of twins, its runner (docs/speculation.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.engine.contracts.config import NodeOptions, SchedulerOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.model_folder import resolve_model, tokenizer_digest
from tandem.engine.contracts.model_shape import ModelShape
from tandem.engine.device.kv_pool import allocate_pool, make_layout
from tandem.engine.models.choice import load_chosen, load_config
from tandem.engine.running.at_start.memory import graph_bytes
from tandem.engine.running.at_start.step_measure import measure_step_times
from tandem.engine.running.heads.guess_steps import HeadFollowers
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.runner_needs import Model
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.speculation.draft_model import CATCH_UP_TOKENS, FIRST_TOKENS, DraftedTokens
from tandem.engine.scheduling.speculation.options import DraftModelOptions, read_speculative_config
from tandem.node.drafting.heads import HeadEngine, LoadedHead


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model on the served model's device. `layout` is of its pool, which has a twin of each block."""

    model: Model
    layout: KVLayout
    max_model_len: int
    num_speculative_tokens: int

    @property
    def twin_bytes(self) -> int:
        """What each block of the pool takes beside it."""
        return self.layout.stride_bytes

    def graph_bytes(self, options: SchedulerOptions, device: torch.device) -> int:
        """Device memory that its graphs will hold."""
        return graph_bytes(self.model, self.layout, draft_scheduler(options), self.max_model_len, device)


def load_draft(
    options: NodeOptions, folder: Path, served: ModelShape, max_model_len: int, device: torch.device, dtype: torch.dtype
) -> LoadedDraft | None:
    """None: the node needs none. Of several ranks the first has it, whole. Raises ConfigError where the draft isn't one
    for the served model, which lies in `folder`."""
    asked = read_speculative_config(options.scheduler.speculative_config)
    if not isinstance(asked, DraftModelOptions) or options.role == "prefill":
        return None
    own_folder = resolve_model(asked.model, asked.revision)
    own_options = replace(
        options.model, model=asked.model, revision=asked.revision, max_model_len=0, quantization="auto"
    )
    config = load_config(own_folder, own_options)
    _check_vocabulary(asked.model, own_folder, config, folder, served)
    model = load_chosen(own_folder, config, own_options, device, dtype, options.attention_backend)
    layout = make_layout(config, options.cache.block_size, dtype)
    return LoadedDraft(model, layout, min(config.max_model_len, max_model_len), asked.num_speculative_tokens)


def _check_vocabulary(name: str, own_folder: Path, config: ModelShape, folder: Path, served: ModelShape) -> None:
    if config.encoder is not None:
        raise ConfigError(f"--speculative-config: {name} has an encoder: choose a decoder as the draft model")
    if config.vocab_size != served.vocab_size:
        sizes = f"{name} has {config.vocab_size} tokens, the served model {served.vocab_size}"
        raise ConfigError(f"--speculative-config: {sizes}: a draft model must have the same vocabulary")
    own, others = tokenizer_digest(own_folder), tokenizer_digest(folder)
    if own and others and own != others and _vocabulary(own_folder) != _vocabulary(folder):
        raise ConfigError(
            f"--speculative-config: tokens of {name} are not those of the served model: a draft model must have the "
            "same vocabulary"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer  # few need it

    vocabulary: dict[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    return vocabulary


def draft_scheduler(options: SchedulerOptions) -> SchedulerOptions:
    """The bounds of the draft's steps: a part of prompts, or a few tokens of each sequence."""
    most = max(CATCH_UP_TOKENS, FIRST_TOKENS * options.max_num_seqs)
    return replace(
        options, max_num_batched_tokens=most, max_prefill_chunk=0, share_prefixes=False, speculative_config=""
    )


class DraftEngine:
    """The draft's runner, and the guesser for the node's scheduler."""

    def __init__(
        self, loaded: LoadedDraft, options: NodeOptions, num_blocks: int, device: torch.device, clock: StepClock
    ) -> None:
        """`options` have the device's defaults, `num_blocks` are the served model's. Raises ConfigError where there is
        no memory for the twins."""
        block_size, length = options.cache.block_size, loaded.max_model_len
        twins = allocate_pool(loaded.layout, num_blocks, device)
        self.runner = ModelRunner(loaded.model, twins, draft_scheduler(options.scheduler), block_size, length, ())
        self.guesser = DraftedTokens(self.runner, loaded.num_speculative_tokens, block_size, length, clock)

    def warm_up(self, captures: bool, measures: bool) -> None:
        """Compiles its kernels, captures its graphs, measures its steps."""
        self.runner.warmup()
        if captures:
            self.runner.capture_decode_steps()
        if measures:
            measure_step_times(self.runner, CATCH_UP_TOKENS, self.guesser.times)


def make_drafting(
    loaded: LoadedDraft | LoadedHead | None,
    options: NodeOptions,
    num_blocks: int,
    served: ModelRunner,
    clock: StepClock,
    ranks: HeadFollowers | None = None,
) -> DraftEngine | HeadEngine | None:
    """`served`: the model's runner; `ranks`: the others that compute its steps. None: the node has neither draft model
    nor head, or guesses nothing."""
    if loaded is None or options.role == "prefill":
        return None
    if isinstance(loaded, LoadedHead):
        return HeadEngine(loaded, served, clock, ranks)
    return DraftEngine(loaded, options, num_blocks, served.device, clock)
