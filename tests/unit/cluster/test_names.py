"""What people call nodes: names where they are known, and never one name for two nodes."""

from __future__ import annotations

from potluck._core.cluster.names import NodeNames

ADA, BOB, EVE = "1f" * 32, "2e" * 32, "3d" * 32


def names() -> NodeNames:
    known = NodeNames(ADA, "ada")
    known.met(BOB, "bob")
    return known


def test_a_node_is_called_by_its_name_and_the_beginning_of_its_id() -> None:
    assert names().called(ADA) == "ada (1f1f1f1f)"
    assert names().called(BOB) == "bob (2e2e2e2e)"
    assert names().called(EVE) == "node 3d3d3d3d"


def test_a_label_is_the_name_as_long_as_no_other_node_has_it() -> None:
    known = names()
    assert (known.label(ADA), known.label(BOB), known.label(EVE)) == ("ada", "bob", "node-3d3d")
    known.met(EVE, "bob")
    assert (known.label(BOB), known.label(EVE)) == ("bob-2e2e", "bob-3d3d")
    assert known.label(ADA) == "ada"


def test_a_node_that_was_named_anew_has_its_new_name() -> None:
    known = names()
    known.met(BOB, "bert")
    assert known.label(BOB) == known.name(BOB) == "bert"


def test_ids_in_a_text_become_names_and_other_digits_stay() -> None:
    text = f"{BOB} is silent, {EVE} is new; {'0' * 63} and {'0' * 65} are no ids"
    assert names().readable(text) == (
        f"bob (2e2e2e2e) is silent, node 3d3d3d3d is new; {'0' * 63} and {'0' * 65} are no ids"
    )
