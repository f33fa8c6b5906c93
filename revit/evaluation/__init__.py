"""How good a model is, how equivariant it is, and what it says about new images. Takes a module; never builds one."""

from revit.evaluation.audit import Audit, audit_model, consistency_by_angle
from revit.evaluation.figures import draw_calibration, draw_confusion, draw_curves, draw_polar, draw_sheet
from revit.evaluation.inference import evaluating
from revit.evaluation.metrics import CalibrationBin, ClassScores, Scores, score_predictions
from revit.evaluation.predict import Predictions, Written, find_images, predict_files, write_predictions
from revit.evaluation.turning import normalised_black, turn_by_angle

__all__ = [
    "Audit",
    "CalibrationBin",
    "ClassScores",
    "Predictions",
    "Scores",
    "Written",
    "audit_model",
    "consistency_by_angle",
    "draw_calibration",
    "draw_confusion",
    "draw_curves",
    "draw_polar",
    "draw_sheet",
    "evaluating",
    "find_images",
    "normalised_black",
    "predict_files",
    "score_predictions",
    "turn_by_angle",
    "write_predictions",
]
