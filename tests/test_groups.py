import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revit.groups import MAX_ORDER, Group

GROUPS = [Group(n, m) for n in (1, 2, 3, 4, 5, 6, 8, 12, 16) for m in (False, True)]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_group_axioms(group):
    product, elements = group.product, torch.arange(group.order)
    assert product.min() >= 0 and product.max() < group.order  # closure
    for a in elements:  # associativity, all triples at once for each a
        assert torch.equal(product[product[a]], product[a][product])
    assert torch.equal(product[0], elements) and torch.equal(product[:, 0], elements)  # identity
    assert torch.equal(product[elements, group.inverse], torch.zeros_like(elements))  # inverses
    assert torch.equal(product[group.inverse, elements], torch.zeros_like(elements))


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_matrices_are_a_faithful_representation(group):
    products = torch.einsum("aij,bjk->abik", group.matrix, group.matrix)
    torch.testing.assert_close(products, group.matrix[group.product], rtol=0, atol=1e-14)
    assert len({tuple(m.flatten().round(decimals=9).add(0.0).tolist()) for m in group.matrix}) == group.order
    determinants = torch.linalg.det(group.matrix)
    expected = torch.ones(group.order, dtype=torch.float64)
    expected[group.rotations :] = -1
    torch.testing.assert_close(determinants, expected)


def test_exact_matrices_hold_whole_numbers():
    assert torch.equal(Group.parse("p4m").matrix, Group.parse("p4m").matrix.round())


@given(st.integers(1, MAX_ORDER), st.booleans())
def test_names_round_trip(rotations, reflections):
    if rotations * (1 + reflections) > MAX_ORDER:
        return
    group = Group(rotations, reflections)
    assert Group.parse(str(group)) == group
    assert Group.parse(str(group).upper()) == group
    assert eval(repr(group).replace("Group(", "Group.parse(")) == group
    assert hash(group) == hash(Group(rotations, reflections))


@pytest.mark.parametrize(
    ("alias", "name"),
    [("C4", "p4"), ("D4", "p4m"), ("C_8", "p8"), ("D_1", "z2m"), ("c1", "z2"), ("p1", "z2"), ("P1M", "z2m"), (" Z2m ", "z2m")],
)
def test_aliases(alias, name):
    assert str(Group.parse(alias)) == name


def test_mirrors_are_asked_for():
    assert Group(4) == Group.parse("p4") and Group(4, reflections=True) == Group.parse("p4m")
    assert repr(Group(4)) == "Group('p4')"


def test_d2_says_which_group_it_is():
    with pytest.warns(UserWarning, match="p2m.*z2m"):
        assert Group.parse("D2") == Group(2, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q4", "unknown group 'q4'; try z2"),
        ("p4mm", "unknown group"),
        ("C4m", "unknown group"),
        ("", "unknown group ''"),
        ("p", "unknown group"),
        ("p-4", "unknown group"),
        ("p0", "no rotation"),
        ("p1000", r"p1000 has 1000 elements, at most 256 .* nearest that works is p256"),
        ("p200m", "nearest that works is p128m"),
        ("p99999999999999999999", "unknown group"),
        (4, "by its name or as a Group, got 4"),
    ],
)
def test_bad_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        Group.parse(name)


@pytest.mark.parametrize("rotations", [0, -1, 2.0, True, "4"])
def test_bad_rotation_counts_are_refused(rotations):
    with pytest.raises(ValueError, match="whole number of rotations"):
        Group(rotations)


def test_subgroups():
    p8 = Group.parse("p8")
    assert p8.elements_of("p4") == [0, 2, 4, 6]
    assert Group.parse("p4m").elements_of("z2m") == [0, 4]
    for group, subgroup in (("p8m", "p4m"), ("p12", "p4"), ("p4m", "p4"), ("p6m", "z2m")):
        big, small = Group.parse(group), Group.parse(subgroup)
        where = torch.tensor(big.elements_of(small))
        assert torch.equal(big.product[where][:, where], where[small.product])
    with pytest.raises(ValueError, match="p4m is not a subgroup of p8"):
        p8.elements_of("p4m")
    with pytest.raises(ValueError, match="p3 is not a subgroup of p8"):
        p8.elements_of("p3")


def test_exactness_and_names_of_elements():
    assert [str(g) for g in GROUPS if g.is_exact] == ["z2", "z2m", "p2", "p2m", "p4", "p4m"]
    assert [g for g in range(8) if Group.parse("p8").is_exact_element(g)] == [0, 2, 4, 6]
    assert [g for g in range(6) if Group.parse("p6").is_exact_element(g)] == [0, 3]
    p4m = Group.parse("p4m")
    assert [p4m.element_name(g) for g in (0, 1, 4, 6)] == ["0°", "90°", "mirror", "mirror, then 180°"]
    with pytest.raises(ValueError, match="elements 0 to 7, got 8"):
        p4m.split(8)
