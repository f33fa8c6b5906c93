"""The page in a real browser, without a network: nothing fails, everything is seen, nothing hangs over the edge."""

import pytest

from tests.evaluation.pages import make_audit, make_page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page(browser, width, scheme, tmp_path):
    long = "stages.0." + "very_long_name_without_a_break" * 5
    path = make_page(tmp_path, audit=make_audit(error=0.1, names=(long, "logits")))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_offline(True)
    page, trouble, requests = context.new_page(), [], []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("requestfailed", lambda request: trouble.append(request.url[:100]))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    images = page.locator("img")
    assert images.count() == 3
    for i in range(3):
        images.nth(i).scroll_into_view_if_needed()
        assert images.nth(i).is_visible()
        assert images.nth(i).evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.querySelectorAll('main > *')].every(e => e.getBoundingClientRect().right <= innerWidth)")
    assert page.locator("h1").inner_text().startswith("Audit of <script>") and page.locator("script").count() == 0
    ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    assert (ink, paper) == {
        "light": ("rgb(26, 26, 26)", "rgb(255, 255, 255)"),
        "dark": ("rgb(234, 234, 234)", "rgb(22, 24, 27)"),
    }[scheme]
    assert trouble == [] and all(url.startswith(("file:", "data:")) for url in requests)
    context.close()


def test_no_motion_for_those_who_ask(browser, tmp_path):
    """The film becomes its first frame for readers who want no motion; tables do not scroll on paper."""
    context = browser.new_context(reduced_motion="reduce", offline=True)
    page = context.new_page()
    page.goto(make_page(tmp_path).as_uri())
    assert page.locator("img").first.evaluate("image => image.currentSrc").startswith("data:image/png")
    page.emulate_media(media="print")
    assert page.locator(".wide").first.evaluate("e => getComputedStyle(e).overflowX") == "visible"
    context.close()
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("img").first.evaluate("image => image.currentSrc").startswith("data:image/gif")
    context.close()
