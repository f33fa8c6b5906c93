"""Equivariant layers on feature maps [B, C, G, H, W]."""

from revit.nn.algorithm import set_algorithm
from revit.nn.attention import ConvProjection, GroupConvAttention, attend
from revit.nn.block import GroupMLP, TransformerBlock
from revit.nn.canonical import Canonical
from revit.nn.convolution import GroupConv, GroupLinear, LiftingConv
from revit.nn.dropout import DropPath, make_dropout
from revit.nn.head import InvariantHead
from revit.nn.normalization import FieldBatchNorm, FieldLayerNorm, make_norm
from revit.nn.pooling import BlurPool, Downsample, GroupPool, LiftingLayer, SpatialPool, fit_to_stride
from revit.nn.relative_attention import RelativeSelfAttention
from revit.nn.upsampling import UpsampleJoin, upsample_to

__all__ = [
    "BlurPool",
    "Canonical",
    "ConvProjection",
    "Downsample",
    "DropPath",
    "FieldBatchNorm",
    "FieldLayerNorm",
    "GroupConv",
    "GroupConvAttention",
    "GroupLinear",
    "GroupMLP",
    "GroupPool",
    "InvariantHead",
    "LiftingConv",
    "LiftingLayer",
    "RelativeSelfAttention",
    "SpatialPool",
    "TransformerBlock",
    "UpsampleJoin",
    "attend",
    "fit_to_stride",
    "make_dropout",
    "make_norm",
    "set_algorithm",
    "upsample_to",
]
