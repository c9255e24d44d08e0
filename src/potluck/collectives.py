"""Collective algorithms of your own: the plan by which a collective goes from rank to rank."""

from potluck._core.collectives import Action, Draft, Rank, Step, VerificationError, register

__all__ = ["Action", "Draft", "Rank", "Step", "VerificationError", "register"]
