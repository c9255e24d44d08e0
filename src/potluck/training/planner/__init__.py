"""Which strategy is fast enough on a network, predicted from a few measured figures. Pure."""

from potluck.training.planner.candidates import CANDIDATES, METHODS, Candidate, named
from potluck.training.planner.choose import Plan, make_plan
from potluck.training.planner.measured import Measured, decode, encode
from potluck.training.planner.predict import Prediction, predict

__all__ = [
    "CANDIDATES",
    "METHODS",
    "Candidate",
    "Measured",
    "Plan",
    "Prediction",
    "decode",
    "encode",
    "make_plan",
    "named",
    "predict",
]
