"""What a context says of itself: sums, quantiles, failures, links, and Prometheus' text."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from threading import Thread
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from potluck._core.metrics import Metrics
from potluck._core.metrics.snapshot import Histogram


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


def test_sums_and_means_are_per_operation_over_its_algorithms() -> None:
    metrics = Metrics()
    metrics.observe("all_reduce", "ring", 100, 0.5)
    metrics.observe("all_reduce", "tree", 300, 1.5)
    metrics.observe("barrier", "tree", 0, 0.25)
    operations = metrics.stats()["operations"]
    assert operations["all_reduce"]["count"] == 2
    assert operations["all_reduce"]["bytes"] == 400
    assert operations["all_reduce"]["seconds"] == 2.0
    assert operations["all_reduce"]["mean_s"] == 1.0
    assert operations["all_reduce"]["algorithms"] == {"ring": 1, "tree": 1}
    assert operations["barrier"]["bytes"] == 0


def test_an_operation_that_only_failed_is_listed_with_its_errors() -> None:
    metrics = Metrics()
    metrics.failed("all_reduce", "PeerLost")
    metrics.failed("all_reduce", "PeerLost")
    metrics.failed("all_reduce", "Desync")
    assert metrics.stats()["operations"] == {
        "all_reduce": {
            "count": 0,
            "bytes": 0,
            "seconds": 0.0,
            "failures": {"PeerLost": 2, "Desync": 1},
        }
    }


def test_a_link_has_one_meter_however_often_it_is_asked_for() -> None:
    metrics = Metrics()
    metrics.link("worker 1").bytes_sent += 10
    metrics.link("worker 1").bytes_sent += 5
    metrics.link("worker 2").messages_received += 1
    links = metrics.stats()["links"]
    assert links["worker 1"]["bytes_sent"] == 15
    assert links["worker 2"] == {
        "bytes_sent": 0,
        "bytes_received": 0,
        "bytes_in_shared_memory": 0,
        "messages_sent": 0,
        "messages_received": 1,
    }


def test_nothing_is_lost_when_several_threads_record_at_once() -> None:
    metrics = Metrics()

    def record() -> None:
        for _ in range(2000):
            metrics.observe("all_reduce", "ring", 8, 0.001)
            metrics.failed("all_reduce", "PeerLost")

    threads = [Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    operation = metrics.stats()["operations"]["all_reduce"]
    assert operation["count"] == 8000
    assert operation["bytes"] == 64000
    assert operation["failures"] == {"PeerLost": 8000}


def test_stats_are_ready_for_json_and_a_copy() -> None:
    metrics = Metrics(rank="0")
    metrics.group(epoch=3, world_size=4)
    metrics.reformed(0.5)
    metrics.observe("all_reduce", "ring", 8, 0.001)
    before = metrics.stats()
    metrics.observe("all_reduce", "ring", 8, 0.001)
    assert before["operations"]["all_reduce"]["count"] == 1
    assert json.loads(json.dumps(before))["epoch"] == 3
    assert (before["world_size"], before["reforms"], before["reform_seconds"]) == (4, 1, 0.5)


def test_prometheus_reads_back_what_was_recorded() -> None:
    metrics = Metrics(rank="2")
    metrics.group(epoch=7, world_size=4)
    metrics.observe("all_reduce", "ring", 1024, 0.25)
    metrics.failed("barrier", "PeerLost")
    metrics.link("worker 1").bytes_sent += 99
    read = samples(metrics)
    rank = ("rank", "2")
    ring = frozenset({rank, ("operation", "all_reduce"), ("algorithm", "ring")})
    assert read["potluck_epoch", frozenset({rank})] == 7
    assert read["potluck_world_size", frozenset({rank})] == 4
    assert read["potluck_collective_seconds_count", ring] == 1
    assert read["potluck_collective_seconds_sum", ring] == 0.25
    assert read["potluck_collective_bytes_bucket", ring | {("le", "1024.0")}] == 1
    assert read["potluck_collective_bytes_bucket", ring | {("le", "256.0")}] == 0
    barrier = frozenset({rank, ("operation", "barrier"), ("kind", "PeerLost")})
    assert read["potluck_collective_failures_total", barrier] == 1
    assert read["potluck_link_bytes_sent_total", frozenset({rank, ("peer", "worker 1")})] == 99


def test_two_contexts_of_one_process_share_nothing() -> None:
    one, two = Metrics(), Metrics()
    one.observe("all_reduce", "ring", 8, 0.001)
    assert two.stats()["operations"] == {}
    assert one.registry() is not two.registry()


def test_recording_and_stats_do_not_import_prometheus() -> None:
    script = (
        "import sys; from potluck._core.metrics import Metrics; m = Metrics();"
        "m.observe('all_reduce', 'ring', 8, 0.1); m.stats();"
        "assert 'prometheus_client' not in sys.modules; m.exposition();"
        "assert 'prometheus_client' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_quantiles_are_right_to_within_a_bucket() -> None:
    histogram = Histogram([1.0, 2.0, 4.0, 8.0])
    for value in (0.5, 1.5, 1.5, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 7.0):
        histogram.add(value)
    assert 2.0 <= histogram.quantile(0.5) <= 4.0
    assert 1.0 <= histogram.quantile(0.2) <= 2.0
    assert 4.0 <= histogram.quantile(1.0) <= 8.0


def test_a_value_on_a_bound_counts_as_below_it_and_one_beyond_the_last_is_kept() -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.add(1.0)
    histogram.add(99.0)
    assert histogram.cumulative() == [("1.0", 1.0), ("2.0", 1.0), ("+Inf", 2.0)]
    assert histogram.quantile(1.0) == 2.0
    assert histogram.total == 100.0


def test_an_empty_histogram_has_quantile_zero() -> None:
    assert Histogram([1.0]).quantile(0.5) == 0.0


def test_histograms_with_other_bounds_are_not_added() -> None:
    with pytest.raises(AssertionError):
        Histogram([1.0]).plus(Histogram([2.0]))


def test_a_script_reports_metrics_of_its_own() -> None:
    metrics = Metrics(rank="2")
    metrics.report("training_loss", 0.5, {"phase": "warm-up", "layer": 3})
    metrics.report("training_loss", 0.25, {"layer": 4, "phase": "main"})
    metrics.report("training_loss", 0.125, {"phase": "main", "layer": 4})
    metrics.report("queue:depth", 7)
    metrics.report("loss_is_nan", math.nan)
    metrics.report("text", 1, {"said": 'a "b"\\ c\n' * 100})
    found = samples(metrics)
    rank = ("rank", "2")
    assert found["training_loss", frozenset({rank, ("phase", "warm-up"), ("layer", "3")})] == 0.5
    assert found["training_loss", frozenset({rank, ("phase", "main"), ("layer", "4")})] == 0.125
    assert found["queue:depth", frozenset({rank})] == 7
    assert math.isnan(found["loss_is_nan", frozenset({rank})])
    said = [dict(labels)["said"] for name, labels in found if name == "text"]
    assert said == [('a "b"\\ c\n' * 100)[:200]]


@pytest.mark.parametrize(
    ("name", "value", "labels", "words"),
    [
        ("2nd", 1, {}, "'2nd' can't be the name of a metric"),
        ("training loss", 1, {}, "such as training_loss"),
        ("", 1, {}, "can't be the name of a metric"),
        (None, 1, {}, "can't be the name of a metric"),
        ("x" * 201, 1, {}, "can't be the name of a metric"),
        ("potluck_epoch", 1, {}, "names that begin with potluck_ are its own metrics'"),
        ("loss", "0.5", {}, "the value of loss is '0.5'; it must be a number"),
        ("loss", None, {}, "the value of loss is None"),
        ("loss", [1, 2], {}, r"the value of loss is \[1, 2\]"),
        ("loss", 1, ["epoch"], "the labels of loss are a dict of names to values"),
        ("loss", 1, {"2": 1}, "'2' can't be the name of a label of loss"),
        ("loss", 1, {"__x": 1}, "can't be the name of a label"),
        ("loss", 1, {3: 1}, "can't be the name of a label"),
        ("loss", 1, {"rank": 1}, "the label 'rank' of loss is potluck's own"),
        ("loss", 1, {"layer": [1]}, "label 'layer' of loss is .* a text or a number"),
        ("known", 1, {"epoch": 1}, r"known has the labels \['epoch'\], and had \[\] before"),
    ],
)
def test_what_is_no_metric(name: Any, value: Any, labels: Any, words: str) -> None:
    metrics = Metrics(rank="2")
    metrics.report("known", 1)
    before = metrics.exposition()
    with pytest.raises((TypeError, ValueError), match=words):
        metrics.report(name, value, labels)
    assert metrics.exposition() == before


def test_a_label_that_rises_drops_the_oldest_series(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.report("kept", 1)
    for epoch in range(3000):
        metrics.report("training_loss", 1 / (epoch + 1), {"epoch": epoch})
        metrics.report("kept", epoch)
    found = samples(metrics)
    ours = {dict(labels).get("epoch") for name, labels in found if name == "training_loss"}
    assert ours == {str(epoch) for epoch in range(3000 - 999, 3000)}
    assert found["kept", frozenset()] == 2999
    assert len([each for each in caplog.records if "more than 1000 series" in each.message]) == 1


def test_the_oldest_series_is_the_one_that_was_reported_longest_ago() -> None:
    metrics = Metrics()
    for epoch in range(1500):
        if epoch in (0, 900):
            metrics.report("kept", epoch)
        metrics.report("training_loss", 1 / (epoch + 1), {"epoch": epoch})
    assert samples(metrics)["kept", frozenset()] == 900
