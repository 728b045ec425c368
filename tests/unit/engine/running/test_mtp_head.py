"""An MTP head's guesses are those of the published computation, whatever steps its features came by."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from handmade_steps import BLOCK, RunsDirectly, new_slot
from mtp_heads import FAMILIES, MtpCheckpoint, random_mtp
from quantised_checkpoints import quantised_folders
from torch.nn.functional import embedding, linear

from in_process_cluster import node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.models.heads.mtp import MtpHead
from tandem.engine.running.heads.guess_steps import HeadSteps
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.speculation.head_tokens import HeadRow
from tandem.engine.scheduling.step import BlockAppend, ForkSlot, SampleRow, ScheduledRow, SchedulerOutput
from tandem.node.drafting.heads import LoadedHead
from tandem.node.setup import load
from tiny_models import VOCAB, random_prompt, reference_model

NUM_GUESSES = 3
EPS = 1e-6
BLOCKS = (4, 9, 2, 20)


class PublishedHead:
    """The layer's own computation by transformers' modules, the rest in plain torch: entry i is token i + 1 with the
    feature of token i, at position i (DeepSeek-V3's report, 2.2; vLLM's deepseek_mtp and mimo_mtp)."""

    def __init__(self, checkpoint: MtpCheckpoint) -> None:
        self.is_mimo = checkpoint.family == "mimo"
        prefix = checkpoint.prefix
        own = {name: tensor for name, tensor in checkpoint.tensors().items() if name.startswith(prefix)}
        self.weights = {name.removeprefix(prefix).removesuffix(".weight"): tensor for name, tensor in own.items()}
        self.model = reference_model(checkpoint.plain)
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
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weights[name]


class Served:
    """The model's runner with its head beside it, and what it has computed of slot 1."""

    def __init__(self, folder: Path, **model: str) -> None:
        config = json.dumps({"method": "mtp", "num_speculative_tokens": NUM_GUESSES})
        options = node_options("unified", folder, speculative_config=config)
        loaded = load(replace(options, model=ModelOptions(str(folder), **model)))  # type: ignore[arg-type]
        assert isinstance(loaded.draft, LoadedHead)
        assert isinstance(loaded.draft.head, MtpHead)
        self.head = loaded.draft.head
        self.runner = ModelRunner(
            loaded.model, allocate_pool(loaded.layout, 32, loaded.device), options.scheduler, BLOCK, 512, ()
        )
        assert self.runner.features is not None
        self.steps = HeadSteps(self.head, self.runner.features, self.runner.state, 16, 512)

    def run(self, rows: list[ScheduledRow], samples: list[SampleRow], **parts: object) -> list[int]:
        return self.runner.execute(SchedulerOutput(0, tuple(rows), tuple(samples), **parts)).result().token_ids.tolist()  # type: ignore[arg-type]

    def prompt(self, prompt: list[int], chunk: int) -> list[int]:
        """Computes a prompt in two chunks: its tokens, and the one drawn."""
        self.run([ScheduledRow(1, 0, chunk)], [], new_slots=(new_slot(1, prompt, BLOCKS),))
        rest = ScheduledRow(1, chunk, len(prompt) - chunk)
        return [*prompt, *self.run([rest], [SampleRow(0, 1, len(prompt), 0, 0)])]

    def guesses(self, token_ids: list[int]) -> list[int]:
        row = HeadRow(1, len(token_ids) - 1, token_ids[-1], NUM_GUESSES, 0, 0)
        [made] = self.steps.guess([row], ()) or [[]]
        return made


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_the_published_head(tmp_path: Path, family: str) -> None:
    """Behind a prompt in chunks, a token of its own, and a step with drafts of which the second is wrong."""
    checkpoint = random_mtp(tmp_path, family)
    published, served = PublishedHead(checkpoint), Served(checkpoint.served)
    tokens = served.prompt(random_prompt(37, seed=3), 21)
    seen: list[int] = []

    def check() -> None:
        expected, lead = published.guesses(tokens, NUM_GUESSES)
        assert lead > 1e-3, "the reference itself is undecided"
        assert served.guesses(tokens) == expected
        seen.extend(expected)

    check()
    tokens += served.run([ScheduledRow(1, 37, 1)], [SampleRow(0, 1, 38, 0, 1)])
    check()
    with torch.inference_mode():
        right = int(published.model(torch.tensor([tokens])).logits[0, -1].argmax())
    drafts = [right, (right + 1) % VOCAB, 5]
    rows = [ScheduledRow(1, 38 + place, 1) for place in range(4)]
    samples = [SampleRow(place, 1, 39 + place, 0, 2 + place, draft) for place, draft in enumerate([-1, *drafts])]
    drawn = served.run(rows, samples)
    assert drawn[0] == right
    tokens += drawn[:2]  # the second draft was wrong, and what its place drew is the sequence's own
    check()
    assert len(set(seen)) > 3, "a head that says little tests little"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_and_rows_of_a_graph_have_the_same_features(tmp_path: Path, family: str) -> None:
    """A prompt's second chunk as rows of one token, as graphs run it, longer than what is kept of a slot; then a
    sample that forks, in blocks that come with the guess."""
    checkpoint = random_mtp(tmp_path, family, seed=1)
    published, served, prompt = PublishedHead(checkpoint), Served(checkpoint.served), random_prompt(32, seed=5)
    graphs = RunsDirectly(served.runner.model, served.runner.state, 32, 512, features=served.runner.features)
    served.run([ScheduledRow(1, 0, 20)], [], new_slots=(new_slot(1, prompt, BLOCKS[:2]),))
    rows = [ScheduledRow(1, position, 1) for position in [30, *range(20, 30)]]  # sampled rows come first
    with torch.inference_mode():
        graphs.run(rows)
    samples = [SampleRow(0, 3, 32, 1, 0), SampleRow(0, 1, 32, 0, 0)]
    forks = (ForkSlot(3, 1, 32, BLOCKS[:2], sample_index=1),)
    made = served.run([ScheduledRow(1, 31, 1)], samples, forks=forks)
    expected, lead = published.guesses([*prompt, made[0]], NUM_GUESSES)
    assert lead > 1e-3
    order = [HeadRow(1, 32, made[1], NUM_GUESSES, 0, 0), HeadRow(3, 32, made[0], NUM_GUESSES - 1, 1, 0)]
    appends = [BlockAppend(1, 2, 21), BlockAppend(3, 2, 22)]
    assert served.steps.guess(order, appends) == [expected, expected[:-1]]


