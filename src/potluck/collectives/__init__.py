"""Collectives as data: plans, their proof, the model of their time, and the choice by it."""

from potluck.collectives.choose import choose
from potluck.collectives.registry import algorithms_for, make_plan

__all__ = ["algorithms_for", "choose", "make_plan"]
