"""A headless Chromium for pages that are to be looked at: the machine's own, driven by playwright (requirements-browser.lock)."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (390, 844)


def browser_path() -> str | None:
    """The machine's Chromium; None where it has none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def page_in(size: tuple[int, int], scheme: str, scale: float = 1) -> Iterator[tuple[Any, list[str]]]:
    """(page, what went wrong): a page of that size in that colour scheme; messages of its console, errors, and failed requests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=browser_path()) as browser:
        viewport = {"width": size[0], "height": size[1]}
        page = browser.new_context(viewport=viewport, color_scheme=scheme, device_scale_factor=scale).new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        yield page, wrong


def shown(page: Any, file: Path) -> Any:
    """The page, on a file of this machine."""
    page.goto(file.resolve().as_uri())
    return page
