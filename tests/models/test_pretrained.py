"""Saved and loaded models are the same to the bit; what cannot be loaded is refused by name; nothing is half written."""

import copy
import errno
import json
import os
import shutil
from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import revit
from revit.models import GCNN, REViT, create_model, from_pretrained, list_models, model_config, register_model, save_pretrained
from revit.models.card import ROWS, model_card
from revit.models.model_config import ModelConfig, PretrainedError
from revit.models.pretrained import Pretrained
from revit.weight_files import WeightFileError, precision, read_bytes
from tests.test_deploy import CASES, HIERARCHY, build

TINY = {"group": "p4", "in_chans": 1, "num_classes": 3, "dims": 4, "depths": 1, "num_heads": 1, "kernel_size": 3}
DATA = {
    "name": "toy",
    "classes": ["a", "b", "c"],
    "mean": [0.4],
    "std": [0.3],
    "size": [8, 8],
    "source": "made here",
    "centre": 1.0,
}


def tiny(**options):
    return create_model("revit_tiny", **{**TINY, **options}).eval()


@pytest.fixture
def saved(tmp_path):
    """A folder of a tiny model, to be damaged."""
    folder = tmp_path / "model"
    tiny().save_pretrained(folder, data=DATA)
    return folder


def change_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place, _, name = key.rpartition("__")
        (values[place] if place else values)[name] = value
    (folder / "config.json").write_text(json.dumps(values))


def change_tensors(folder, change, keep_metadata=True):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    metadata = {"format": "pt", "model": "revit_tiny", "group": "p4"} if keep_metadata else None
    save_file(tensors, folder / "model.safetensors", metadata)


def refusal(folder, **arguments):
    with pytest.raises(ValueError) as caught:
        from_pretrained(folder, **arguments)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900
    return text


@pytest.mark.parametrize("case", [*CASES, "segmentation"])
def test_round_trip_to_the_bit(case, tmp_path):
    """Every family: same logits, same keys in training and in evaluation, same random numbers afterwards."""
    if case == "segmentation":
        model, x = create_model("revit_seg_tiny", **HIERARCHY).eval(), torch.randn(2, 3, 32, 32)
    else:
        model, x = build(case, torch.float32)
    assert list(copy.deepcopy(model).train().state_dict()) == list(model.state_dict())
    model.train().save_pretrained(tmp_path / "model")
    state = torch.get_rng_state()
    loaded = from_pretrained(str(tmp_path / "model"))
    assert torch.equal(torch.get_rng_state(), state) and not loaded.training and type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(x), model.eval()(x))
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_registered_class_has_the_methods():
    kinds = {type(create_model(name, **options)) for name, options, _ in CASES.values()}
    assert all(issubclass(kind, Pretrained) for kind in (*kinds, revit.models.REViTSegmenter))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_is_kept(dtype, tmp_path):
    model = tiny().to(dtype)
    model.save_pretrained(tmp_path / "model")
    loaded = from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_facts_of_the_data_come_back(saved):
    model = from_pretrained(saved)
    assert model.config == ModelConfig("revit_tiny", TINY, DATA)
    model.save_pretrained(saved)  # replaces it, the facts are kept
    assert from_pretrained(saved).config.data == DATA
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: revit\n") and "3: a, b, c" in card and "None were given" in card
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model"]


def test_a_fresh_classifier_for_other_classes(saved):
    model, x = from_pretrained(saved, num_classes=5), torch.randn(2, 1, 8, 8)
    assert model(x).shape == (2, 5) and "classes" not in model.config.data and model.config.data["mean"] == [0.4]
    assert torch.equal(model.forward_features(x), from_pretrained(saved).forward_features(x))
    model.save_pretrained(saved)
    assert torch.equal(from_pretrained(saved)(x), model(x))
    model.reset_classifier(2)
    model.save_pretrained(saved)
    assert from_pretrained(saved).num_classes == 2


def test_options_that_weights_leave_free(saved):
    assert from_pretrained(saved, drop_rate=0.3, strict=False, group="C4", dims=4).drop_rate == 0.3
    assert "these weights have group='p4', got group='p4m'" in refusal(saved, group="p4m")
    assert "these weights have in_chans=1, got in_chans=3" in refusal(saved, in_chans=3)
    assert "no attention of their own, got attention='spatial'" in refusal(saved, attention="spatial")


