"""Roto-reflection equivariant vision transformers for PyTorch."""

from revit import nn
from revit.actions import act_on_features, act_on_plane
from revit.deployment import bit_exact, deploy
from revit.equivariance import assert_equivariant, equivariance_error, prediction_consistency
from revit.exactness import EquivarianceError
from revit.groups import Group
from revit.models import REViT, create_model, from_pretrained, list_models, register_model, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "EquivarianceError",
    "Group",
    "REViT",
    "act_on_features",
    "act_on_plane",
    "assert_equivariant",
    "bit_exact",
    "create_model",
    "deploy",
    "equivariance_error",
    "from_pretrained",
    "list_models",
    "nn",
    "prediction_consistency",
    "register_model",
    "save_pretrained",
]
