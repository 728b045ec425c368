"""An EAGLE-3 head's guesses are those of the published computation, whatever steps its features came by."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_heads import DEMO, FEATURE_LAYERS, random_head
from safetensors.torch import load_file
from served_head import ServedHead, check_fork, check_guesses
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from in_process_cluster import node_options
from tandem.engine.running.heads.features import FEW_ROWS, HeadFeatures
from tandem.engine.scheduling.speculation.head_tokens import HeadRow
from tiny_models import random_prompt, reference_model

NUM_GUESSES = 4
EPS, THETA, HEADS, KV_HEADS, SIZE = 1e-5, 10000.0, 4, 2, 64


# --- the reference ------------------------------------------------------------------------------------------


class PublishedHead:
    """EAGLE-3 as its authors' cnets.py computes it, in plain torch: entry i is token i + 1 with the feature of token i,
    at position i."""

    def __init__(self, folder: Path) -> None:
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.normalises = json.loads((folder / "config.json").read_text()).get("norm_before_residual", False)
        self.model = reference_model(DEMO)

    def guesses(self, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """What follows these tokens, and by how much each guess was better than the next best at least."""
        with torch.inference_mode():
            states = self.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
            feature = linear(torch.cat([states[layer][0] for layer in FEATURE_LAYERS], -1), self.weights["fc.weight"])
            made, lead, tokens = [], float("inf"), torch.tensor(token_ids[1:])
            for _ in range(count):
                hidden = self._layer(tokens, feature)
                logits = linear(self._norm(hidden[-1], "norm"), self.weights["lm_head.weight"])
                best = logits.topk(2)
                lead = min(lead, float(best.values[0] - best.values[1]))
                draft = int(best.indices[0])
                made.append(draft + int(self.weights["d2t"][draft]))
                tokens, feature = torch.cat([tokens, torch.tensor(made[-1:])]), torch.cat([feature, hidden[-1:]])
        return made, lead

    def _layer(self, tokens: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        embedded = embedding(tokens, self.model.get_input_embeddings().weight)
        normed = self._norm(feature, "midlayer.hidden_norm")
        x = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), -1)
        query, key, value = (self._of("self_attn", name, x).view(len(x), -1, SIZE).transpose(0, 1) for name in "qkv")
        query, key = self._rotated(query), self._rotated(key)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (key, value))
        attended = scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        hidden = (normed if self.normalises else feature) + self._of(
            "self_attn", "o", attended.transpose(0, 1).reshape(len(x), -1)
        )
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        return hidden + self._of("mlp", "down", silu(self._of("mlp", "gate", x)) * self._of("mlp", "up", x))

    def _of(self, block: str, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"midlayer.{block}.{name}_proj.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        frequency = THETA ** -(torch.arange(0, SIZE, 2) / SIZE)
        angle = torch.arange(x.shape[1])[:, None] * torch.cat((frequency, frequency))
        half = torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), -1)
        return x * angle.cos() + half * angle.sin()


# --- ours ---------------------------------------------------------------------------------------------------


def served_beside(folder: Path) -> ServedHead:
    """The demo model with the head that lies there."""
    config = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_GUESSES})
    return ServedHead(node_options("unified", DEMO, speculative_config=config), NUM_GUESSES)


@pytest.mark.parametrize("normalises", [False, True])
def test_guesses_are_those_of_the_published_head(tmp_path: Path, normalises: bool) -> None:
    folder = random_head(tmp_path, norm_before_residual=normalises)
    check_guesses(served_beside(folder), PublishedHead(folder), next_token)


def next_token(token_ids: list[int]) -> int:
    with torch.inference_mode():
        return int(reference_model(DEMO)(torch.tensor([token_ids])).logits[0, -1].argmax())


def test_a_fork_and_rows_of_a_graph_have_the_same_features(tmp_path: Path) -> None:
    published = PublishedHead(random_head(tmp_path))
    check_fork(served_beside(tmp_path), published)


def test_a_sequence_at_the_models_end_is_guessed_for_beside_others(tmp_path: Path) -> None:
    """It has fewer guesses than they, in steps of as many rows."""
    served = served_beside(random_head(tmp_path))
    tokens = served.prompt(random_prompt(37, seed=3), 21)
    expected, last = served.guesses(tokens), len(tokens) - 1
    others = [HeadRow(slot, last, tokens[-1], NUM_GUESSES, 0, 0) for slot in (1, 2, 3)]
    see = served.steps.guess([*others, HeadRow(4, 510, 5, 1, 0, 0)], ())  # of 512 tokens
    assert see is not None
    assert see()[0] == expected


def test_what_lacks_its_feature_is_noted_without() -> None:
    """Where rows find the token before them: in the step, in what is kept, or nowhere."""
    features = HeadFeatures(Kept(), 4, torch.device("cpu"))  # three places a slot
    slots, positions = np.array([2, 0, 0, 0, 0, -1]), np.array([7, 4, 5, 6, 7, 0])
    before, source, own = features.links(slots, positions).tolist()
    assert before == [-1, -1, 1, 2, 3, -1]
    assert source == [2 * 3 + 0, 0, 1, 2, 0, 12]
    assert own == [2 * 3 + 1, 12, 2, 0, 1, 12]  # the place of 4 is taken by 7


def test_links_of_few_and_of_many_rows_are_the_same() -> None:
    """Rows of nobody, which change nothing, make many of few."""
    features, generator = HeadFeatures(Kept(), 8, torch.device("cpu")), random.Random(0)
    for _ in range(200):
        starts = {slot: generator.randrange(9) for slot in generator.sample(range(8), 3)}
        rows = [(slot, start + place) for slot, start in starts.items() for place in range(generator.randint(1, 9))]
        generator.shuffle(rows)
        few = features.links(*np.array(rows).T)
        many = features.links(*np.array(rows + [(-1, 0)] * FEW_ROWS).T)
        assert (many[:, : len(rows)] == few).all()
        assert (many[:, len(rows) :].T == [-1, 8 * 3, 8 * 3]).all()


class Kept:
    """As much of a head as places need."""

    num_speculative_tokens, hidden_size, dtype = 1, 2, torch.float32
