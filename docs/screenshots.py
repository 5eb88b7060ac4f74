"""Takes the pictures of the playground, of the page of a running `specwire up` with its default model: python docs/screenshots.py [URL]."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright, expect

IMAGES = Path(__file__).resolve().parent / "images"
PICTURES: dict[str, dict[str, Any]] = {
    "playground-light.png": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"},
    "playground-dark.png": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "playground-narrow.png": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
"""By file: what the browser is."""
_EXAMPLE = "Repeat some code"
_QUESTION = "Explain in a few sentences how a bicycle stays upright."
_TIMEOUT_MS = 120_000


async def take(browser: Browser, url: str, path: Path, options: dict[str, Any]) -> None:
    """A chat with two answers, one of which is in its prompt, beside the charts of both; all of the page, where it is longer than the screen."""
    page = await browser.new_page(**options)
    page.set_default_timeout(_TIMEOUT_MS)
    await page.goto(url)
    await page.get_by_role("button", name=_EXAMPLE).click()
    for number in range(2):
        await expect(page.locator(".message.assistant .stats")).to_have_count(number + 1, timeout=_TIMEOUT_MS)
        if number == 0:
            await page.fill("#prompt", _QUESTION)
            await page.press("#prompt", "Enter")
    for _ in range(2):  # the charts have the last tokens, too
        looks = await page.get_attribute("body", "data-looks")
        await expect(page.locator("body")).not_to_have_attribute("data-looks", looks or "")
    await page.screenshot(path=path, full_page=True)
    await page.close()


async def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/"
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("needs a Chromium; Debian's package is chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        for name, options in PICTURES.items():
            await take(browser, url, IMAGES / name, options)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