def test_features_only(saved):
    x = torch.randn(2, 1, 8, 8)
    maps = from_pretrained(saved, features_only=True, out_indices=(0,))(x)
    assert torch.equal(maps[0], from_pretrained(saved).forward_features(x).flatten(1, 2))
    with pytest.raises(PretrainedError, match="FeatureMaps was not made by create_model"):
        save_pretrained(from_pretrained(saved, features_only=True), saved)


def test_classes_check_what_they_load(saved):
    assert isinstance(REViT.from_pretrained(saved), REViT)
    with pytest.raises(PretrainedError, match="holds a REViT, not a GCNN; use revit.from_pretrained"):
        GCNN.from_pretrained(saved)
    assert isinstance(create_model("revit_tiny", pretrained=saved), REViT)
    with pytest.raises(PretrainedError, match="holds weights of revit_tiny, not of revit_small"):
        create_model("revit_small", pretrained=saved)


def test_one_tensor_of_another_type_is_named_whichever_it_is(saved):
    """A file has its tensors in no order: what is asked of all is what most numbers are."""
    clean = shutil.copytree(saved, saved.with_name("clean"))
    for name, tensor in sorted(load_file(saved / "model.safetensors").items()):
        if tensor.is_floating_point():
            shutil.copyfile(clean / "model.safetensors", saved / "model.safetensors")
            change_tensors(saved, lambda t, name=name: t.update({name: t[name].half()}))
            expected = f"model.safetensors: {name} is of type torch.float16 instead of torch.float32"
            assert refusal(saved).endswith(expected)


def test_the_precision_of_weights_does_not_depend_on_their_order():
    tensors = {"steps": torch.tensor(3), "bias": torch.zeros(2), "weight": torch.zeros(4, 3, dtype=torch.float64)}
    assert {precision({name: tensors[name] for name in order}) for order in permutations(tensors)} == {torch.float64}
    assert precision({"steps": torch.tensor(3)}) == precision({}) == torch.float32


def test_wrong_keys_are_named(saved):
    clean = shutil.copytree(saved, saved.with_name("clean"))
    name = next(key for key in load_file(saved / "model.safetensors") if key.endswith("filters.weight"))
    for change, expected in (
        (lambda t: t.pop("head.fc.bias"), "model.safetensors: head.fc.bias is missing"),
        (lambda t: t.update(surplus=torch.zeros(1)), "model.safetensors: surplus is not of this model"),
        (lambda t: t.update({"head.fc.bias": torch.zeros(4)}), "head.fc.bias has shape [4] instead of [3]"),
        (lambda t: t.update({name: t[name].half()}), f"{name} is of type torch.float16 instead of torch.float32"),
        (lambda t: t[name].view(-1)[0].fill_(float("nan")), f"{name} holds NaN or infinity"),
        (lambda t: t.update({"a\x1b[2J\nb": torch.zeros(1)}), r"'a\x1b[2J\nb' is not of this model"),
        (lambda t: t.clear(), "is missing and "),
    ):
        shutil.copyfile(clean / "model.safetensors", saved / "model.safetensors")
        change_tensors(saved, change)
        assert expected in refusal(saved)
    shutil.copyfile(clean / "model.safetensors", saved / "model.safetensors")
    from_pretrained(saved)


def test_config_of_another_group(saved):
    """Also of one with as many elements, whose weights have the same shapes."""
    change_config(saved, options__group="p4m")
    assert "config.json is of the group p4m, the weights are of p4" in refusal(saved)
    change_config(saved, options__group="p2m")
    assert "config.json is of the group p2m, the weights are of p4" in refusal(saved)
    change_tensors(saved, lambda tensors: None, keep_metadata=False)
    from_pretrained(saved)  # files of other tools do not say: shapes alone count
    change_config(saved, options__group="p4m")
    assert "filters.weight has shape" in refusal(saved)


