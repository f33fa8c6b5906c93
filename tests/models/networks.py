"""What the tests of all models ask of a network."""

import re
import warnings

import torch
import torch.nn.functional as F

from revit.actions import act_on_features, act_on_plane

GENERATORS = {"z2": [0], "z2m": [0, 1], "p4": [1], "p4m": [1, 4]}


def count(model):
    return sum(p.numel() for p in model.parameters())


def relative_errors(model, x, group, elements):
    """Largest relative error of features and logits over elements, from separate passes (train mode keeps its own batch)."""
    upright = model.named_features(x)
    worst = dict.fromkeys(("lift", "pre_class", "logits"), 0.0)
    for g in elements:
        turned = model.named_features(act_on_plane(x, group, g).contiguous())
        for name in worst:
            expected = upright[name] if name == "logits" else act_on_features(upright[name], group, g)
            error = (turned[name] - expected).abs().max() / expected.abs().max()
            worst[name] = max(worst[name], error.item())
    return worst


def warmed(model, size):
    """The model in float64, in eval mode, with running statistics of a batch of two images like the one returned."""
    model = model.double()
    x = torch.randn(2, model.in_chans, *size, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    return model.eval(), x


def assert_exact(make, group, sizes, *, in_training):
    """Features and logits of what `make` makes turn to 1e-10 at each size; at one of them in training mode too."""
    for size in sizes:
        model, x = warmed(make(), size)
        with torch.no_grad():
            for training in (False, True) if size == in_training else (False,):
                errors = relative_errors(model.train(training), x, group, GENERATORS[group])
                assert max(errors.values()) <= 1e-10, (size, training, errors)


def errors_of_inexact(make, group, side):
    """Relative errors at a square size where strides break the symmetry, and the sizes that the layers warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, x = warmed(make(), (side, side))
        errors = relative_errors(model, x, group, [1])
    pattern = rf"not {group} equivariant at (?:height|width) (\d+)"
    return errors, [re.search(pattern, str(warning.message))[1] for warning in caught]


def assert_shapes_and_gradients(model, size):
    """Features, invariant features and logits of three classes have their shapes; a loss reaches every parameter."""
    x = torch.randn(3, model.in_chans, *size)
    features = model.forward_features(x)
    assert features.shape[:3] == (3, model.num_features, model.group.order) and model.num_classes == 3
    assert model.forward_head(features, pre_logits=True).shape == (3, model.num_features)
    F.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
