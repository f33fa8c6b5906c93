"""Models and their registry."""

from revit.models import hierarchical as _hierarchical  # noqa: F401  (registers its models)
from revit.models.features import FeatureMaps
from revit.models.registry import create_model, describe_model, list_models, register_model
from revit.models.revit import REViT

__all__ = ["FeatureMaps", "REViT", "create_model", "describe_model", "list_models", "register_model"]
