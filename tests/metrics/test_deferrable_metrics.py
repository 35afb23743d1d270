"""Values of metrics that are at hand or come from a future."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from typing import Any

import pytest
import torch

from tessera.training.metrics.deferrable_metrics import (
    DeferrableMetrics,
    device_supports_async,
    transfer_tensors_to_cpu,
)


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test be the first that waits."""
    monkeypatch.setattr(DeferrableMetrics, "_warned", False)


def pending() -> tuple[Future[dict[str, Any]], DeferrableMetrics]:
    """A future and the metrics that wait for it."""
    future: Future[dict[str, Any]] = Future()
    return future, DeferrableMetrics(future)


def test_values_at_hand_are_a_copy_and_a_mapping_that_is_true() -> None:
    given = {"a": 1}
    metrics = DeferrableMetrics(given)
    given["a"] = 2
    assert metrics == {"a": 1} == dict(metrics) == {**metrics}
    assert metrics.is_resolved()
    assert "b" not in metrics
    metrics["b"] = 3
    assert metrics.resolve() == {"a": 1, "b": 3}
    assert repr(metrics) == "DeferrableMetrics(resolved, 2 keys)"
    assert bool(DeferrableMetrics({}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(metrics)


def test_a_subscriber_is_called_when_the_future_is_done() -> None:
    future, metrics = pending()
    got: list[Any] = []
    metrics.subscribe(got.append)
    assert not metrics.is_resolved()
    assert repr(metrics) == "DeferrableMetrics(pending)"
    future.set_result({"a": 1})
    assert got == [{"a": 1}]
    assert metrics.is_resolved()
    metrics.subscribe(got.append)
    assert len(got) == 2


def test_an_error_goes_to_the_subscriber_and_to_whoever_reads() -> None:
    future, metrics = pending()
    errors: list[Exception] = []
    metrics.subscribe(lambda _: None, errors.append)
    future.set_exception(ValueError("no value"))
    assert [str(error) for error in errors] == ["no value"]
    with pytest.raises(ValueError, match="no value"):
        metrics["a"]


def test_reading_waits_for_another_thread_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future, metrics = pending()
    other = Thread(target=future.set_result, args=({"a": 1},))
    other.start()
    assert metrics["a"] == 1
    other.join()
    assert len(metrics) == 1
    future, metrics = pending()
    future.set_result({"a": 1})
    assert list(metrics) == ["a"]
    assert len([record for record in caplog.records if "subscribe" in record.message]) == 1


@pytest.mark.parametrize("mine_first", [True, False])
def test_updates_are_merged_when_both_are_there(mine_first: Any) -> None:
    mine, metrics = pending()
    theirs, other = pending()
    metrics.update({"c": 3, "a": 0})
    metrics.update(other)
    for future, values in [(mine, {"a": 1}), (theirs, {"b": 2})][:: 1 if mine_first else -1]:
        future.set_result(values)
    assert metrics.resolve() == {"a": 0, "b": 2, "c": 3}


def test_an_error_of_the_other_ends_what_still_waits() -> None:
    _, metrics = pending()
    theirs, other = pending()
    metrics.update(other)
    theirs.set_exception(ValueError("no value"))
    with pytest.raises(ValueError, match="no value"):
        metrics.resolve()


def test_values_on_the_cpu_are_not_copied() -> None:
    values = {"a": torch.ones(2), "name": "task"}
    assert transfer_tensors_to_cpu(values) == (values, None)
    assert device_supports_async(torch.device("cuda", 1))
    assert not device_supports_async(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_on_a_gpu_come_to_the_host() -> None:
    metrics = DeferrableMetrics({})
    metrics.update({"a": torch.full((3,), 0.5, device="cuda"), "b": 1})
    assert metrics["a"].device.type == "cpu"
    assert metrics["a"].tolist() == [0.5, 0.5, 0.5]
