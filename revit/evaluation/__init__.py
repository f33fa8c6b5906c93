"""How good a model is, how equivariant it is, and what it says about new images. Takes a module; never builds one."""

from revit.data.finding import find_images
from revit.evaluation.audit import Audit, StageErrors, audit_model
from revit.evaluation.figures import draw_calibration, draw_confusion, draw_curves, draw_polar, draw_sheet
from revit.evaluation.generalisation import ByAngle, RandomTurns, errors_by_angle, random_transformations
from revit.evaluation.inference import evaluating
from revit.evaluation.metrics import CalibrationBin, ClassScores, Scores, score_predictions
from revit.evaluation.predict import Predictions, Written, predict_files, write_predictions
from revit.evaluation.turning import normalised_black, turn_by_angle

__all__ = [
    "Audit",
    "ByAngle",
    "CalibrationBin",
    "ClassScores",
    "Predictions",
    "RandomTurns",
    "Scores",
    "StageErrors",
    "Written",
    "audit_model",
    "draw_calibration",
    "draw_confusion",
    "draw_curves",
    "draw_polar",
    "draw_sheet",
    "errors_by_angle",
    "evaluating",
    "find_images",
    "normalised_black",
    "predict_files",
    "random_transformations",
    "score_predictions",
    "turn_by_angle",
    "write_predictions",
]
