"""Decode steps as graphs run them, of a model whose positions are beyond its tokens' places."""

from __future__ import annotations

import msgspec
import torch
from handmade_steps import BLOCK, MAX_LEN, new_slot
from tiny_hf_models import tiny_hf_model
from tiny_media import check_media_greedy, media_prompt

from tandem.engine.contracts.config import ModelOptions, SchedulerOptions
from tandem.engine.media.slots import MediaSlots
from tandem.engine.models.choice import load_chosen, load_config
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import SampleRow, ScheduledRow, SchedulerOutput
from tiny_models import random_prompt

CPU = torch.device("cpu")


def test_buffers_that_graphs_replay_over_shift_positions() -> None:
    folder = tiny_hf_model("qwen2_5_vl")
    options = ModelOptions(model=str(folder))
    config = load_config(folder, options)
    model = load_chosen(folder, config, options, CPU, torch.float32)
    assert model.media_encoder is not None
    pool = torch.zeros(8, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    media = MediaSlots(model.media_encoder, 4, 1 << 20, CPU)
    steps = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=96)
    runner = ModelRunner(model, pool, steps, BLOCK, MAX_LEN, (), media=media)
    prompts = {1: media_prompt("qwen2_5_vl", random_prompt(5, seed=1), 2, random_prompt(4, seed=2)),
               3: media_prompt("qwen2_5_vl", random_prompt(7, seed=3))}  # fmt: skip
    slots = [
        msgspec.structs.replace(new_slot(slot, prompt.token_ids, blocks), media=prompt.media)
        for (slot, prompt), blocks in zip(prompts.items(), ((2, 5), (6,)), strict=True)
    ]
    lengths = {slot: len(prompt.token_ids) for slot, prompt in prompts.items()}
    step = SchedulerOutput(
        0,
        tuple(ScheduledRow(slot, 0, length) for slot, length in lengths.items()),
        tuple(SampleRow(i, slot, length, 0, 0) for i, (slot, length) in enumerate(lengths.items())),
        new_slots=tuple(slots),
    )
    made = [runner.execute(step).result().token_ids.tolist()]
    assert media.shift_S is not None
    assert media.shift_S.tolist()[1] < 0
    batch = DecodeBatch(model, runner.state, 4, MAX_LEN, media.shift_S)
    for i in range(4):
        with torch.inference_mode():
            batch.fill([ScheduledRow(slot, length + i, 1) for slot, length in lengths.items()], 4)
            tokens = batch.forward(4)[:2].argmax(-1)
            batch.store(tokens)
        made.append(tokens.tolist())
    for place, prompt in enumerate(prompts.values()):
        check_media_greedy(folder, prompt, [row[place] for row in made], 5)
