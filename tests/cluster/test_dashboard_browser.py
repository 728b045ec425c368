"""The dashboard in a real browser, of a real split cluster under load: seen, clicked, typed into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, Page, browser_path
from router_in_thread import RouterInThread
from watched_cluster import load, make_request, watched_cluster

pytestmark = pytest.mark.skipif(
    browser_path() is None, reason="no Chromium here: apt-get install chromium, or any Chrome, has these tests run"
)

KEY = "sk-of-operators"
NODE = "prefill-1-0a1b2c"  # as `tandem serve` would call it
HOSTILE_NODE = "decode-<img/src=x/onerror=alert(1)>"
HOSTILE = "<img/src=x/onerror=document.title=1>"
STORY = "a-long-prompt"
ESCAPE, ENTER, LEFT = ("Escape", 27), ("Enter", 13), ("ArrowLeft", 37)


@pytest.fixture(scope="module")
def router() -> Iterator[RouterInThread]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.router.watching.feed.TICK_S", 0.25)
        with watched_cluster((NODE, HOSTILE_NODE), api_key=KEY) as found:
            found.client.headers["Authorization"] = f"Bearer {KEY}"
            for name in (HOSTILE, STORY):
                assert make_request(found, name, 700, 6, ttft_target_ms=60000).status_code == 200
            with load(found, num_clients=2, pause_s=0.05):
                yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(router: RouterInThread, browser: Browser) -> Page:
    """The dashboard, as somebody sees it who has given the key."""
    page = browser.page()
    page.open(f"{router.url}/dashboard")
    page.wait_for("document.querySelector('#ask').open")
    assert page.evaluate("document.querySelectorAll('.node, #recent tbody tr').length") == 0
    for key in ("wrong", KEY):
        page.click("#key")
        page.type(key)
        page.click("#ask button.main")
        if key == "wrong":
            page.wait_for("document.querySelector('#refused').textContent.includes('valid API key')")
    page.wait_for("document.querySelector('#state').className === 'live' && document.querySelectorAll('.node').length")
    return page


def width_of(page: Page) -> int:
    found: int = page.evaluate("document.documentElement.scrollWidth")
    return found


def test_a_key_stays_in_its_tab(page: Page, browser: Browser, router: RouterInThread) -> None:
    page.open(f"{router.url}/dashboard?again")
    page.wait_for("document.querySelectorAll('.node').length")
    assert page.evaluate("document.querySelector('#ask').open") is False
    assert KEY not in page.evaluate("location.href + document.cookie + JSON.stringify(localStorage)")
    other = browser.page()
    other.open(f"{router.url}/dashboard")
    other.wait_for("document.querySelector('#ask').open")


def test_nodes_and_flows_are_drawn(page: Page) -> None:
    page.wait_for("document.querySelectorAll('.flows .moving[d]').length")
    labels = page.evaluate("[...document.querySelectorAll('.node')].map(e => e.getAttribute('aria-label'))")
    assert [label.split(" (")[0] for label in labels] == [NODE, HOSTILE_NODE]
    assert page.evaluate("document.querySelector('.flows title').textContent").startswith(f"{NODE} → {HOSTILE_NODE}")
    left, right = page.evaluate("[...document.querySelectorAll('.node')].map(e => e.getBoundingClientRect().x)")
    assert left < right
    page.click("#table-of-nodes summary")
    page.wait_for("document.querySelector('#nodes').checkVisibility()")
    assert page.text("#nodes tbody tr:last-child td").startswith("decode-<img")


def test_values_change_while_one_looks(page: Page) -> None:
    line = "document.querySelector('#chart-tokens .line.token').getAttribute('d')"
    before = page.wait_for(line)
    page.wait_for(f"{line} !== {before!r}")
    for chart in ("ttft", "itl", "tokens", "gap", "transfers", "kv", "hits", "lean"):
        page.wait_for(f"document.querySelectorAll('#chart-{chart} .marks path').length")
    page.wait_for("!document.querySelector('#figures').innerText.includes('–')")
    assert page.evaluate("document.querySelectorAll('#chart-ttft .labels text').length") > 2


def test_a_chart_tells_of_a_moment(page: Page) -> None:
    """By the mouse in all charts at once, and by the keyboard."""
    box = page.evaluate(
        "(() => { const e = document.querySelector('#chart-itl .plot'); e.scrollIntoView({block: 'center'});"
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )
    page.move(box[0] + box[2] * 0.9, box[1] + box[3] / 2)
    page.wait_for("document.querySelectorAll('.cursor line').length === document.querySelectorAll('.plot').length")
    page.move(5, 5)
    page.wait_for("document.querySelectorAll('.cursor line').length === 0")
    page.evaluate("document.querySelector('#chart-kv .plot').focus()")
    page.press(*LEFT)
    page.wait_for("document.querySelectorAll('.cursor line').length > 0")
    assert "KV in use" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.press(*ESCAPE)
    page.wait_for("document.querySelectorAll('.cursor line').length === 0")


def test_a_request_opens_as_a_waterfall(page: Page) -> None:
    page.click_until("#recent tbody button.link", "document.querySelector('#story').open")
    page.wait_for("document.querySelectorAll('.waterfall li').length > 2")
    page.press(*ESCAPE)
    page.wait_for("!document.querySelector('#story').open")
    page.click("#name")
    page.type(STORY)
    page.press(*ENTER)
    page.wait_for(f"document.querySelector('#story-title').textContent === '{STORY}'")
    kinds = page.wait_for("[...document.querySelectorAll('.waterfall [data-kind]')].map(e => e.dataset.kind)")
    assert {"queue", "chunk", "push", "verify", "commit", "first_token", "tokens", "end"} <= set(kinds)
    for kind in ("chunk", "push", "verify"):
        wide = page.evaluate(f"document.querySelector('[data-kind={kind}] .bar').getBoundingClientRect().width")
        assert wide > 0, kind
    assert page.evaluate("location.hash") == f"#{STORY}"
    assert "kept" in page.text("#story .facts")
    page.click("#story .close")
    page.wait_for("!document.querySelector('#story').open")


def test_names_of_others_are_text(page: Page) -> None:
    page.click("#name")
    page.type(HOSTILE)
    page.press(*ENTER)
    page.wait_for("document.querySelectorAll('.waterfall li').length > 2")
    assert page.text("#story-title") == HOSTILE
    assert page.evaluate("document.querySelectorAll('img:not(h1 img)').length") == 0
    assert page.evaluate("document.title") != "1"
    page.press(*ESCAPE)


def test_it_is_dark_where_the_system_is(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    light = page.wait_for(colour)
    page.prefer("dark")
    page.wait_for(f"{colour} !== {light!r}")
    page.click("#theme")  # light, whatever the system says
    page.wait_for(f"{colour} === {light!r}")
    page.click("#theme")
    page.click("#theme")
    page.wait_for(f"{colour} !== {light!r}")


@pytest.mark.parametrize("width", [360, 820])
def test_it_fits_a_phone_and_a_tablet(page: Page, width: int) -> None:
    page.resize(width, 740, mobile=True, scale=2)
    page.wait_for(f"document.querySelector('#topology svg').getAttribute('width') < {width}")
    named = "[...document.querySelectorAll('.node .name')].map(e => e.textContent)"
    assert ("prefill-1" if width == 360 else NODE) in page.evaluate(named)
    beyond = f"e.getBoundingClientRect().right > {width} && !e.closest('.scrolls')"
    assert page.evaluate(f"[...document.querySelectorAll('main *')].filter(e => {beyond}).map(e => e.outerHTML)") == []
    assert width_of(page) <= width
    page.click("#recent tbody button.link")
    page.wait_for("document.querySelectorAll('.waterfall li').length > 2")
    assert width_of(page) <= width
    assert page.evaluate("document.querySelector('#story').scrollWidth <= document.querySelector('#story').clientWidth")
    page.press(*ESCAPE)
    page.resize(1280, 900)


def test_nothing_was_forbidden_or_thrown(page: Page) -> None:
    """Last: of all that was done before, the browser complained of nothing but the wrong key."""
    assert [each for each in page.complaints() if "401" not in each] == []
