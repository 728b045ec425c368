"""Prompts with images and sounds: greedy tokens equal transformers', on one node and split over two."""

from __future__ import annotations

import pytest
from decode_trio import joined, trio
from split_pair import GREEDY, Pair, changed, make_pair
from tiny_hf_models import TOWERS, tiny_hf_model
from tiny_media import MediaPrompt, check_media_greedy, media_prompt

from tiny_models import random_prompt

BEFORE, AFTER = random_prompt(21, seed=1), random_prompt(30, seed=2)
FEW = changed(GREEDY, max_tokens=8)


def submit_both(pair: Pair, prompt: MediaPrompt, name: str):  # type: ignore[no-untyped-def]
    split = pair.submit(prompt.token_ids, FEW, f"split-{name}", media=prompt.media)
    alone = pair.client.submit(f"alone-{name}", prompt.token_ids, FEW, decode=pair.decode.info, media=prompt.media)
    return split, alone


@pytest.mark.parametrize("family", TOWERS)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """Chunks of 16 tokens cut the spans; one prompt's items differ in content alone; one prompt holds text alone."""
    folder = tiny_hf_model(family)
    sizes = {"num_blocks": 64, "chunk": 16}
    with make_pair("local", model=folder, decode=sizes, prefill=sizes) as pair:
        prompts = [
            media_prompt(family, BEFORE, 1, AFTER),
            media_prompt(family, BEFORE, 4, AFTER),
            media_prompt(family, BEFORE[:3], 1, AFTER[:5], 2, BEFORE[:1], 3, AFTER),
            media_prompt(family, BEFORE, AFTER),
        ]
        results = [submit_both(pair, prompt, str(i)) for i, prompt in enumerate(prompts)]
        pair.client.wait()
        for prompt, both in zip(prompts, results, strict=True):
            for result in both:
                assert result.failed is None, result.failed
                check_media_greedy(folder, prompt, result.output(), FEW.max_tokens)
        for node in (pair.prefill, pair.decode):
            assert node.process.media.outputs.counters["media_encoded"] == 4  # of four contents, once each
        before = dict(pair.decode.process.media.outputs.counters)
        again = pair.client.submit(
            "again", prompts[0].token_ids, FEW, decode=pair.decode.info, media=prompts[0].media, samples=(0, 1)
        )
        pair.client.wait(again)
        for sample in (0, 1):
            check_media_greedy(folder, prompts[0], again.output(sample), FEW.max_tokens)
        assert pair.decode.process.media.outputs.counters == before, "its span was cached, and looked at all the same"
        pair.check_whole()


def test_prompts_with_pictures_move_and_give_way() -> None:
    """One moves to another node while it decodes, with positions of three dimensions. Of two that outgrow a pool, one
    gives way and is computed again, its picture with it."""
    folder, long = tiny_hf_model("qwen2_5_vl"), changed(GREEDY, max_tokens=90)
    with trio("local", model=folder, num_blocks=11, caching=False, host_tier_bytes=0) as nodes:
        prompt = media_prompt("qwen2_5_vl", BEFORE, 1, AFTER)
        result, moved = nodes.move_one("moves", prompt.token_ids, long, prompt.media)
        assert moved.failed is None, moved.failed
        assert [message.reason for message in result.migrated] == [""]
        check_media_greedy(folder, prompt, joined(result, moved), long.max_tokens)
        nodes.check_whole()
        two = [media_prompt("qwen2_5_vl", BEFORE, seed, AFTER) for seed in (2, 3)]
        with nodes.first.holding_until_accepted(nodes.client):
            results = [
                nodes.client.submit(f"stays-{i}", each.token_ids, long, decode=nodes.first.info, media=each.media)
                for i, each in enumerate(two)
            ]
        nodes.client.wait(*results)
        for each, stayed in zip(two, results, strict=True):
            assert stayed.failed is None, stayed.failed
            check_media_greedy(folder, each, stayed.output(), long.max_tokens)
        assert nodes.first.process.logic.scheduler.state.num_preemptions, "nobody gave way"
        nodes.check_whole()
