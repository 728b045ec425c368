"""A prompt's story as it is told afterwards."""

from __future__ import annotations

from tandem.engine.contracts.wire.operate import NodeMoment, Story
from tandem.router.recent.story import RequestStory
from tandem.router.watching.telling import told


def test_moments_are_in_the_order_in_which_they_began() -> None:
    story = RequestStory("r", ("r",), started_at=10.0, clock_at=0.0, num_prompt_tokens=4, max_tokens=3, num_samples=1)
    story.placed(10.1, None, "n", "alone")
    story.first_token(10.3)
    story.end(10.9, "finished", 3, 0, last_token_at=10.8)
    did = NodeMoment("r", 1, "chunk", 0.7, 0.1, num_tokens=4), NodeMoment("r", 1, "sent KVRelease", 0.2)
    answer = Story(ask="a", moments=did)
    moments = told(story, {"n": (answer, 11.0)}, 11.0)["moments"]
    assert [moment["kind"] for moment in moments] == ["queue", "chunk", "first_token", "tokens", "message", "end"]
    assert [moment["at_s"] for moment in moments] == [0.0, 0.2, 0.3, 0.3, 0.8, 0.9]
