"""Recipes: every one of the package is whole, trainable and of the size it says; wrong ones are named."""

import re
from contextlib import nullcontext

import pytest

from revit.data import DataSpec, list_datasets
from revit.data.spec import DataOptions
from revit.training.recipe import Recipe, RecipeError, TrainOptions, differences, list_recipes, read_recipe


def write(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def test_every_trainable_row_has_a_recipe():
    names = set(list_recipes())
    rows = {
        *(f"rotmnist_{group}" for group in ("z2", "p4", "p8", "p12", "p16", "p4_44k", "p8_44k")),
        *(f"rotmnist_p4_kernel{kernel}" for kernel in (3, 7, 9, 11)),
        *(f"pcam_{group}" for group in ("z2", "p4", "p8", "p4m")),
        *(f"cifar10_{group}" for group in ("z2", "z2m", "p4m")),
        "imagenet_p4m",
        "imagenet_p4m_shards",
        *(f"rotmnist_{group}_cnn" for group in ("z2", "p4", "p8")),
        *(f"cifar10_{group}_cnn" for group in ("z2", "z2m", "p4m")),
        *(f"pcam_{group}_cnn" for group in ("z2", "p4", "p4m")),
        *("cifar10_p4", "cifar10_p8", "imagenet_p4", "imagenet_p8"),  # for the equivariance tables alone
        *(f"pcam_{group}_ds1" for group in ("p4", "p4m", "p8")),
        *("rotmnist_p12_cnn", "cifar10_p4_cnn", "cifar10_p8_cnn", "pcam_p8_cnn"),
        *("pcam_p4_released", "pcam_p4m_released", "imagenet_p4_released"),
        *("rotmnist_vit", "rotmnist_vit_aug", "rotmnist_cvt_aug", "cifar10_vit", "pcam_vit", "imagenet_vit_s"),
        *("rotmnist_z2_sa", "rotmnist_p4_sa", "rotmnist_p8_sa"),
        *("pcam_z2_sa", "pcam_p4_sa", "pcam_p8_sa", "pcam_p4m_sa"),
        *("rotmnist_p4_alpha", "pcam_p4_alpha", "pcam_p4m_alpha", "rotmnist_p4_resnet", "imagenet_p4m_resnet"),
    }
    assert names == rows | {"demo", "folder", "segmentation", "rotmnist_p4_fast", "rotmnist_p4_joint", "rotmnist_p4_long"}
    assert all(description for description in list_recipes().values())


def test_a_base_gives_what_is_not_said_again(tmp_path):
    first = write(tmp_path, "model: {group: p8, dims: 4}\ntrain: {epochs: 2}", "first.yaml")
    second = write(tmp_path, f"base: {first}\nmodel: {{dims: 6}}\ndata: {{name: folder}}")
    assert read_recipe(second) == {
        "model": {"group": "p8", "dims": 6}, "train": {"epochs": 2}, "data": {"name": "folder"},
    }  # fmt: skip


def test_yaml_round_trip(tmp_path):
    recipe = Recipe(train=TrainOptions(lr=0.1), data=DataOptions(name="folder"))
    path = write(tmp_path, recipe.to_yaml())
    assert read_recipe(path) == recipe.to_dict()


def test_differences_name_the_options():
    before, after = Recipe().to_dict(), Recipe(train=TrainOptions(lr=0.1, save_seconds=1)).to_dict()
    assert differences(before, after, ignored=frozenset({"train.save_seconds"})) == ["train.lr (0.003, now 0.1)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: {group: p4}", "unknown section 'modle'; did you mean model?"),
        ("model: p4", "section 'model' must hold options, got 'p4'"),
        ("- a\n- b", "a recipe has the sections model, data, augment, train"),
        ("model: {group: [", "not YAML"),
        ("", "a recipe has the sections"),
        ("train: {lr: !!bool maybe}", "not YAML"),
        ("train: {lr: !!timestamp soon}", "not YAML"),
        ("train: {start: 2001-99-99}", "not YAML"),
        ("base: [demo]\nmodel: {}", "base names a recipe, got ['demo']"),
        ("model: !!python/object/apply:os.system ['touch {canary}']", "not YAML"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    canary = tmp_path / "canary"
    path = write(tmp_path, text.replace("{canary}", str(canary)))
    with pytest.raises(RecipeError, match=re.escape(str(path)) + ".*" + re.escape(message)) as error:
        read_recipe(path)
    assert "\n" not in str(error.value)
    assert not canary.exists()


@pytest.mark.parametrize("text", ["model: {dims: &a [*a]}", "model: {group: &a {b: *a}}"])
def test_aliases_that_grow_like_a_bomb(tmp_path, text):
    """Two aliases on each of 1,100 levels are more values than a float can count; an alias in itself has no end."""
    lines = ["- &a0 [x, x]", *(f"- &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 1100))]
    for recipe in ("train: {lr: 1}\nmodel:\n" + "\n".join(lines), text):
        with pytest.raises(RecipeError, match="more than 10,000 values"):
            read_recipe(write(tmp_path, recipe))


def test_a_recipe_that_is_its_own_base(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text(f"base: {path}")
    with pytest.raises(RecipeError, match="is its own base"):
        read_recipe(path)


def test_names_too_long_for_a_file(tmp_path):
    with pytest.raises(RecipeError, match="unknown recipe 'aaaa"):
        read_recipe(write(tmp_path, f"base: {'a' * 5000}"))


def test_unknown_recipes_get_the_nearest_names():
    with pytest.raises(RecipeError, match="unknown recipe 'rotmnist_p5'; did you mean .*rotmnist_p"):
        read_recipe("rotmnist_p5")
    with pytest.raises(RecipeError, match="unknown recipe '../recipes/demo'"):
        read_recipe("../recipes/demo")


def test_missing_and_oversized_files(tmp_path):
    with pytest.raises(RecipeError, match=r"none.yaml: cannot be read \(No such file or directory\)"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="larger than any recipe"):
        read_recipe(write(tmp_path, "#" * 1_000_001))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "train.epochs must be at least 1, got 0"),
        ({"lr": 0.0}, "train.lr must be above 0, got 0.0"),
        ({"lr": float("nan")}, "train.lr must be above 0, got nan"),
        ({"schedule": "step"}, "train.schedule must be onecycle, cosine, constant, got 'step'"),
        ({"precision": "fp8"}, "train.precision must be float32, bf16, float64, got 'fp8'"),
        ({"ema": 1.0}, r"train.ema must be in \[0, 1\), got 1.0"),
        ({"accumulate": 65}, r"train.accumulate \(65\) is larger than the batch \(64\)"),
        ({"clip": -1}, "train.clip must be 0 or more"),
    ],
)
def test_wrong_training_options_are_named(options, message):
    with pytest.raises(RecipeError, match=message):
        TrainOptions(**options)


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_recipes_build_their_model_and_their_size(name):
    """The parameters that the description states, and an exact model at the size of the data."""
    from revit.cli.parser import Parser
    from revit.cli.runs import build_model

    parser = Parser("train", "", "")
    parser.add_argument("recipe", type=str)
    parser.add_recipe_options()
    _, recipe = parser.read_recipe_options(name, [name])
    assert recipe.data.name in list_datasets()
    channels, size, classes = {
        "rotmnist": (1, 28, 10), "rotmnist5k": (1, 28, 10), "cifar10": (3, 32, 10), "pcam": (3, 96, 2),
        "imagenet": (3, 224, 1000), "shards": (3, 224, 1000), "folder": (3, 96, 2),
        "masks": (3, 64, 3),
    }[recipe.data.name]  # fmt: skip
    spec = DataSpec(
        recipe.data.name,
        channels,
        (size, size),
        tuple(map(str, range(classes))),
        (0.5,) * channels,
        (0.5,) * channels,
        "made here",
        task="segmentation" if recipe.data.name == "masks" else "classification",
    )
    with pytest.warns(UserWarning, match="not p4m? equivariant") if "released" in name else nullcontext():
        model = build_model(recipe.model, spec)
    stated = re.search(r"\(.*?([\d.]+)([KM]) (?:parameters|here)\)", list_recipes()[name])
    if stated:
        size = float(stated[1]) * {"K": 1e3, "M": 1e6}[stated[2]]
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(size, rel=0.06), f"{count:,}"
