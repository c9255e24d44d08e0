"""Which strategy is fast enough on a network, predicted from measurements and rehearsals. Pure."""

from potluck.training.planner.candidates import CANDIDATES, METHODS, Candidate, named
from potluck.training.planner.choose import Plan, in_other_buckets, make_plan, parts, to_rehearse
from potluck.training.planner.measured import Measured, Rehearsed, decode, encode
from potluck.training.planner.predict import Basis, Prediction, predict

__all__ = [
    "CANDIDATES",
    "METHODS",
    "Basis",
    "Candidate",
    "Measured",
    "Plan",
    "Prediction",
    "Rehearsed",
    "decode",
    "encode",
    "in_other_buckets",
    "make_plan",
    "named",
    "parts",
    "predict",
    "to_rehearse",
]
