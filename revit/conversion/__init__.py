"""Checkpoints of the released code as models of ours, without escnn."""

from revit.conversion.released import Converted, convert_released
from revit.conversion.state import ConversionError

__all__ = ["ConversionError", "Converted", "convert_released"]