def test_matrices_of_a_heads_own_are_used_and_copies_are_not_kept_twice(tmp_path: Path) -> None:
    own, copies = (random_mtp(tmp_path / str(own), "deepseek_v3", has_own_matrices=own) for own in (True, False))
    served = Served(own.served)
    tokens = served.prompt(random_prompt(30, seed=2), 16)
    expected, lead = PublishedHead(own).guesses(tokens, NUM_GUESSES)
    assert lead > 1e-3
    assert served.guesses(tokens) == expected
    assert expected != PublishedHead(copies).guesses(tokens, NUM_GUESSES)[0]
    for each, is_shared in ((served, False), (Served(copies.served), True)):
        model = each.runner.model
        assert (each.head.embedding_VE.data_ptr() == model.embed_tokens.weight.data_ptr()) is is_shared
        assert (each.head.output_VE.data_ptr() == model.lm_head.weight.data_ptr()) is is_shared


def test_a_quantised_head_guesses_by_its_dequantised_weights(tmp_path: Path) -> None:
    """As DeepSeek publishes V3: the head's layer in fp8, what stands around it in 16 bits."""
    plain = random_mtp(tmp_path / "plain", "deepseek_v3", seed=2)
    quantised, twin = quantised_folders(plain.served, tmp_path, "fp8_wide_blocks")
    deeper = shutil.copytree(twin, tmp_path / "deeper")
    config = json.loads((twin / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": plain.num_layers + 1}))
    served = Served(quantised)
    assert served.head.layer.self_attn.o_proj.quantised is not None
    assert not isinstance(served.head.layer.mlp.experts.gate_up_proj, torch.Tensor)
    tokens = served.prompt(random_prompt(37, seed=3), 21)
    expected, lead = PublishedHead(replace(plain, served=twin, plain=twin, deeper=deeper)).guesses(tokens, NUM_GUESSES)
    assert lead > 1e-3
    assert served.guesses(tokens) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_made_smaller_keeps_its_head_as_it_is_stored(tmp_path: Path, family: str) -> None:
    checkpoint = random_mtp(tmp_path, family)
    made, plain = (Served(checkpoint.served, quantization=how) for how in ("fp8", "auto"))
    assert made.runner.model.layers[-1].self_attn.o_proj.quantised is not None
    ours, theirs = (dict(each.head.named_parameters()) for each in (made, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    tokens = made.prompt(random_prompt(20, seed=1), 8)
    assert len(made.guesses(tokens)) == NUM_GUESSES


@pytest.mark.parametrize("family", FAMILIES)
def test_made_up_weights_guess(tmp_path: Path, family: str) -> None:
    served = Served(random_mtp(tmp_path, family).served, load_format="dummy")
    made = served.guesses(served.prompt(random_prompt(20, seed=1), 8))
    assert len(set(made)) > 1
