"""Entry points for torch.hub, one for each registered model: `torch.hub.load("OWNER/REPO", "revit_small", group="p4m")`.

They take the arguments of `revit.create_model`; `pretrained=True` is for those of `revit.list_models(pretrained=True)`.
`torch.hub.load("OWNER/REPO", "from_pretrained", "FOLDER")` loads what `save_pretrained` wrote.
"""

from functools import partial as _partial

from revit import create_model as _create_model
from revit import from_pretrained as from_pretrained
from revit import list_models as _list_models
from revit.models import describe_model as _describe_model

dependencies = ["torch", "numpy", "safetensors", "huggingface_hub"]

for _name in _list_models():
    globals()[_name] = _partial(_create_model, _name)
    globals()[_name].__doc__ = _describe_model(_name)
for _name in _list_models(pretrained=True):
    globals()[_name] = _partial(_create_model, _name)
    globals()[_name].__doc__ = "A model whose weights come with the package: pretrained=True."
