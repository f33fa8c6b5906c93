"""The paper again: its numbers as data, and its four figures in our own drawing."""

from revit.reproduce.diagrams import draw_architecture, draw_projection
from revit.reproduce.figures import BubblePoint, draw_bubbles, draw_interpolation, paper_points
from revit.reproduce.paper import PaperRow, PaperTable, PaperValue, paper_tables

__all__ = [
    "BubblePoint",
    "PaperRow",
    "PaperTable",
    "PaperValue",
    "draw_architecture",
    "draw_bubbles",
    "draw_interpolation",
    "draw_projection",
    "paper_points",
    "paper_tables",
]
