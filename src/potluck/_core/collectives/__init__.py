"""Collectives as data: plans, their proof, the model of their time, and the choice by it."""

from potluck._core.collectives.choose import choose
from potluck._core.collectives.plan import Action, Draft, Operation, Plan, Rank, Step
from potluck._core.collectives.registry import algorithms_for, make_plan, register
from potluck._core.collectives.verify import VerificationError, verify

__all__ = [
    "Action",
    "Draft",
    "Operation",
    "Plan",
    "Rank",
    "Step",
    "VerificationError",
    "algorithms_for",
    "choose",
    "make_plan",
    "register",
    "verify",
]
