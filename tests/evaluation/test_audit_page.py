"""The page says what the audit found, escapes what others wrote, and needs nothing from elsewhere."""

import base64
import io
from html.parser import HTMLParser

import pytest
from PIL import Image

from revit.evaluation.audit_page import Picture, verdict_of
from tests.evaluation.pages import EVIL, make_audit, make_page

VOID = {"meta", "img", "source", "br"}


class Reader(HTMLParser):
    """Elements with their attributes, texts, and whether every element is closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open, self.rows, self.caption = [], [], [], {}, None
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.setdefault(self.caption, []).append([])
        if tag in ("th", "td"):
            self.rows[self.caption][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "caption" in self.open:
            self.caption = data
        elif {"th", "td"} & set(self.open):
            self.rows[self.caption][-1][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def read(path):
    return Reader(path.read_text(encoding="utf-8"))


def test_the_page_is_self_contained(tmp_path):
    page = read(make_page(tmp_path))
    assert not page.all("script") and not page.all("link") and not page.all("a") and not page.all("iframe")
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "srcset", "href"):
                assert value.startswith(("data:image/png;base64,", "data:image/gif;base64,"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")


def test_words_of_strangers_are_escaped_everywhere(tmp_path):
    path = make_page(tmp_path, verdict=EVIL)
    page, text = read(path), path.read_text(encoding="utf-8")
    assert "<script" not in text
    shown = "".join(page.texts)
    assert shown.count(EVIL) >= 7  # title twice, verdict, caption, stage, two facts
    broken = make_page(tmp_path, title="caf\udce9", facts={})
    assert "caf?" in broken.read_text(encoding="utf-8")


def test_pictures_are_inside_in_their_order_with_words_for_the_blind(tmp_path):
    page = read(make_page(tmp_path))
    images = page.all("img")
    assert [image["alt"] for image in images] == [f'It is "red" {EVIL}', "Navy", "Teal"]
    for image, name in zip(images, ("film.gif", "stages.png", "angles.png"), strict=True):
        content = base64.b64decode(image["src"].split(",")[1])
        assert content == (tmp_path / name).read_bytes()
        with Image.open(io.BytesIO(content)) as picture:
            assert picture.size == (int(image["width"]), int(image["height"]))
    (still,) = page.all("source")
    assert still["media"] == "(prefers-reduced-motion: reduce), print"
    with Image.open(io.BytesIO(base64.b64decode(still["srcset"].split(",")[1]))) as frame:
        assert frame.format == "PNG" and frame.getpixel((5, 5)) == (255, 0, 0)
    assert {f"A film of {EVIL}", "Stages", "Angles"} <= set(page.texts) and "Attention" not in page.texts


def test_the_tables_hold_the_numbers(tmp_path):
    page = read(make_page(tmp_path, audit=make_audit(error=0.125, kept=0.99999)))
    heads, *stages = page.rows["Errors of each stage, in the order of computation"]
    assert heads[0] == "stage" and len(stages) == 3
    assert stages[0] == ["lift (first that fails)", "features", "0.375 ± 0", "0.125", "0.25", "0.0312"]
    assert stages[2] == ["logits", "invariant", "0.375 ± 0", "0.125", "0.25", "–"]
    elements = page.rows["What each element of the group changes"][1:]
    assert elements[0] == ["0°", "identity", "100.00 %", "0", "0 (lift)"]
    assert elements[5] == ["mirror, then 90°", "exact", "99.99 %", "0.125", "0.125 (lift)"]
    answers = page.rows["Answers under turns that no group contains"][1:]
    assert answers[0] == ["random, full frame", "99.99 %", "0.0123", "0.001", "0.0456"]
    assert answers[1] == ["random, central disc only", "87.50 %", "not a number", "0.5", "0.75"]
    assert [row[0] for row in answers[2:]] == ["worst angle, full frame: 45°", "worst angle, central disc only: 90°"]
    assert all(scope in ("row", "col") for scope in (cell["scope"] for cell in page.all("th")))
    shown = "".join(page.texts)
    assert "64 images, each in 8 versions, turned by any angle and mirrored with probability 0.5 (seed 7)" in shown
    assert {"torch 2.6, python 3.11", "batch size", "28, 28", "135,324", "–"} <= set(page.texts)


def test_parts_that_were_not_measured_are_left_out(tmp_path):
    page = read(make_page(tmp_path, random=None, by_angle=None, pictures=[]))
    headings = [
        text for text in page.texts if text in ("Pictures", "Each stage", "Each turn", "Any angle", "How it was measured")
    ]
    assert headings == ["Each stage", "Each turn", "How it was measured"] and not page.all("img")


@pytest.mark.parametrize(
    ("audit", "options", "state"),
    [
        (make_audit(), {}, "✓ Passed"),
        (make_audit(error=0.1), {}, "✗ Failed"),
        (make_audit(), {"tolerance": 1e-9}, "✗ Failed"),
        (make_audit(error=0.1), {"tolerance": 0.5}, "✓ Passed"),
        (make_audit(error=0.1, claimed=()), {}, "✓ Passed"),
        (make_audit("p3", error=0.1), {}, "No exact element to decide by"),
        (make_audit("z2"), {}, "No exact element to decide by"),
    ],
)
def test_the_mark(audit, options, state, tmp_path):
    page = read(make_page(tmp_path, audit=audit, **options))
    assert page.texts[page.texts.index(verdict_of(audit)) - 1] == state


@pytest.mark.parametrize(
    ("audit", "verdict"),
    [
        (
            make_audit(),
            "Turning or mirroring an image never changed the answer (1,024 images, 7 turns and mirrors). "
            "Every stage of the model turns with the image, with an error of at most 5e-05.",
        ),
        (
            make_audit("p4", samples=1, claimed=("logits",)),
            "Turning an image never changed the answer (1 image, 3 turns). "
            "The output stays the same, with an error of at most 5e-05.",
        ),
        (
            make_audit("z2m", error=0.1, kept=0.5, names=("conv", "logits")),
            "Mirroring an image changed the answer in 512 of 1,024 cases, 50.00 % (1,024 images, 1 mirror). "
            "The model does not turn with the image; the first stage that fails is conv (largest error 0.2, allowed 5e-05).",
        ),
        (
            make_audit("p8", kept=1 - 1 / 1024),
            "Turning an image changed the answer in 7 of 7,168 cases, 0.10 % (1,024 images, 7 turns). "
            "Every stage of the model turns with the image wherever pixels move onto pixels, with an error of at most 5e-05.",
        ),
        (
            make_audit("p3", error=0.1),
            "Turning an image never changed the answer (1,024 images, 2 turns). "
            "No element of p3 moves pixels onto pixels, so every error contains that of interpolation.",
        ),
        (make_audit("z2"), "Nothing was turned: the group z2 has no element but the identity."),
    ],
    ids=str,
)
def test_the_verdict(audit, verdict):
    assert verdict_of(audit) == verdict


def test_messages(tmp_path):
    (tmp_path / "x.svg").write_text("<svg/>")
    with pytest.raises(ValueError) as error:
        make_page(tmp_path, pictures=[Picture(tmp_path / "x.svg", "", "")])
    assert str(error.value) == "x.svg: a page shows .png and .gif files, got '.svg'"
    assert not (tmp_path / "page.html").exists()
