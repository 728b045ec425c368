"""A head guesses the same whether layers that slide have blocks of their own or not, whatever steps came before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eagle_heads import random_head
from handmade_steps import RunsDirectly, new_slot
from quantised_checkpoints import mxfp4_folders
from served_head import BLOCKS, ServedHead
from tiny_hf_models import tiny_hf_model

from in_process_cluster import node_options
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.scheduling.step import SampleRow, ScheduledRow
from tiny_models import VOCAB, random_prompt, tiny_model

NUM_GUESSES = 4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "vocab_size": VOCAB, "draft_vocab_size": VOCAB // 4}


@pytest.mark.parametrize("family", ["qwen2_hybrid", "gpt_oss"])
def test_guesses_are_those_of_layers_kept_together(family: str, tmp_path: Path) -> None:
    """Behind a prompt beyond the window, computed in chunks and as a graph's rows, and behind drafts of which some are
    wrong."""
    model = tiny_model(family) if family == "qwen2_hybrid" else mxfp4_folders(tiny_hf_model(family), tmp_path)[0]
    head = random_head(tmp_path / "head", **SIZES, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    together, apart = (said_by(served_beside(model, head, hybrid_kv)) for hybrid_kv in (False, True))
    assert apart == together
    assert len({guess for made in apart[1] for guess in made}) > 6, "a head that says little tests little"


def served_beside(model: Path, head: Path, hybrid_kv: bool) -> ServedHead:
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_GUESSES})
    served = ServedHead(node_options("unified", model, speculative_config=config, hybrid_kv=hybrid_kv), NUM_GUESSES)
    assert len(served.runner.state.tables_SB) > 1 if hybrid_kv else len(served.runner.state.tables_SB) == 1
    return served


def said_by(served: ServedHead) -> tuple[list[int], list[list[int]]]:
    """The tokens, and what was guessed on the way."""
    runner, prompt = served.runner, random_prompt(50, seed=4)
    parts = None, None, runner.features, runner._table_of
    graphs = RunsDirectly(DecodeBatch(runner.model, runner.state, 32, 512, *parts))
    served.run([ScheduledRow(1, 0, 21)], [], new_slots=(new_slot(1, prompt, BLOCKS),))
    with torch.inference_mode():
        graphs.run([ScheduledRow(1, position, 1) for position in range(21, 40)])
    tokens = [*prompt, *served.run([ScheduledRow(1, 40, 10)], [SampleRow(0, 1, 50, 0, 0)])]
    guessed = [served.guesses(tokens)]
    for _ in range(3):  # the first draft is what the model says, the others hardly ever
        newest = len(tokens) - 1
        [right] = served.run([ScheduledRow(1, newest, 1)], [SampleRow(0, 1, newest + 1, 0, newest - 49)])
        drafts = [-1, right, *guessed[-1][2:]]
        rows = [ScheduledRow(1, newest + place, 1) for place in range(len(drafts))]
        samples = [SampleRow(i, 1, newest + 1 + i, 0, newest - 49 + i, draft) for i, draft in enumerate(drafts)]
        tokens += served.run(rows, samples)[:2]
        guessed.append(served.guesses(tokens))
    return tokens, guessed
