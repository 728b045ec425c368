"""Takes the pictures of the dashboard that docs show, of a real split cluster under load:

.venv/bin/python tests/fakes/dashboard_pictures.py docs/images
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from browser import Browser, Page
from watched_cluster import load, make_request, watched_cluster

NODES = ("prefill-1", "prefill-2", "decode-1", "decode-2")
STORY = "a-long-prompt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="of load before the first picture")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with watched_cluster(NODES) as router, Browser() as browser, load(router, num_clients=4, pause_s=0.8):
        time.sleep(arguments.seconds)
        make_request(router, STORY, 1200, 24, ttft_target_ms=2000)
        page = browser.page()
        page.open(f"{router.url}/dashboard")
        page.wait_for("document.querySelectorAll('#recent tbody tr').length > 10")
        take(page, arguments.folder)


def take(page: Page, folder: Path) -> None:
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        page.resize(1280, 1010)
        save(page, folder / f"dashboard_{scheme}.webp")
    page.prefer("light")
    page.resize(1100, 800)
    page.evaluate(f"location.hash = '{STORY}'")
    page.wait_for("document.querySelectorAll('.waterfall li').length > 8")
    save(page, folder / "dashboard_request.webp")
    page.press("Escape", 27)
    page.prefer("dark")
    page.resize(390, 844, mobile=True, scale=1.5)
    save(page, folder / "dashboard_phone.webp")


def save(page: Page, path: Path) -> None:
    time.sleep(1.5)  # it is drawn once a second
    page.screenshot(path, format="webp", quality=82)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
