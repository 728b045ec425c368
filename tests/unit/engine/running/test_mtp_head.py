"""An MTP head's guesses are those of the published computation, whatever steps its features came by."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mtp_heads import FAMILIES, MtpCheckpoint, random_mtp
from quantised_checkpoints import quantised_folders
from served_head import ServedHead, check_fork, check_guesses
from torch.nn.functional import embedding, linear

from in_process_cluster import node_options
from tandem.engine.contracts.config import ModelOptions
from tiny_models import random_prompt, reference_model

NUM_GUESSES = 3
BLOCKS = (4, 9, 2, 20)


class PublishedHead:
    """The layer's own computation by transformers' modules, the rest in plain torch: entry i is token i + 1 with the
    feature of token i, at position i (DeepSeek-V3's report, 2.2; vLLM's deepseek_mtp, glm4_moe_mtp and mimo_mtp)."""

    def __init__(self, checkpoint: MtpCheckpoint) -> None:
        self.is_mimo = checkpoint.family == "mimo"
        prefix = checkpoint.prefix
        own = {name: tensor for name, tensor in checkpoint.tensors().items() if name.startswith(prefix)}
        self.weights = {name.removeprefix(prefix).removesuffix(".weight"): tensor for name, tensor in own.items()}
        self.model = reference_model(checkpoint.plain)
        self.eps = self.model.config.rms_norm_eps
        deeper = reference_model(checkpoint.deeper).model
        self.layer, self.rotations = deeper.layers[checkpoint.num_layers], deeper.rotary_emb

    def guesses(self, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """What follows these tokens, and by how much each guess was better than the next best at least."""
        table = self.weights.get("embed_tokens", self.model.get_input_embeddings().weight)
        output = self.weights.get("shared_head.head", self.model.get_output_embeddings().weight)
        with torch.inference_mode():
            feature = self.model.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
            made, lead, tokens = [], float("inf"), torch.tensor(token_ids[1:])
            for _ in range(count):
                hidden = self._layer(self._input(embedding(tokens, table), feature))
                normed = self._norm(hidden[-1:], "final_layernorm" if self.is_mimo else "shared_head.norm")
                best = linear(normed, output)[0].topk(2)
                lead = min(lead, float(best.values[0] - best.values[1]))
                made.append(int(best.indices[0]))
                tokens = torch.cat([tokens, best.indices[:1]])
                feature = torch.cat([feature, normed if self.is_mimo else hidden[-1:]])
        return made, lead

    def _input(self, embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        if self.is_mimo:
            both = self._norm(feature, "hidden_layernorm"), self._norm(embedded, "token_layernorm")
            return linear(torch.cat(both, -1), self.weights["input_proj"])
        return linear(
            torch.cat((self._norm(embedded, "enorm"), self._norm(feature, "hnorm")), -1), self.weights["eh_proj"]
        )

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(x))[None]
        turned = self.rotations(x[None], positions)
        return self.layer(x[None], attention_mask=None, position_ids=positions, position_embeddings=turned)[0]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[name]


def served_of(folder: Path, **model: str) -> ServedHead:
    """The model that lies there with its head."""
    config = json.dumps({"method": "mtp", "num_speculative_tokens": NUM_GUESSES})
    options = node_options("unified", folder, speculative_config=config)
    return ServedHead(replace(options, model=ModelOptions(str(folder), **model)), NUM_GUESSES)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_the_published_head(tmp_path: Path, family: str) -> None:
    checkpoint = random_mtp(tmp_path, family)
    published = PublishedHead(checkpoint)

    def next_token(token_ids: list[int]) -> int:
        with torch.inference_mode():
            return int(published.model(torch.tensor([token_ids])).logits[0, -1].argmax())

    check_guesses(served_of(checkpoint.served), published, next_token)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_and_rows_of_a_graph_have_the_same_features(tmp_path: Path, family: str) -> None:
    checkpoint = random_mtp(tmp_path, family, seed=1)
    check_fork(served_of(checkpoint.served), PublishedHead(checkpoint))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_matrices_of_a_heads_own_are_used_and_copies_are_not_kept_twice(tmp_path: Path, family: str) -> None:
    own, copies = (random_mtp(tmp_path / str(own), family, has_own_matrices=own) for own in (True, False))
    served = served_of(own.served)
    tokens = served.prompt(random_prompt(30, seed=2), 16)
    expected, lead = PublishedHead(own).guesses(tokens, NUM_GUESSES)
    assert lead > 1e-3
    assert served.guesses(tokens) == expected
    assert expected != PublishedHead(copies).guesses(tokens, NUM_GUESSES)[0]
    for each, is_shared in ((served, False), (served_of(copies.served), True)):
        model = each.runner.model
        assert (each.head.ends.embedding_VE.data_ptr() == model.embedding_VE.data_ptr()) is is_shared
        assert (each.head.ends.output_VE.data_ptr() == model.whole_output().data_ptr()) is is_shared


def test_a_quantised_head_guesses_by_its_dequantised_weights(tmp_path: Path) -> None:
    """As DeepSeek publishes V3: the head's layer in fp8, what stands around it in 16 bits."""
    plain = random_mtp(tmp_path / "plain", "deepseek_v3", seed=2)
    quantised, twin = quantised_folders(plain.served, tmp_path, "fp8_wide_blocks")
    deeper = shutil.copytree(twin, tmp_path / "deeper")
    config = json.loads((twin / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": plain.num_layers + 1}))
    served = served_of(quantised)
    assert served.head.layer.self_attn.o_proj.quantised is not None
    assert not isinstance(served.head.layer.mlp.experts.gate_up_proj, torch.Tensor)
    tokens = served.prompt(random_prompt(37, seed=3), 21)
    expected, lead = PublishedHead(replace(plain, served=twin, plain=twin, deeper=deeper)).guesses(tokens, NUM_GUESSES)
    assert lead > 1e-3
    assert served.guesses(tokens) == expected


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_a_model_that_is_made_smaller_keeps_its_head_as_it_is_stored(tmp_path: Path, family: str) -> None:
    checkpoint = random_mtp(tmp_path, family)
    made, plain = (served_of(checkpoint.served, quantization=how) for how in ("fp8", "auto"))
    assert made.runner.model.layers[-1].self_attn.o_proj.quantised is not None
    ours, theirs = (dict(each.head.named_parameters()) for each in (made, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    tokens = made.prompt(random_prompt(20, seed=1), 8)
    assert len(made.guesses(tokens)) == NUM_GUESSES


@pytest.mark.parametrize("family", FAMILIES)
def test_made_up_weights_guess(tmp_path: Path, family: str) -> None:
    served = served_of(random_mtp(tmp_path, family).served, load_format="dummy")
    made = served.guesses(served.prompt(random_prompt(20, seed=1), 8))
    assert len(set(made)) > 1
