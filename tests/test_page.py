"""The page at `/`: its files without a browser, and all that a person does with it in chromium, if there is one."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.service import ROOT, Service, samples, serving, until

try:
    from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
except ImportError:
    Page = Browser = Route = expect = sync_playwright = None

CHROMIUM = shutil.which("chromium")
MISSING = "playwright (pip install)" if sync_playwright is None else "chromium (Debian: apt install chromium)"
in_a_browser = pytest.mark.skipif(sync_playwright is None or CHROMIUM is None, reason=f"{MISSING} is missing")
pytestmark = pytest.mark.timeout(60)

FILES = {f"/static/{path.name}" for path in (ROOT / "app" / "static").iterdir()} - {"/static/index.html"}
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
STROKES = {  # in hundredths of the drawing area
    0: [[(50, 12), (36, 18), (28, 36), (28, 62), (36, 82), (50, 88), (64, 82), (72, 62), (72, 36), (64, 18), (50, 12)]],
    1: [[(50, 20), (50, 80)]],
    7: [[(40, 30), (60, 30), (46, 62)], [(44, 46), (58, 46)]],  # small, and not in the middle
}
LONG = 15_000  # ms for what waits on a slow machine


@pytest.fixture(scope="module")  # its event loop is in the way of other modules' tests
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--headless=new"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, service: Service, **options: object) -> Iterator[Page]:
    """A tab of its own, at the page; it asks nobody but the service."""
    with browser.new_context(**options) as context:
        context.set_default_timeout(LONG)
        expect.set_options(timeout=LONG)
        page = context.new_page()
        hosts = set()
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(f"http://127.0.0.1:{service.port}/")
        yield page
        assert hosts == {f"127.0.0.1:{service.port}"}


@pytest.fixture
def page(browser: Browser, digits: Service) -> Iterator[Page]:
    """Of the shipped model; its console stays silent."""
    with opened(browser, digits) as page:
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.reload()
        expect(page.locator("#state")).to_have_text("Ready")
        yield page
        assert [line for line in said if "status of 422" not in line and "status of 400" not in line] == []


def draw(page: Page, digit: int) -> None:
    box = page.locator("#pad").bounding_box()
    for stroke in STROKES[digit]:
        places = [(box["x"] + box["width"] * x / 100, box["y"] + box["height"] * y / 100) for x, y in stroke]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place, steps=4)
        page.mouse.up()


def npy(array: np.ndarray) -> dict:
    """As a file that a person chooses."""
    file = io.BytesIO()
    np.save(file, array)
    return {"name": "items.npy", "mimeType": "application/octet-stream", "buffer": file.getvalue()}


def put(page: Page, body: str) -> None:
    if page.locator("#json").get_attribute("open") is None:
        page.locator("#json summary").click()
    page.get_by_label("Request body").fill(body)
    page.get_by_role("button", name="Send", exact=True).click()


# ---- the files


def test_the_page_and_its_files_are_served_with_a_strict_policy(digits: Service) -> None:
    for path in ["/", *FILES]:
        got = digits.client.get(path)
        assert got.status_code == 200
        assert got.headers["content-type"] == TYPES.get(Path(path).suffix, "text/html; charset=utf-8")
        policy = got.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        head = digits.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(got.content))
    for path in ("/static/", "/static/index.html", "/static/../page.py", "/static/%2e%2e/page.py", "/page.css"):
        assert digits.client.get(path).status_code == 404
    assert digits.client.post("/").status_code == 405


def test_the_page_names_files_that_are_served_and_nothing_from_elsewhere() -> None:
    texts = {path: (ROOT / "app" / path.lstrip("/")).read_text() for path in FILES}
    texts["/"] = (ROOT / "app" / "static" / "index.html").read_text()
    for path, text in texts.items():
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", ""), path
        assert " style=" not in text
        assert " on" not in [word[:3] for word in text.split("<")]
    used = " ".join(texts.values())
    assert all(path.rsplit("/", 1)[1] in used for path in FILES)


def test_with_keys_on_the_page_is_open_and_the_data_is_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    service = Service("digits", verb="app", api_keys_file=keys)
    try:
        until(lambda: answers(service, "/livez") == 200)
        assert {answers(service, path) for path in ["/", "/static/digits.json", *FILES]} == {200}
        for path in ("/info", "/metrics", "/docs", "/static/", "/static/x", "/static/page.css/"):
            assert answers(service, path) == 401, path
        assert service.stop() == 0
    finally:
        service.close()


def answers(service: Service, path: str) -> int:
    """The status; 0 where nobody listens yet."""
    try:
        return service.client.get(path).status_code
    except httpx.TransportError:
        return 0


# ---- in a browser


@in_a_browser
def test_a_lane_for_each_rank_and_numbers_that_live(page: Page, digits: Service) -> None:
    expect(page).to_have_title("Digits · Phalanx")
    expect(page.locator("#what")).to_contain_text("Digits on 2 ranks (cpu)")
    for rank in (0, 1):
        lane = page.locator(f'[data-rank="{rank}"]')
        expect(lane).to_have_attribute("data-state", "up")
        expect(lane).to_contain_text("cpu ·")
        expect(lane).to_contain_text("epoch 1")
    digits.outputs(samples()[0])
    expect(page.locator('[data-tile="99 % answered in"] b')).not_to_have_text("–")
    expect(page.locator('[data-rank="1"]')).to_contain_text("MiB")


@in_a_browser
@pytest.mark.parametrize("digit", STROKES)
def test_a_drawn_digit_is_read(page: Page, digit: int) -> None:
    draw(page, digit)
    expect(page.locator("#answer output")).to_have_text(str(digit))
    expect(page.locator("#answer h2")).to_have_text("1 item by rank 0")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#answer")).to_be_hidden()


@in_a_browser
def test_samples_are_shared_over_the_ranks_and_read_right(page: Page) -> None:
    page.get_by_role("button", name="48 at once").click()
    expect(page.locator("#answer h2")).to_have_text("48 items by rank 0, rank 1")
    expect(page.locator("#answer h3")).to_have_text(["rank 0 items 0 to 23", "rank 1 items 24 to 47"])
    assert page.locator("#answer li").all_inner_texts() == [str(label) for label in samples()[1]]


@in_a_browser
def test_json_is_answered_with_rank_and_timing(page: Page) -> None:
    images, labels = samples()
    put(page, json.dumps({"inputs": images[:3]}))
    expect(page.locator("#answer h3")).to_have_text(["rank 0 items 0 to 1", "rank 1 item 2"])
    shown = [json.loads(text) for text in page.locator("#answer code").all_inner_texts()]
    assert [one["digit"] for one in shown] == labels[:3]
    expect(page.locator(".timing dt")).to_have_text(["queue", "forward", "collect", "total", "round trip"])


@in_a_browser
def test_a_broken_body_and_a_broken_item_show_what_the_server_says(page: Page) -> None:
    put(page, '{"inputs": [1, 2')
    expect(page.locator("#answer .error")).to_have_text("Input data was truncated")
    put(page, '{"inputs": [[1, 2]]}')
    expect(page.locator("#answer .error")).to_contain_text("64")
    put(page, json.dumps({"inputs": [samples()[0][0], "no digit"]}))
    expect(page.locator("#answer li.error")).to_have_count(1)
    expect(page.locator("#answer code")).to_have_count(1)


@in_a_browser
def test_files_are_sent_or_refused_with_a_reason(page: Page) -> None:
    images, labels = samples()
    page.locator("#json summary").click()
    page.locator("#file").set_input_files(npy(np.array(images[:2], np.float32)))
    expect(page.locator("#chosen")).to_contain_text("items.npy, ")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("#answer h2")).to_have_text("2 items by rank 0, rank 1")
    assert [json.loads(text)["digit"] for text in page.locator("#answer code").all_inner_texts()] == labels[:2]
    page.locator("#file").set_input_files(ROOT / "app" / "static" / "icon.svg")
    expect(page.locator("#answer .error")).to_contain_text("Digits takes float32 [64], which is no image")
    page.locator("#file").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    expect(page.locator("#answer .error")).to_have_text("a.txt is neither an .npy file nor an image.")


@in_a_browser
def test_the_keyboard_is_enough(page: Page) -> None:
    def tab_to(id: str) -> None:
        for _ in range(15):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == id:
                return
        pytest.fail(f"Tab does not come to {id}")

    tab_to("sample")
    page.keyboard.press("Enter")
    expect(page.locator("#answer output")).to_have_text(str(samples()[1][0]))
    assert page.locator("#sample").evaluate("button => getComputedStyle(button).outlineStyle") == "solid"
    page.locator("#json summary").press("Enter")
    tab_to("body")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer code")).to_contain_text('"digit":6')


@in_a_browser
def test_the_dark_scheme_is_dark(browser: Browser, digits: Service) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        with opened(browser, digits, color_scheme=scheme) as page:
            expect(page.locator("#main")).to_be_visible()
            shades[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert shades == {"light": "rgb(245, 246, 248)", "dark": "rgb(15, 19, 25)"}


@in_a_browser
def test_an_image_becomes_what_the_model_takes(browser: Browser, digits: Service) -> None:
    """The service says that its model takes images, and then what it got."""
    got: list[dict] = []

    def info(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        body["groups"]["0"]["model"] |= {"name": "Eyes", "inputs": {"dtype": "uint8", "shape": [3, 2, None]}}
        route.fulfill(response=answer, json=body)

    def infer(route: Route) -> None:
        got.append(route.request.post_data_json)
        route.fulfill(json={"id": "x", "outputs": ["seen"]}, headers={"X-Phalanx-Ranks": "0*1"})

    red_png = """() => {
        const canvas = Object.assign(document.createElement("canvas"), { width: 4, height: 4 });
        const context = canvas.getContext("2d");
        context.fillStyle = "red";
        context.fillRect(0, 0, 4, 4);
        return canvas.toDataURL("image/png").split(",")[1];
    }"""
    with opened(browser, digits) as page:
        page.route("**/info", info)
        page.route("**/infer", infer)
        page.reload()
        expect(page.locator("#takes")).to_contain_text("uint8 [3, 2, any]")
        expect(page.locator("#draw")).to_be_hidden()
        png = base64.b64decode(page.evaluate(red_png))
        page.locator("#file").set_input_files({"name": "red.png", "mimeType": "image/png", "buffer": png})
        expect(page.locator("#chosen")).to_contain_text("red.png as uint8 [3, 2, 4], values 0 to 255")
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator("#answer code")).to_have_text('"seen"')
    assert np.array(got[0]["inputs"]).tolist() == [[[[255] * 4] * 2, [[0] * 4] * 2, [[0] * 4] * 2]]


@in_a_browser
def test_of_several_models_one_is_chosen_and_lanes_say_their_group(browser: Browser, digits: Service) -> None:
    """The service says that there is a second group, of another model, and then what it got."""
    got: list[str] = []

    def info(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        group = body["groups"]["0"]
        model = {"name": "Eyes", "max_batch_size": 1, "inputs": None, "example": "iris", "canary": "its example"}
        body["groups"]["1"] = group | {"ranks": group["ranks"][:1], "model": model}
        body["models"]["Eyes"] = {"ready": True, "reason": None, "groups": ["1"]}
        body["lost"]["2"] = {"since": "2001-02-03T04:05:06+00:00", "why": "it slept"}
        route.fulfill(response=answer, json=body)

    def infer(route: Route) -> None:
        got.append(route.request.url.rpartition("/")[2])
        route.fulfill(json={"id": "x", "outputs": ["seen"]}, headers={"X-Phalanx-Ranks": "1/0*1"})

    with opened(browser, digits) as page:
        expect(page.locator("#which")).to_be_hidden()
        page.route("**/info", info)
        page.route("**/infer?*", infer)
        page.reload()
        expect(page).to_have_title("Digits, Eyes · Phalanx")
        expect(page.locator("#what")).to_contain_text("Digits, Eyes on 3 ranks in 2 groups (cpu)")
        expect(page.locator('[data-rank="0"]')).to_contain_text("Group 0, rank 0")
        expect(page.locator('[data-rank="1/0"]')).to_contain_text("Group 1, rank 0")
        expect(page.locator('[data-rank="1/0"]')).to_contain_text("Eyes · cpu")
        expect(page.locator("#death")).to_contain_text("Group 2 is away since 2001-02-03T04:05:06+00:00: it slept")
        expect(page.locator("#draw")).to_be_visible()
        page.get_by_label("Model", exact=True).select_option("Eyes")
        expect(page.locator("#draw")).to_be_hidden()
        expect(page.locator("#body")).to_have_value('{"inputs":["iris"]}')
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator("#answer h2")).to_have_text("1 item by rank 1/0")
    assert got == ["infer?model=Eyes"]


@pytest.mark.long
@pytest.mark.timeout(150)
@in_a_browser
def test_a_death_shows_and_so_does_the_end_of_the_service(browser: Browser) -> None:
    """A rank is killed: its lane goes down and comes back, the restart is counted. Then the service ends."""
    with serving("digits", ranks=2) as service, opened(browser, service) as page:
        lane = page.locator('[data-rank="1"]')
        expect(lane).to_have_attribute("data-state", "up")
        os.kill(service.pids()[1], signal.SIGKILL)
        expect(lane).to_have_attribute("data-state", "down")
        expect(page.locator("#state")).to_have_text("Not ready")
        expect(page.locator("#why")).to_contain_text(re.compile("its connection closed|no worker group"))
        expect(lane).to_have_attribute("data-state", "up", timeout=40_000)
        expect(lane).to_contain_text("epoch 2")
        expect(page.locator('[data-tile="Restarts"] b')).to_have_text("1")
        expect(page.locator('[data-tile="Restarts"]')).to_contain_text("1 rank died")
        expect(page.locator("#death")).to_contain_text("SIGKILL")
        expect(page.locator("#state")).to_have_text("Ready")
        assert service.stop() == 0
        expect(page.locator("#state")).to_have_text("No answer")
        expect(lane).to_have_attribute("data-state", "unknown")


@in_a_browser
def test_the_page_asks_for_a_key_and_refuses_a_wrong_one(browser: Browser, tmp_path: Path) -> None:
    """Without a group, so that it is quick: the page works all the same and says what is missing."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    service = Service("digits", verb="app", api_keys_file=keys)
    try:
        until(lambda: answers(service, "/livez") == 200)
        with opened(browser, service) as page:
            key = page.get_by_label("API key")
            for wrong in ("wrong", "schlüssel€"):
                key.fill(wrong)
                page.keyboard.press("Enter")
                expect(page.locator("#key-error")).to_have_text("The service does not know this key.")
                expect(page.locator("#main")).to_be_hidden()
            key.fill("secret")
            page.keyboard.press("Enter")
            expect(page.locator("#main")).to_be_visible()
            expect(page.locator("#lanes")).to_contain_text("None yet")
            expect(page.locator("#why")).to_contain_text("The worker group is starting")
            page.reload()
            expect(page.locator("#main")).to_be_visible()
            page.get_by_role("button", name="Forget the key").click()
            expect(key).to_be_focused()
            assert page.evaluate("sessionStorage.length") == 0
        assert service.stop() == 0
    finally:
        service.close()
