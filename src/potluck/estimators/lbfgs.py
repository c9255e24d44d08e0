"""L-BFGS as a chain of states: one evaluation of loss and gradient per state.

Nocedal and Wright 2006, "Numerical Optimization", algorithms 7.4 and 7.5; backtracking line search
(algorithm 3.1). Everything that a lost worker must not take along is in the state, unlike in
scipy.optimize.minimize, whose state is inside its loop. For convex functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck.estimators.shards import Array

State = dict[str, Any]

MEMORY = 10
_DECREASE = 1e-4
_LEAST_STEP = 1e-12


def begin(size: int) -> State:
    """The state before the first evaluation, at the origin."""
    return {
        "at": np.zeros(size),
        "direction": np.zeros(size),
        "step": 1.0,
        "value": float("inf"),
        "gradient": np.zeros(size),
        "steps": np.zeros((0, size)),
        "changes": np.zeros((0, size)),
        "iterations": 0,
    }


def trial(state: State) -> Array:
    """The point to evaluate."""
    return np.asarray(state["at"] + state["step"] * state["direction"])


def decide(state: State, value: float, gradient: Array, tol: float) -> Array:
    """What follows from the value and the gradient at the trial point: 3 + size numbers.

    They are whether the point is accepted, whether the search ends, the next step length, and the
    next direction. For one rank to compute, and ``advance`` to apply on all.
    """
    slope = float(state["gradient"] @ state["direction"])
    first = not np.isfinite(state["value"])
    if not first and not value <= state["value"] + _DECREASE * state["step"] * slope:
        step = state["step"] / 2
        return np.array([0.0, step < _LEAST_STEP, step, *state["direction"]])
    if np.abs(gradient).max() <= tol:
        return np.array([1.0, 1.0, 1.0, *state["direction"]])
    steps, changes = _pairs(state, gradient, first)
    direction = _two_loops(gradient, steps, changes)
    step = 1.0 if len(steps) else min(1.0, 1 / float(np.abs(gradient).sum()))
    return np.array([1.0, 0.0, step, *direction])


def advance(state: State, value: float, gradient: Array, decision: Array) -> tuple[State, bool]:
    """The next state, and whether the search ends. Exact: the same on every processor."""
    accepted, ends = bool(decision[0]), bool(decision[1])
    after = {**state, "step": float(decision[2]), "direction": decision[3:].copy()}
    if accepted:
        first = not np.isfinite(state["value"])
        steps, changes = _pairs(state, gradient, first)
        after |= {
            "at": trial(state),
            "value": value,
            "gradient": gradient,
            "steps": steps,
            "changes": changes,
            "iterations": state["iterations"] + (not first),
        }
    return after, ends


def _pairs(state: State, gradient: Array, first: bool) -> tuple[Array, Array]:
    """The last steps and changes of the gradient, with those to the trial point."""
    if first:
        return state["steps"], state["changes"]
    step = state["step"] * state["direction"]
    change = gradient - state["gradient"]
    return (
        np.concatenate([state["steps"], step[None]])[-MEMORY:],
        np.concatenate([state["changes"], change[None]])[-MEMORY:],
    )


def _two_loops(gradient: Array, steps: Array, changes: Array) -> Array:
    """The direction of descent by the approximate inverse Hessian."""
    direction = -gradient
    curvatures = np.einsum("ij,ij->i", steps, changes)
    useful = [i for i in range(len(steps)) if curvatures[i] > 0]
    factors = {}
    for i in reversed(useful):
        factors[i] = steps[i] @ direction / curvatures[i]
        direction = direction - factors[i] * changes[i]
    if useful:
        last = useful[-1]
        direction = direction * (curvatures[last] / (changes[last] @ changes[last]))
    for i in useful:
        direction = direction + (factors[i] - changes[i] @ direction / curvatures[i]) * steps[i]
    return np.asarray(direction)
