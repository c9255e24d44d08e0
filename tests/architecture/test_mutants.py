"""The list of seeded faults (`make mutants`) fits the code: no change of the code loses a fault."""

from __future__ import annotations

import pytest

from support.mutants import mutants, sources
from support.sources import ROOT


def test_each_fault_has_its_place_in_the_code_and_tests_that_cover_it() -> None:
    texts = sources(ROOT)
    unfit = []
    for mutant in mutants():
        try:
            mutant.place(texts)
        except LookupError as error:
            unfit.append(str(error))
        unfit += [
            f"{mutant.name!r}: no {test}" for test in mutant.tests if not (ROOT / test).exists()
        ]
    if unfit:
        pytest.fail("tests/mutants/mutants.toml:\n" + "\n".join(unfit), pytrace=False)
