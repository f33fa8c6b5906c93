"""The page of `revit demo` in a real browser: turned by hand, the answer of our model stays; nothing comes from elsewhere."""

import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="needs gradio")


@pytest.fixture(scope="module")
def address():
    """The page of a process of its own, which ends as it should at Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "revit", "demo", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert f"http://127.0.0.1:{port}" in line, process.stderr.read()
        yield line.split()[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


class Turned:
    """The page, and what a visitor does there."""

    def __init__(self, browser, address, width):
        self.context = browser.new_context(viewport={"width": width, "height": 1000})
        self.page, self.trouble, self.foreign = self.context.new_page(), [], []
        self.page.on("console", lambda message: self.trouble.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else self.foreign.append(r.url))
        self.page.goto(address)
        self.wait("turned by 0°")

    def wait(self, text):
        self.page.locator("#answers").get_by_text(text, exact=True).wait_for(timeout=60_000)

    def slide(self, degrees):
        self.page.locator("#degrees input[type=range]").evaluate(
            """(slider, value) => { slider.value = value; slider.dispatchEvent(new Event("input", { bubbles: true })) }""",
            str(degrees),
        )
        self.wait(
            f"turned by {degrees}°" + (", mirrored first" if self.page.get_by_label("Mirror it first").is_checked() else "")
        )

    def choose(self, model):
        self.page.get_by_label("Model").click()
        self.page.get_by_role("option", name=model).click()
        self.page.locator("#answers section.ours h3").get_by_text(model).wait_for(timeout=60_000)

    def read(self, role, part="prediction"):
        return self.page.locator(f"#answers section.{role} .{part}").inner_text()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_answer_stays_while_the_image_is_turned(browser, address, width, tmp_path):
    visit = Turned(browser, address, width)
    page, ours = visit.page, visit.read("ours")
    assert re.fullmatch(r"\d, [\d.]+ %", ours) and "revit_rotmnist_p4, trained" in page.locator("#answers").inner_text()
    for degrees in (90, 180, 270, 0):
        visit.slide(degrees)
        assert visit.read("ours") == ours and visit.read("ours", "verdict") == "stays"
    visit.choose("revit_tiny p4m, random weights")
    ours, plain = visit.read("ours"), {visit.read("plain")}
    assert re.fullmatch(r"class \d, [\d.]+ %", ours)
    for degrees in (90, 180, 270):
        visit.slide(degrees)
        assert visit.read("ours") == ours and visit.read("ours", "verdict") == "stays"
        plain.add(visit.read("plain"))
    page.get_by_label("Mirror it first").check()
    visit.wait("turned by 270°, mirrored first")
    assert visit.read("ours") == ours and "p4m" in visit.read("ours", "promise")
    assert len(plain) == 4  # the plain ViT says something else each time
    visit.slide(45)
    assert "not in p4m" in visit.read("ours", "promise")
    if width == 1280:  # a hand on the slider itself
        slider = page.locator("#degrees input[type=range]")
        slider.focus()
        page.keyboard.press("ArrowRight")
        visit.wait("turned by 50°, mirrored first")
    images = page.locator("#answers img")
    assert images.count() == 3 and all(
        images.nth(i).evaluate("i => i.decode().then(() => i.naturalWidth)") > 0 for i in range(3)
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / f"demo_{width}.png", full_page=True)
    assert visit.trouble == [] and visit.foreign == []
    visit.context.close()


def test_images_of_others(browser, address, tmp_path):
    """A picture is shown, one that cannot be decoded gets a message, and the page goes on."""
    visit = Turned(browser, address, 1280)
    before = visit.read("ours")
    (tmp_path / "<b>broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)).save(tmp_path / "photo.png")
    drop = visit.page.locator("#file input[type=file]")
    drop.set_input_files(tmp_path / "<b>broken.png")
    alert = visit.page.locator("#answers [role=alert]")
    alert.wait_for(timeout=60_000)
    assert "broken.png" in alert.inner_text() and "damaged" in alert.inner_text()
    visit.page.get_by_role("button", name="Another of ours").click()
    visit.wait("turned by 0°")
    drop.set_input_files(tmp_path / "photo.png")
    visit.page.wait_for_function(
        "text => document.querySelector('#answers .ours .prediction')?.innerText != text", arg=before, timeout=60_000
    )
    assert alert.count() == 0 and visit.foreign == []
    visit.context.close()


def test_a_port_in_use_is_one_line(address):
    command = [sys.executable, "-m", "revit", "demo", "--port", address.rstrip("/").rpartition(":")[2]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(
        r"error: port \d+ cannot be used \(Address already in use\); choose another with --port\n", result.stderr
    )
