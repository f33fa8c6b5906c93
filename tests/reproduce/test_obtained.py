"""What the result files say must be what the documents claim: exact where it can be, broken where it is."""

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results").glob("equivariance-*.json"))
EQUIVARIANT = [path for path in FILES if "_vit-" not in path.name and "_released-" not in path.name]


def read(path):
    return json.loads(path.read_text())


def exact_errors(audit):
    """The relative error of every stage under every element, but the identity, that moves pixels onto pixels."""
    exact = [g for g in range(1, len(audit["elements"])) if audit["exact"][g]]
    return {name: [stage["relative"][g] for g in exact] for name, stage in audit["stages"].items()}


def test_the_protocol_was_run_on_all_datasets_with_random_and_trained_weights():
    found = {(path.name.split("-")[1], path.name.split("-")[3]) for path in FILES}
    for recipe in (
        "rotmnist_p4",
        "cifar10_p4",
        "cifar10_p4m",
        "pcam_p4",
        "pcam_p4m",
        "pcam_p4_ds1",
        "imagenet_p4",
        "imagenet_p4m",
    ):
        assert {(recipe, "random"), (recipe, "trained")} <= found, recipe


@pytest.mark.parametrize("path", EQUIVARIANT, ids=lambda path: path.stem)
def test_exact_elements_are_exact_at_every_stage(path):
    facts = read(path)
    assert facts["samples"] == (1000 if "imagenet" in path.name else 1024)
    errors = exact_errors(facts["audit"])
    assert {"lift", "pre_class", "logits"} <= set(errors)
    assert max(max(values) for values in errors.values()) <= 5e-6


@pytest.mark.parametrize("path", [path for path in FILES if "_released-" in path.name], ids=lambda path: path.stem)
def test_the_released_strides_are_not(path):
    assert max(map(max, exact_errors(read(path)["audit"]).values())) > 1e-2


@pytest.mark.parametrize("path", [path for path in FILES if "_vit-" in path.name], ids=lambda path: path.stem)
def test_a_plain_transformer_is_not(path):
    assert min(exact_errors(read(path)["audit"])["pre_class"]) > 1e-2


@pytest.mark.parametrize(
    "path", [path for path in EQUIVARIANT if "-p8-" in path.name or "-p12-" in path.name], ids=lambda path: path.stem
)
def test_the_spread_over_elements_tells_how_many_are_exact(path):
    """Three exact elements of seven (p8) or eleven (p12): deviation / mean is sqrt(3/4) or sqrt(3/8)."""
    audit = read(path)["audit"]
    expected = math.sqrt(3 / (len(audit["elements"]) - 4))
    stage = audit["stages"]["lift"]
    assert stage["absolute_std"] / stage["absolute_mean"] == pytest.approx(expected, abs=0.02)
