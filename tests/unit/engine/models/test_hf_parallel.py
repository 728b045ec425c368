"""Models of transformers shared out over ranks by their plans: parts that add up to the whole model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_hf_models import tiny_hf_model
from waiting import PATIENCE_S

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.models.choice import check_shares, load_chosen, load_config
from tandem.engine.models.hf.config import HFConfig
from tandem.engine.models.hf.loading import loader
from tandem.engine.models.hf.model import HFModel
from tandem.engine.models.hf.trials import trial
from tandem.engine.models.hf.trials.routes import Routes
from tandem.engine.parallel.sharding import Shard

CPU = torch.device("cpu")
# Over so many ranks; below 0: ranks that hold whole experts.
SHARED_OUT = (("phi3", 2), ("olmo2", 4), ("gemma2", 4), ("qwen3_moe", 2), ("qwen3_moe", -2))
RARER = (
    "gpt_neox", "phi", "gemma3", "starcoder2", "cohere2", "granite", "smollm3", "mixtral", "glm4_moe",
)  # fmt: skip
REFUSED = {
    "gpt2": "no plan",
    "bloom": "no plan",
    "gpt_oss": "no plan|attention by heads",  # as transformers had it before 5.24, and since
    "llama4_text": "packed_rowwise|attention by heads",
    "deepseek_v3": "attention by heads",
}


class Threads:
    """What ranks do together, as threads of one process."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)


class RankOfThreads:
    """One thread's end."""

    def __init__(self, threads: Threads, shard: Shard) -> None:
        self.shard, self._threads = shard, threads

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._threads.parts[self.shard.rank] = part
        self._threads.barrier.wait()
        parts = list(self._threads.parts)
        self._threads.barrier.wait()
        return parts

    def sum(self, x_NE: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x_NE)).sum(0)

    def gather_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(logits_NV), -1)


def part_of(folder: Path, config: HFConfig, group: Any) -> HFModel:
    model = load_chosen(
        folder, config, ModelOptions(str(folder), model_impl="transformers"), CPU, torch.float32, group=group
    )
    assert isinstance(model, HFModel)
    return model


@torch.inference_mode()
def logits_of(model: HFModel) -> torch.Tensor:
    prompts = [trial._Prompt(np.arange(length) % 90 + length) for length in trial.LENGTHS]
    return model.compute_logits(trial._paged(model, prompts, CPU, torch.float32, Routes()))


@pytest.mark.parametrize(
    ("family", "size"), [*SHARED_OUT, *(pytest.param(family, 2, marks=pytest.mark.slow) for family in RARER)]
)
def test_ranks_make_the_logits_of_the_whole_model(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two KV heads four ranks hold copies. Each rank stands the trial, too."""
    folder, lock, loaded = tiny_hf_model(family), threading.Lock(), loader._loaded

    def one_at_a_time(*arguments: Any) -> Any:
        with lock:  # transformers' loading is made for one thread, in which nothing else runs meanwhile
            model = loaded(*arguments)
        if threading.current_thread() is not threading.main_thread():
            threads.barrier.wait()
        return model

    shards = [Shard(rank, abs(size), size < 0) for rank in range(abs(size))]
    threads = Threads(len(shards))
    monkeypatch.setattr(loader, "_loaded", one_at_a_time)
    check_shares(folder, ModelOptions(str(folder), model_impl="transformers"), shards[0])
    config = load_config(
        folder, ModelOptions(str(folder), model_impl="transformers")
    )  # here, for it sets torch's default dtype for a while
    assert isinstance(config, HFConfig)
    whole = part_of(folder, config, None)
    groups = [RankOfThreads(threads, shard) for shard in shards]
    with ThreadPoolExecutor(len(groups)) as pool:
        parts = list(pool.map(lambda group: part_of(folder, config, group), groups))
        logits = list(pool.map(logits_of, parts))
    expected = logits_of(whole)
    for each in logits:
        torch.testing.assert_close(each, expected, rtol=2e-4, atol=2e-4)
    for rank in parts:
        for site in rank.adapter_sites():
            [part], weight = site.parts, rank.decoder.get_submodule(site.name).weight
            assert weight.shape == (part.own_outputs, part.own_inputs), part
    held = [sum(tensor.numel() for tensor in each.state_dict().values()) for each in (whole, parts[0])]
    assert held[1] < 0.9 * held[0]


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_without_a_plan_that_we_can_follow_is_refused(family: str) -> None:
    folder = tiny_hf_model(family)
    with pytest.raises(ConfigError, match=f"{family}.* can't be shared out: .*({REFUSED[family]})"):
        check_shares(folder, ModelOptions(str(folder), model_impl="transformers"), Shard(0, 2))


def test_a_model_without_experts_spreads_none() -> None:
    folder = tiny_hf_model("gemma2")
    with pytest.raises(ConfigError, match=r"no experts that its plan names: leave --enable-expert-parallel out"):
        check_shares(folder, ModelOptions(str(folder), model_impl="transformers"), Shard(0, 2, True))


def test_shares_are_equal() -> None:
    folder = tiny_hf_model("gemma2")
    with pytest.raises(ConfigError, match="4 heads over 2 KV heads: no equal shares"):
        check_shares(folder, ModelOptions(str(folder), model_impl="transformers"), Shard(0, 3))
