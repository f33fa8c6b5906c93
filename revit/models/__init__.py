"""Models and their registry."""

from revit.models import allcnn as _allcnn  # noqa: F401  (registers its models)
from revit.models import attentive_gcnn as _attentive_gcnn  # noqa: F401  (registers its models)
from revit.models import densenet as _densenet  # noqa: F401  (registers its models)
from revit.models import gsa as _gsa  # noqa: F401  (registers its models)
from revit.models import hierarchical as _hierarchical  # noqa: F401  (registers its models)
from revit.models import resnet as _resnet  # noqa: F401  (registers its models)
from revit.models.cvt import CvT
from revit.models.features import FeatureMaps
from revit.models.gcnn import GCNN
from revit.models.pretrained import from_pretrained, save_pretrained
from revit.models.registry import create_model, describe_model, list_models, register_model
from revit.models.revit import REViT
from revit.models.segmentation import REViTSegmenter
from revit.models.vit import ViT

__all__ = [
    "GCNN",
    "CvT",
    "FeatureMaps",
    "REViT",
    "REViTSegmenter",
    "ViT",
    "create_model",
    "describe_model",
    "from_pretrained",
    "list_models",
    "register_model",
    "save_pretrained",
]
