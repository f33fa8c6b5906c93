"""Datasets by name: each has a description and three splits that are kept apart."""

from revit.data import (  # noqa: F401 (they register themselves)
    arrays,
    cifar10,
    digits,
    folder,
    imagenet,
    masks,
    pcam,
    photos,
    rotmnist,
    shards,
)
from revit.data.arrays import ArrayImages
from revit.data.registry import list_datasets, open_dataset, register_dataset
from revit.data.spec import BadImage, Crop, DataError, DataOptions, Dataset, DataSpec, Images, stratified_split

__all__ = [
    "ArrayImages",
    "BadImage",
    "Crop",
    "DataError",
    "DataOptions",
    "DataSpec",
    "Dataset",
    "Images",
    "list_datasets",
    "open_dataset",
    "register_dataset",
    "stratified_split",
]
