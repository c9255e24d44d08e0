"""What follows from the cells of ``slow_networks.py``: predictions, claims, the page. Pure but for
the page's file and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common import claims, pages, slow_plot, timed
from common.claims import Claim
from common.networks import KINDS
from potluck.training.planner import Measured, Plan, make_plan, predict

DOCS = Path(__file__).parents[2] / "docs" / "slow-networks.md"
PICTURE = DOCS.parent / "assets" / "slow-networks.png"
WITHIN, CHOSEN_WITHIN = 0.15, 1.05
Row = dict[str, Any]
Place = tuple[str, str, int, int]
"""A size of the model, a network, a number of hosts, and of workers on each."""


def place(row: Mapping[str, Any]) -> Place:
    return row["size"], row["network"], row["hosts"], per_host(row)


def at(where: Place) -> Row:
    """A row, or a plan, of this place."""
    return dict(zip(("size", "network", "hosts", "workers_per_host"), where, strict=True))


def per_host(row: Mapping[str, Any]) -> int:
    """The workers on each host; results from before there could be several don't say it."""
    return int(row.get("workers_per_host", 1))


def model(row: Mapping[str, Any]) -> str:
    """The size of the model, and how many workers a host has if there are several."""
    name = f"{timed.SIZES[row['size']].name} parameters"
    return name if per_host(row) == 1 else f"{name}, {per_host(row)} workers on each host"


def plan_of(kept: Mapping[str, Any]) -> Plan:
    """By the model of today, from what a plan was made from."""
    return make_plan(msgspec.convert(kept["measured"], Measured))


def predicted(kept: Mapping[str, Any], plan: Plan, name: str) -> dict[str, Any]:
    """What a plan made in the same network has said of a strategy, before it was measured."""
    found = predict(msgspec.convert(kept["measured"], Measured), timed.candidate_of(name))
    return {
        "predicted_s": found.step_s,
        "basis": str(found.basis),
        "is_choice": timed.cell_name(plan.choice) == name,
    }


def predict_anew(result: dict[str, Any]) -> None:
    """Replace the predictions and choices in a kept result by those of the model of today."""
    plans = {place(each): (each, plan_of(each)) for each in result["plans"]}
    for row in result["rows"]:
        if place(row) in plans and row["strategy"] not in timed.GLOO:
            row |= predicted(*plans[place(row)], row["strategy"])
    result["claims"] = claims.as_dicts(what_follows(result["rows"]))


def what_follows(rows: Sequence[Row]) -> list[Claim]:
    """The asked efficiency of each network, by the strategy that the plan has chosen there, and how
    good predictions and choices were."""
    found = []
    for key, kind in KINDS.items():
        best = [
            (f"{row['hosts']} hosts by {row['strategy']}", row["efficiency"] * 100)
            for row in sorted(rows, key=lambda row: int(row["hosts"]))
            if row["size"] == "25m"
            and row["network"] == key
            and row.get("is_choice")
            and per_host(row) == 1
        ]
        if best and kind.reach is not None:
            what = f"25 M parameters, 200 ms of computation, {kind.name}: efficiency"
            reach = kind.reach * 100
            found.append(claims.at_least(what, f">= {reach:g}%", reach, best, "%"))
    return found + of_predictions(rows)


def of_predictions(rows: Sequence[Row]) -> list[Claim]:
    """How many cells were predicted within 15%, and how often the choice was within 5% of the
    fastest, by the size of the model and together; with several workers on each host apart."""
    ours = [row for row in rows if "predicted_s" in row]
    if not ours:
        return []
    models = list(dict.fromkeys(model(row) for row in _in_order(ours)))
    cells = {name: [_is_near(row) for row in ours if model(row) == name] for name in models}
    places = {name: _good_choices(ours, name) for name in models}
    return [
        claims.at_least(what, ">= 90%", 90.0, _shares(found, noun), "%")
        for what, found, noun in (
            ("slow networks, all cells: steps predicted within 15%", cells, "cells"),
            (
                "slow networks, all choices: within 5% of the fastest measured",
                *(places, "networks"),
            ),
        )
        if any(found.values())
    ]


def _is_near(row: Row) -> bool:
    return bool(abs(row["predicted_s"] / row["step_s"] - 1) <= WITHIN)


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """As the page has them: one worker on each host first, small models first."""
    return sorted(rows, key=lambda row: (per_host(row), list(timed.SIZES).index(row["size"])))


def _good_choices(rows: Sequence[Row], name: str) -> list[bool]:
    """For each network whose choice was measured: whether it was about as fast as the fastest."""
    found = []
    for one in dict.fromkeys(place(row) for row in rows if model(row) == name):
        here = [row for row in rows if place(row) == one]
        best = min(row["step_s"] for row in here)
        chosen = [row["step_s"] for row in here if row["is_choice"]]
        found += [each <= CHOSEN_WITHIN * best for each in chosen]
    return found


def _shares(by_model: Mapping[str, Sequence[bool]], noun: str) -> list[tuple[str, float]]:
    together = [each for some in by_model.values() for each in some]
    groups: dict[str, Sequence[bool]] = {"": together}
    if len(by_model) > 1:
        groups |= {f", {name}": some for name, some in by_model.items()}
    return [
        (f"{sum(some)} of {len(some)} {noun}{name}", sum(some) / len(some) * 100)
        for name, some in groups.items()
        if some
    ]


def into_docs(result: Mapping[str, Any]) -> None:
    """Replace what stands between the marks of docs/slow-networks.md by the efficiencies, and draw
    them."""
    parts = []
    for name in dict.fromkeys(map(model, _in_order(result["rows"]))):
        rows = [row for row in result["rows"] if model(row) == name]
        compute_s = timed.SIZES[rows[0]["size"]].compute_s
        said = f"**{name}**, {compute_s * 1e3:.3g} ms of computation:"
        parts += [said, table(rows, result.get("skipped", ()))]
    for claim in result["claims"]:
        if claim["what"].startswith("slow networks, "):
            parts.append(f"- {claim['what'].removeprefix('slow networks, ')}: {claim['measured']}")
    body = "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("|\n- ", "|\n\n- ")
    pages.fill(DOCS, result["machine"], body)
    slow_plot.draw(result, KINDS, PICTURE)


def table(rows: Sequence[Row], skipped: Sequence[Mapping[str, Any]]) -> str:
    """The efficiencies of one model (see ``model``): a row for each strategy, a column for each
    network and number of hosts."""
    columns = [
        (key, count)
        for key in KINDS
        for count in sorted({row["hosts"] for row in rows})
        if any((row["network"], row["hosts"]) == (key, count) for row in rows)
    ]
    heads = [f"{KINDS[key].short}, {count} hosts" for key, count in columns]
    lines = [f"| strategy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    order = [*timed.OURS, *timed.GLOO]
    names = sorted({row["strategy"] for row in rows}, key=lambda name: _rank(order, name))
    size, workers = rows[0]["size"], per_host(rows[0])
    for name in names:
        code = timed.GLOO.get(name) or f"`{timed.candidate_of(name).code}`"
        cells = []
        for key, count in columns:
            here = (size, key, count, workers)
            found = [r for r in rows if place(r) == here and r["strategy"] == name]
            left_out = any(place(each) == here and each["strategy"] == name for each in skipped)
            shown = f"{found[0]['efficiency']:.0%}" if found else "too slow" if left_out else "-"
            cells.append(f"**{shown}**" if found and found[0].get("is_choice") else shown)
        lines.append(f"| {code} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rank(order: Sequence[str], name: str) -> tuple[int, str]:
    return order.index(name.partition("@")[0]), name
