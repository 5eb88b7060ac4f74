"""The playground: its files, what the API gives it, and the page itself in a headless browser."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from specwire.http.playground import Playground
from tests.http.serving import Served, http_served
from tests.security.key_file import KEY, File, entry

_TIMEOUT_MS = 30_000
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 40, "temperature": 0, "seed": 3}


@pytest.fixture
def keys(tmp_path: Path) -> File:
    file = File(tmp_path / "keys.yaml")
    file.write(entry())
    return file


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs a Chromium; Debian's package is chromium")
    async with async_playwright() as playwright:
        # Without a sandbox of its own, which containers and root don't have; the page is ours.
        browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        yield browser
        await browser.close()


async def open_page(browser: Browser, url: str, **options: Any) -> tuple[Page, list[str]]:
    """The page, and what goes wrong in it."""
    page = await browser.new_page(**options)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith(url) else None)
    page.set_default_timeout(_TIMEOUT_MS)
    expect.set_options(timeout=_TIMEOUT_MS)
    await page.goto(f"{url}/")
    return page, problems


async def test_files_need_nothing_from_elsewhere(served: Served) -> None:
    names = Playground().names
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= set(names)
    for name in names:
        answer = await served.get(f"/page/{name}")
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        content = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|@import", content), name
        again = await served.call("GET", f"/page/{name}", if_none_match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")
    index = await served.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    loaded = set(re.findall(r'(?:src|href)="page/([^"]+)"', index.body.decode()))
    loaded |= {
        name
        for script in names
        if script.endswith(".js")
        for name in re.findall(r'from "./([^"]+)"', (await served.get(f"/page/{script}")).body.decode())
    }
    assert loaded == {name for name in names if name != "index.html"}
    assert (await served.get("/page/other.js")).status == 404


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/health", "/health/live", "/health/ready", "/v1/models", "/version", "/openapi.json"])
async def test_head_has_the_headers_of_get_alone(served: Served, path: str) -> None:
    got, head = await served.get(path), await served.call("HEAD", path)
    own = {"date", "x-request-id"}
    assert (head.status, head.body) == (200, b"")
    assert {name: value for name, value in head.headers.items() if name not in own} == {
        name: value for name, value in got.headers.items() if name not in own
    }


async def test_page_can_be_left_out(socket_dir: Path) -> None:
    async with http_served(socket_dir, http={"playground": False}) as served:
        assert [(await served.get(path)).status for path in ("/", "/page/app.js", "/specwire/status")] == [404, 404, 200]


async def test_status_is_the_coordinators(served: Served) -> None:
    await served.post("/v1/chat/completions", QUESTION)
    status = (await served.get("/specwire/status")).json
    assert status["model_id"] == "scripted"
    assert status["num_generated_tokens"] == 40
    assert status["num_accepted_tokens"] == sum(status["accepted_per_position"]) > 0
    assert [(lane["address"], lane["is_ready"]) for lane in status["lanes"]] == [("v:1", True)]
    assert [(drafter["address"], drafter["is_connected"]) for drafter in status["drafters"]] == [("d:1", True)]


async def test_status_needs_a_key_where_there_are_keys(socket_dir: Path, keys: File) -> None:
    async with http_served(socket_dir, coordinator={"api_keys": keys.path}) as served:
        assert (await served.get("/specwire/status")).status == 401
        assert (await served.get("/specwire/status", authorization=f"Bearer {KEY}")).status == 200
        assert (await served.get("/")).status == 200


@pytest.mark.parametrize("is_chat", [True, False])
async def test_origins_of_tokens(served: Served, is_chat: bool) -> None:
    path, body = "/v1/completions", {"prompt": "What is it?", "max_tokens": 40, "temperature": 0, "seed": 3, "return_token_origins": True}
    if is_chat:
        path, body = "/v1/chat/completions", QUESTION | {"return_token_origins": True}
    whole = (await served.post(path, body)).json["choices"][0]
    text = whole["message"]["content"] if is_chat else whole["text"]
    choices = [event["choices"][0] for event in (await served.post(path, body | {"stream": True})).events]
    origins = [origin for choice in choices for origin in choice.get("token_origins", ())]
    assert len(whole["token_origins"]) == len(origins) == 40
    assert "".join(piece for choice in choices for piece in choice.get("token_pieces", ())) == text
    spec = choices[-1]["speculation"]
    assert origins.count("accepted") == spec["num_accepted_tokens"] > 0
    assert origins.count("recovered") > 0
    assert spec["acceptance_length"] == pytest.approx(1 + spec["num_accepted_tokens"] / spec["num_drafts"])
    plain = (await served.post(path, body | {"return_token_origins": False})).json["choices"][0]
    assert not {"token_origins", "token_pieces", "speculation"} & set(plain)


async def test_chat_with_live_charts(served: Served, browser: Browser) -> None:
    page, problems = await open_page(browser, served.url)
    await expect(page.locator("#health")).to_have_text("ready")
    await expect(page.locator("#model")).to_have_text("scripted")
    await expect(page.locator("#acceptance")).to_contain_text("no draft was verified yet")
    await expect(page.locator("#lanes li .badge")).to_have_text("ready")
    await expect(page.locator("#drafters li .badge")).to_have_text("connected")

    await page.click("#settings summary")
    await page.fill("#max-tokens", "60")
    await page.fill("#seed", "3")
    await page.fill("#prompt", "What is <b>it</b>?")
    await page.press("#prompt", "Enter")
    await expect(page.locator(".message.assistant .stats")).to_contain_text("60 tokens")
    assert await page.locator(".message.user .text").inner_text() == "What is <b>it</b>?"
    num_tokens = {kind: await page.locator(f".message .tok.{kind}").count() for kind in ("accepted", "recovered", "bonus", "plain")}
    assert sum(num_tokens.values()) == 60
    assert min(num_tokens["accepted"], num_tokens["recovered"], num_tokens["plain"]) > 0
    assert await page.locator(".message.assistant .text").inner_text() == "".join(await page.locator(".message.assistant .tok").all_inner_texts())

    await expect(page.locator("#acceptance rect")).to_have_count(5)
    assert float(await page.locator("#acceptance rect").first.get_attribute("height") or 0) > 0
    await expect(page.locator("#acceptance-span")).to_have_text("last 30 s")
    await expect(page.locator("#steps .bars > div")).to_have_count(6)
    await expect(page.locator("#k path")).to_have_count(1)
    await expect(page.locator("#rate path")).to_have_count(1)
    await expect(page.locator("#lanes")).to_contain_text("KV blocks free")

    # Without drafts: the same text, and no token of a draft. The conversation goes on, so the question must be the first again.
    text = await page.locator(".message.assistant .text").inner_text()
    await page.click("#reset")
    await page.fill("#max-drafts", "0")
    await page.fill("#prompt", "What is <b>it</b>?")
    await page.click("#send")
    await expect(page.locator(".message.assistant .stats")).to_contain_text("nothing was drafted")
    assert await page.locator(".message.assistant .text").inner_text() == text
    assert await page.locator(".message .tok.accepted").count() == 0
    assert not problems
    await served.until_idle()


async def test_positions_without_drafts_have_no_share(served: Served, browser: Browser) -> None:
    await served.post("/v1/chat/completions", QUESTION | {"max_draft_tokens": 2})
    page, problems = await open_page(browser, served.url)
    await expect(page.locator("#acceptance rect")).to_have_count(2)
    assert re.fullmatch(
        r"Acceptance by position: \d+%, \d+%, none, none, none", await page.locator("#acceptance svg").get_attribute("aria-label") or ""
    )
    await expect(page.locator("#acceptance text", has_text="–")).to_have_count(3)
    assert not problems


async def test_stop_ends_the_generation(socket_dir: Path, browser: Browser) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.02}) as served:
        page, problems = await open_page(browser, served.url)
        await page.click("#settings summary")
        await page.fill("#max-tokens", "400")
        await page.fill("#prompt", "Go on.")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".message.assistant .tok").nth(3)).to_be_visible()
        await page.click("#stop")
        await expect(page.locator(".message.assistant .stats")).to_contain_text("stopped")
        await served.until_idle()
        await expect(page.locator("#send")).to_be_visible()
        assert not problems


async def test_refusals_are_shown(socket_dir: Path, keys: File, browser: Browser) -> None:
    async with http_served(socket_dir, coordinator={"api_keys": keys.path}) as served:
        page, _ = await open_page(browser, served.url)
        await expect(page.locator("#health")).to_have_text("no API key")
        await page.fill("#prompt", "Hello")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".message.assistant .error")).to_contain_text("API key")
        await page.click("#settings summary")
        await page.fill("#key", KEY)
        await page.fill("#max-tokens", "-1")
        await expect(page.locator("#health")).to_have_text("ready")
        await page.fill("#prompt", "Hello")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".message.assistant .error").nth(1)).to_contain_text("max_tokens is -1")


@contextlib.asynccontextmanager
async def second_address(port: int) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Another address of a service, and the connections to it, which can be broken."""
    browsers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        browsers.append(writer)
        service_reader, service_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, service_writer), copy(service_reader, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", browsers


async def test_a_lost_service_is_named(socket_dir: Path, browser: Browser) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.02}) as served:
        async with second_address(served.port) as (url, connections):
            page, _ = await open_page(browser, url)
            await expect(page.locator("#health")).to_have_text("ready")
            await page.fill("#prompt", "Go on.")
            await page.press("#prompt", "Enter")
            await expect(page.locator(".message.assistant .tok").nth(3)).to_be_visible()
            for connection in connections:
                connection.transport.abort()
            await expect(page.locator(".message.assistant .error")).to_contain_text("the connection to the service broke")
            await served.until_idle()
        for connection in connections:
            connection.transport.abort()
        await expect(page.locator("#away")).to_contain_text("the service can't be reached")
        await expect(page.locator("#away")).to_contain_text(f"is {url.removeprefix('http://')} still running?")
        await expect(page.locator("#health")).to_have_text("not reached")
        await page.fill("#prompt", "Hello")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".message.assistant .error").nth(1)).to_contain_text("the service can't be reached")


async def test_fits_narrow_screens_and_themes(served: Served, browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    for position, scheme in enumerate(("light", "dark")):
        page, problems = await open_page(browser, served.url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
        await expect(page.locator("#health")).to_have_text("ready")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        seen = [await page.evaluate(background)]
        for _ in range(2):
            await page.click("#theme")
            seen.append(await page.evaluate(background))
        assert seen[1] != seen[2]
        assert seen[0] == seen[1 + position], "without a choice the page follows the system"
        await page.reload()
        assert await page.evaluate(background) == seen[2], "a choice is kept"
        assert not problems
        await page.close()
