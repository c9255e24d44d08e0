"""What ``potluck status`` shows of a job."""

from __future__ import annotations

import pytest

from potluck._core.wire.worker_link import JobState, Samples
from potluck.cli.status import _show


@pytest.mark.parametrize(
    ("samples", "shown"), [(Samples(12_800, 64_000, 800.0), True), (None, False)]
)
def test_a_job_that_tells_of_samples_is_shown_with_how_far_it_is(
    samples: Samples | None, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _show([JobState("j", "", 7, "train.py", 0.0, 3, 120, 0.41, (), (), samples=samples)])
    text = " ".join(capsys.readouterr().out.split())
    assert "step 120 · loss 0.4100" in text
    assert ("12,800 of 64,000 samples (20%) 800/s about 1 min 04 s left" in text) is shown
