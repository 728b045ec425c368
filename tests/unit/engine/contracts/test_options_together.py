"""Options that would do nothing by themselves are refused, and what they need is named."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.engine.contracts.config import ModelOptions, RouterOptions, WebOptions
from tandem.engine.contracts.errors import ConfigError


@pytest.mark.parametrize(
    "given", [{"allow_credentials": True}, {"allowed_methods": ("GET",)}, {"allowed_headers": ("X-A",)}], ids=str
)
def test_what_pages_may_do_needs_pages(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pages of --allowed-origins: name these, too"):
        WebOptions(**given)
    WebOptions(allowed_origins=("*",), **given)


def test_prompts_are_logged_in_lines_of_requests() -> None:
    with pytest.raises(ConfigError, match="the lines of --enable-log-requests: give that, too"):
        RouterOptions(ModelOptions("m"), log_prompt_chars=5)
    RouterOptions(ModelOptions("m"), log_prompt_chars=5, enable_log_requests=True)
