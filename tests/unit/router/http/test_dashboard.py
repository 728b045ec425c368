"""The dashboard's page and feed: who sees it, what it may do, and what it costs with many nodes and viewers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_in_thread import FAST, VOCAB_SIZE, RouterInThread
from waiting import PATIENCE_S, wait_until

from stand_in_node import StandInNode, stand_in_nodes
from tandem.engine.contracts.config import Timeouts
from tandem.router.http.admin.dashboard import FILES, FOLDER
from tandem.router.placing.siblings import make_seats
from tandem.router.watching.feed import MOST_UNREAD, MOST_VIEWERS

ADMIN = {"Authorization": "Bearer sk-admin"}
NUM_NODES = 64
PICTURES = Path(__file__).resolve().parents[4] / "docs" / "images"


def events_of(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    assert answer.status_code == 200, answer.read()
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module", autouse=True)
def fast_ticks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.router.watching.feed.TICK_S", 0.2)
        patch.setattr("tandem.router.watching.exchange.ANSWER_S", PATIENCE_S)  # nobody is left out for being slow
        yield


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text("keys: {sk-user: {scopes: [inference]}, sk-admin: {}}")
    return path


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode, keys: Path) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,), api_keys_file=str(keys)) as found:
        yield found.wait_ready()


def test_the_page_has_no_data_and_may_do_little(router: RouterInThread) -> None:
    for path, kind in (("/dashboard", "text/html"), ("/dashboard/main.js", "text/javascript")):
        answer = router.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert router.client.head(path).status_code == 200
    for path in ("app.py", "..%2f..%2fapp.py", "..%2fdocs.html", "%00", "__init__.py"):
        assert router.client.get(f"/dashboard/{path}").status_code == 404


def test_nothing_is_from_elsewhere_and_nothing_becomes_markup() -> None:
    """Each file that is named is there, and no script makes markup of text."""
    assert set(FILES) == {path.name for path in FOLDER.iterdir()}
    texts = {name: content.decode() for name, content in FILES.items()}
    for name, text in texts.items():
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
        assert re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text) is None
        for other in re.findall(r'from "\./([\w.]+)"', text) + re.findall(r'(?:src|href)="dashboard/([\w.]+)"', text):
            assert other in texts, f"{name} names {other}"
    assert re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", texts["index.html"]) is None


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG 2 has it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_what_they_lie_on() -> None:
    pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", FILES["style.css"].decode())
    for scheme in (1, 2):
        colours = {pair[0]: pair[scheme] for pair in pairs}
        for ground in ("page", "card"):
            for text in ("ink", "quiet", "prompt", "token", "violet", "good", "warm", "bad", "plain"):
                assert contrast(colours[text], colours[ground]) >= 4.5, text
            assert contrast(colours["mild"], colours[ground]) >= 3


def test_the_pictures_of_it_are_small() -> None:
    pictures = [path.stat().st_size for path in PICTURES.glob("dashboard_*.webp")]
    assert len(pictures) == 4
    assert sum(pictures) < 300 << 10


def test_the_feed_is_for_admins(router: RouterInThread) -> None:
    for key, status in (("", 401), ("Bearer sk-user", 403), ("Bearer x", 401)):
        answer = router.client.get("/admin/feed", headers={"Authorization": key})
        assert (answer.status_code, "sk-" in answer.text) == (status, False)


# README says: "`/dashboard` of the router shows all of it live in a browser"
def test_values_come_while_requests_run(router: RouterInThread, node: StandInNode) -> None:
    with router.client.stream("GET", "/admin/feed", headers=ADMIN) as answer:
        events = events_of(answer)
        name, past = next(events)
        assert (name, past["processes"], past["model"]) == ("past", 1, "stand-in")
        assert {len(column) for column in past["series"].values()} == {len(past["at"])}
        body = {"prompt": [5] * 8, "max_tokens": 3, "ignore_eos": True}
        headers = ADMIN | {"X-Request-Id": "mine"}
        assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        seen = 0.0
        for name, now in events:
            assert name == "now"
            assert [each["id"] for each in now["nodes"]] == [node.node_id]
            seen += sum(point["finished"] for _, point in now["points"])
            if seen and now["recent"]:
                break
        assert (now["recent"][0]["output_tokens"], "mine" in now["recent"][0]["names"]) == (3, True)
        assert now["ready"] is True


def test_a_key_that_is_taken_away_sees_no_more(router: RouterInThread, keys: Path) -> None:
    before = keys.read_text()
    with router.client.stream("GET", "/admin/feed", headers=ADMIN) as answer:
        events = events_of(answer)
        next(events)
        keys.write_text("keys: {sk-user: {scopes: [inference]}}")
        list(events)  # it ends
    keys.write_text(before)
    wait_until(lambda: router.client.get("/status", headers=ADMIN).status_code == 200, "the key to be there again")


def test_who_does_not_read_is_let_go_of(router: RouterInThread) -> None:
    feed = router.worker.feed
    wait_until(lambda: not feed.viewers, "the end of who looked before")
    with router.client.stream("GET", "/admin/feed", headers=ADMIN) as answer:
        events = events_of(answer)
        next(events)
        (viewer,) = feed.viewers
        told = router.call(lambda: [viewer.tell(b"event: now\ndata: {}\n\n") for _ in range(MOST_UNREAD + 3)])
        assert (told[0], told[-1]) == (True, False)
        with pytest.raises(httpx.TransportError):
            list(events)
    wait_until(lambda: not feed.viewers, "the feed to forget it")


def test_processes_are_shown_together(folder: Path, node: StandInNode, tmp_path: Path) -> None:
    seats = make_seats(tmp_path / "placements", 2)
    with ExitStack() as stack:
        workers = [stack.enter_context(RouterInThread(folder, (node.address,), seat=seat)) for seat in seats]
        for worker in workers:
            worker.wait_ready()
        with workers[0].client.stream("GET", "/admin/feed") as answer:
            events = events_of(answer)
            next(events)
            for worker in workers:
                body = {"prompt": [5] * 8, "max_tokens": 2, "ignore_eos": True}
                assert worker.client.post("/v1/completions", json=body).status_code == 200
            is_told = False
            for _, now in events:
                assert now["answering"] == 2
                # A point tells of five ticks: both are in one, however far apart they ended.
                is_told |= len(now["recent"]) == 2
                if is_told and now["points"] and now["points"][-1][1]["out_tokens"]:
                    break


def test_many_nodes_and_viewers_cost_one_event_a_tick(folder: Path) -> None:
    """64 nodes; each viewer gets the very same bytes, of bounded length; and there are only so many viewers."""
    with ExitStack() as stack:
        nodes = stack.enter_context(stand_in_nodes(NUM_NODES, VOCAB_SIZE))
        addresses = tuple(node.address for node in nodes)
        patient = Timeouts(heartbeat_s=1.0, peer_lost_s=PATIENCE_S, connect_s=PATIENCE_S)
        router = stack.enter_context(RouterInThread(folder, addresses, timeouts=patient))
        wait_until(lambda: len(router.worker.service.cluster.serving()) == NUM_NODES, "all nodes")
        lines = []
        for _ in range(MOST_VIEWERS):
            answer = stack.enter_context(router.client.stream("GET", "/admin/feed"))
            assert answer.status_code == 200
            lines.append(line for line in answer.iter_lines() if line.startswith("data: "))
        refused = router.client.get("/admin/feed")
        assert (refused.status_code, "close one" in refused.text) == (503, True)
        next(lines[-1])  # what was before
        newest = next(lines[-1])
        for others in lines[:-1]:
            assert newest in others, "somebody was told differently"
        now = json.loads(newest.removeprefix("data: "))
        assert len(now["nodes"]) == NUM_NODES
        assert len(newest) < 64 << 10


def test_an_open_dashboard_does_not_hold_up_the_end(folder: Path, node: StandInNode) -> None:
    with RouterInThread(folder, (node.address,), timeouts=FAST) as router:
        router.wait_ready()
        with router.client.stream("GET", "/admin/feed") as answer:
            events = events_of(answer)
            next(events)
            router.worker.stop()
            list(events)  # it ends long before drain_s
