"""Turning one image by hand: the turn is the group's, the answer stays where it must, and the page is safe to look at."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

import revit
from revit.data import BadImage, DataSpec
from revit.data.image_files import ImageBytes
from revit.evaluation.playground import (
    Player,
    answer_html,
    ask,
    fit_picture,
    message_html,
    page_html,
    promise,
    read_picture,
    turn_picture,
)
from revit.groups import Group

SPEC = DataSpec("toys", 1, (16, 16), ("<script>alert(1)</script>", "${evil}", "c"), (0.4,), (0.3,), "made here")


def player(name="revit_tiny", group="p4m", **arguments):
    torch.manual_seed(0)
    sizes = {"dims": 4, "depths": 1, "num_heads": 1} if name == "revit_tiny" else {"img_size": 16, **arguments}
    model = revit.create_model(name, group=group, in_chans=1, num_classes=3, **sizes).double().eval()
    return Player(name, model, SPEC, Group.parse(group))


def picture(seed=0):
    return fit_picture(np.random.default_rng(seed).integers(0, 256, (3, 20, 16), dtype=np.uint8), SPEC).double()


@pytest.mark.parametrize("element", range(8))
def test_quarter_turns_and_mirrors_are_those_of_the_group(element):
    x, group = torch.randn(2, 3, 5, 6), Group.parse("p4m")
    r, mirrored = group.split(element)
    assert torch.equal(turn_picture(x, 90 * r, mirrored), revit.act_on_plane(x, group, element))


def test_other_angles_are_those_of_the_group_too():
    x = torch.randn(1, 1, 9, 9, dtype=torch.float64)
    assert torch.allclose(turn_picture(x, 225, False), revit.act_on_plane(x, "p8", 5), atol=1e-12)


@pytest.mark.parametrize("element", range(8))
def test_answers_stay_and_features_turn(element):
    """Two rows of features: what the model finds in the turned image, and the turned features of the upright one."""
    ours, (r, mirrored) = player(), Group.parse("p4m").split(element)
    upright, answer = ask(ours, picture(), 0, False), ask(ours, picture(), 90 * r, mirrored)
    assert answer.stays and answer.change < 1e-10 and answer.prediction == upright.prediction
    half = (len(answer.features) - 6) // 2
    assert np.array_equal(answer.features[:half], answer.features[-half:])
    assert element == 0 or not np.array_equal(answer.features, upright.features)
    plane = torch.from_numpy(upright.image).movedim(-1, 0)
    assert np.array_equal(answer.image, revit.act_on_plane(plane, "p4m", element).movedim(0, -1))


def test_a_plain_vit_changes():
    plain = player("vit_tiny", "z2", patch_size=4)
    answer = ask(plain, picture(), 90, False)
    half = (len(answer.features) - 6) // 2
    assert answer.change > 1e-3 and not np.array_equal(answer.features[:half], answer.features[-half:])
    assert ask(plain, picture(), 0, False).change == 0


def test_bars_are_the_softmax_of_the_model():
    ours, x = player(), picture()
    answer = ask(ours, x, 30, True)
    black = (0 - 0.4) / 0.3
    with torch.no_grad():
        expected = ours.model(turn_picture(x, 30, True, black))[0].softmax(0)
    assert dict(answer.bars) == pytest.approx({name: float(p) for name, p in zip(SPEC.classes, expected, strict=True)})
    assert [share for _, share in answer.bars] == sorted(expected.tolist(), reverse=True)


def test_masks_have_shares_and_turn():
    torch.manual_seed(0)
    model = revit.create_model(
        "revit_seg_tiny", group="p4", in_chans=1, num_classes=3, dims=(4, 8), depths=(1, 1), num_heads=(1, 1), kernel_size=3
    ).double()
    answer = ask(Player("masks", model, SPEC, Group.parse("p4")), picture(), 90, False)
    assert sum(share for _, share in answer.bars) == pytest.approx(1) and answer.change < 1e-10


@pytest.mark.parametrize(
    ("group", "degrees", "mirrored", "expected"),
    [
        ("p4m", 0, False, "the image as it is"),
        ("p4m", 0, True, "a mirror is in p4m, pixels move onto pixels: the answer must stay"),
        ("p4", 90, False, "a turn by 90° is in p4, pixels move onto pixels: the answer must stay"),
        ("p4", 90, True, "a mirror and a turn by 90° is not in p4: it owes nothing"),
        ("p8", 45, False, "a turn by 45° is in p8, pixels fall between pixels: the answer should stay, nearly"),
        ("p4m", 45, False, "a turn by 45° is not in p4m: it owes nothing"),
        ("z2m", 360, True, "a mirror is in z2m, pixels move onto pixels: the answer must stay"),
        ("z2", 90, False, "no symmetry: it owes nothing"),
    ],
)
def test_promises(group, degrees, mirrored, expected):
    assert promise(Group.parse(group), degrees, mirrored) == expected


def test_names_of_others_are_text():
    ours = player()
    html = answer_html(ours, ask(ours, picture(), 90, False), 90, False, role="ours")
    assert "<script>" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert message_html("<img src=x>\nb") == '<p class="message" role="alert">&lt;img src=x&gt; b</p>'


def test_the_page_has_its_pictures_inside():
    html = page_html([player(), player("vit_tiny", "z2", patch_size=4)], [picture(), picture()], 45, True)
    sources = re.findall(r'src="([^"]*)"', html)
    assert len(sources) == 3 and all(source.startswith("data:image/png;base64,") for source in sources)
    shown = Image.open(io.BytesIO(base64.b64decode(sources[0].partition(",")[2])))
    assert shown.size == (16, 16) and "turned by 45°, mirrored first" in html


def test_images_of_others_are_read_with_our_limits():
    file = io.BytesIO()
    Image.fromarray(np.full((40, 30, 3), 128, np.uint8)).save(file, "PNG")
    x = read_picture(ImageBytes(file.getvalue(), "grey.png"), SPEC)
    assert x.shape == (1, 1, 16, 16) and torch.allclose(x, torch.tensor((128 / 255 - 0.4) / 0.3))
    with pytest.raises(BadImage, match=r"^bad.png: damaged.*"):
        read_picture(ImageBytes(file.getvalue()[:60], "bad.png"), SPEC)
    bomb = b"P6 100000 100000 255\n" + b"0" * 100
    with pytest.raises(BadImage, match=r"^bomb: .*too many"):
        read_picture(ImageBytes(bomb, "bomb"), SPEC)


def test_a_model_of_other_classes_is_refused():
    model = revit.create_model("revit_tiny", in_chans=1, num_classes=5, dims=4, depths=1, num_heads=1)
    with pytest.raises(ValueError, match=r"five: toys has 3 classes, the model returns shape \[1, 5\]"):
        Player("five", model, SPEC, Group.parse("p4"))