HOSTILE = {
    "another library": ({"library_name": "timm"}, "not the config of a model of revit"),
    "another version": ({"format": 7}, "of format 7, this version reads 1"),
    "unknown model": ({"model": "revit_huge"}, "unknown model 'revit_huge'"),
    "no name": ({"model": "a\x1b[2J"}, "not the config of a model of revit"),
    "no name of an option": ({"options__a\nb": 1}, r"no option of a model: 'a\nb'=1"),
    "no model": ({"model": ["revit_tiny"]}, "not the config of a model of revit"),
    "unknown option": ({"options__colour": 3}, "unexpected keyword argument 'colour'"),
    "no option": ({"options__dims": {"a": 1}}, "no option of a model: dims"),
    "reserved option": ({"options__features_only": True}, "unexpected keyword argument 'features_only'"),
    "endless list": ({"options__depths": [1] * 100}, "no option of a model: depths"),
    "a huge number": ({"options__dims": 10**12}, "no option of a model: dims"),
    "not a number": ({"options__drop_rate": float("nan")}, "no option of a model: drop_rate"),
    "too wide": ({"options__dims": 90_000}, "a model much larger than the weights"),
    "too deep": ({"options__depths": 90_000}, "a model much larger than the weights"),
    "large kernels": ({"options__kernel_size": 9_999}, "a model much larger than the weights"),
    "too many classes": ({"options__num_classes": 100_000}, "data.classes must be 100000 different names"),
    "no group": ({"options__group": "q7"}, "is of the group q7, the weights are of p4"),
    "classes twice": ({"data__classes": ["a", "a", "b"]}, "data.classes must be 3 different names"),
    "normalisation": ({"data__std": [0.0]}, "data.std must be 1 finite numbers above 0"),
    "channels": ({"data__mean": [0.1, 0.2]}, "data.mean must be 1 finite numbers"),
    "size": ({"data__size": [8]}, "data.size must be a height and a width"),
    "data": ({"data": "none"}, "data is no description of images"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configs(case, saved):
    changes, expected = HOSTILE[case]
    change_config(saved, **changes)
    text = refusal(saved)
    assert expected in text and "config.json" in text, text


def test_damaged_files(saved, tmp_path, monkeypatch):
    config, weights = saved / "config.json", saved / "model.safetensors"
    whole, tensors = config.read_text(), weights.read_bytes()
    for content in ("", "{", "[1]", "[" * 100_000, '{"a": ' + "9" * 10_000 + "}"):
        config.write_text(content)
        assert "config.json: damaged" in refusal(saved)
    config.write_text(whole)
    huge = (2**62).to_bytes(8, "little")
    for content in (b"", tensors[:-1], tensors + b"x", tensors[:40], huge + tensors[8:], b"\x80\x04pickle"):
        weights.write_bytes(content)
        assert "model.safetensors: no whole safetensors file" in refusal(saved)
    weights.unlink()
    assert "model.safetensors: cannot be read (No such file or directory)" in refusal(saved)
    os.mkfifo(weights)
    assert "model.safetensors: not a file" in refusal(saved)
    config.unlink()
    assert "config.json: cannot be read" in refusal(saved)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(11)
    with pytest.raises(WeightFileError, match="large: 11 bytes, at most 10 are read"):
        read_bytes(tmp_path / "large", 10)
    monkeypatch.setattr("revit.models.pretrained.MAX_TENSOR_BYTES", 100)
    weights.unlink()
    weights.write_bytes(tensors)
    config.write_text(whole)
    assert "model.safetensors: " in refusal(saved) and "at most 100 are read" in refusal(saved)


def test_nothing_half_written(saved, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for folder in (saved, tmp_path / "new"):
        with pytest.raises(PretrainedError, match="cannot be written .No space left on device.; nothing was changed"):
            tiny().save_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_folders_of_others_are_left_alone(saved, tmp_path):
    (saved / "thesis.tex").write_text("years of work")
    with pytest.raises(PretrainedError, match="holds thesis.tex, which is no part of a model; choose another folder"):
        tiny().save_pretrained(saved)
    with pytest.raises(PretrainedError, match="holds config.json, which is no part of a model"):
        tiny().save_pretrained(saved / "config.json")
    (tmp_path / "empty").mkdir()
    tiny().save_pretrained(tmp_path / "empty")


def test_what_cannot_be_loaded_again_is_not_saved(tmp_path):
    with pytest.raises(PretrainedError, match="this REViT was not made by create_model"):
        REViT(group="p4", dims=4, depths=1).save_pretrained(tmp_path / "model")
    with pytest.raises(PretrainedError, match=r"not as create_model makes it \(deployed, pruned, diverged\?\): revit_tiny: "):
        tiny().deploy().save_pretrained(tmp_path / "model")
    with pytest.raises(PretrainedError, match="data.classes must be 3 different names"):
        tiny().save_pretrained(tmp_path / "model", data={"classes": ["a"]})
    with pytest.raises(PretrainedError, match="cannot be described in JSON"):
        tiny().save_pretrained(tmp_path / "model", data={"name": nn.Identity})
    assert not list(tmp_path.iterdir())


def test_models_of_users(tmp_path, monkeypatch):
    monkeypatch.setattr("revit.models.registry._MODELS", dict(revit.models.registry._MODELS))

    @register_model
    def mine(**options):
        return create_model("gcnn_rotmnist", **options)

    model = create_model("mine", group="p4", dims=2)
    model.save_pretrained(tmp_path / "model")
    assert from_pretrained(tmp_path / "model").config.model == "mine"


def test_weights_of_the_package(tmp_path, monkeypatch):
    """A folder below `revit/weights` is a model: by its name, offline, strictly; without weights it has fresh ones."""
    monkeypatch.setattr(model_config, "WEIGHTS", tmp_path)
    with pytest.raises(PretrainedError, match="no weights of 'revit_small' come with the package; with weights: none"):
        create_model("revit_small", pretrained=True)
    model, x = tiny(), torch.randn(2, 1, 8, 8)
    model.save_pretrained(tmp_path / "revit_toy_p4", data=DATA)
    (tmp_path / "README.md").write_text("no model")
    assert list_models(pretrained=True) == ["revit_toy_p4"] and "revit_toy_p4" not in list_models()
    loaded = create_model("revit_toy_p4", pretrained=True)
    assert torch.equal(loaded(x), model(x)) and loaded.config.data == DATA and not loaded.training
    fresh = create_model("revit_toy_p4", num_classes=7)
    assert fresh.num_classes == 7 and fresh.training and fresh.config.model == "revit_tiny"
    assert create_model("revit_toy_p4", pretrained=True, num_classes=7).num_classes == 7
    maps = create_model("revit_toy_p4", pretrained=True, features_only=True)(x)
    assert torch.equal(maps[0], model.forward_features(x).flatten(1, 2))
    with pytest.raises(PretrainedError, match="no weights of 'revit_small' come with the package; with weights: revit_toy_p4"):
        create_model("revit_small", pretrained=True)
    with pytest.raises(PretrainedError, match="these weights have group='p4', got group='p4m'"):
        create_model("revit_toy_p4", pretrained=True, group="p4m")
    with pytest.raises(ValueError, match="unknown model '../revit_toy_p4'"):
        create_model("../revit_toy_p4")
    change_tensors(tmp_path / "revit_toy_p4", lambda tensors: tensors.pop("head.fc.bias"))
    with pytest.raises(PretrainedError, match="head.fc.bias is missing"):
        create_model("revit_toy_p4", pretrained=True)


def test_the_weights_of_the_package_load():
    for name in list_models(pretrained=True):
        model = create_model(name, pretrained=True)
        assert model.config.data is not None and "classes" in model.config.data, name
        folder = model_config.shipped_folder(name)
        assert sum(path.stat().st_size for path in folder.iterdir()) < 2e6, f"{name} is too large for the package"
        assert "Written from the results of the run" in (folder / "README.md").read_text()


def test_card_shows_results_and_hides_the_machine():
    hostile = {**DATA, "classes": ["<script>x</script>", "a|b\nc", "`d`"]}
    results = dict.fromkeys(ROWS, 0.5) | {
        "command": "revit train x --data-root /home/me/data --out=/secret/run", "versions": {"torch": "2"}, "commit": "abc",
    }  # fmt: skip
    card = model_card(ModelConfig("revit_tiny", TINY, hostile), 1234, results)
    assert "| test accuracy | 50.00% |" in card and "`revit train x --data-root data --out=run`, commit abc" in card
    assert not any(bad in card for bad in ("<", ">", "/home", "/secret", "a|b", "`d`"))
    assert "rotations of `p4`" in card and "1,234" in card
    for group, words in (("p4m", "rotations and mirrors of `p4m`"), ("z2", "equivariant to nothing")):
        assert words in model_card(ModelConfig("revit_tiny", {**TINY, "group": group}), 1, None)
