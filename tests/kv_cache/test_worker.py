"""The thread that does jobs in order: all of them, at everybody's priority, and in its time."""

import os
import threading
import time

import pytest

from octavo.kv_cache.connectors import worker as module
from octavo.kv_cache.connectors.worker import ThreadWorker


def test_all_jobs_are_done_in_order_whatever_they_raise() -> None:
    worker, done = ThreadWorker("test"), []

    def job(number: int) -> None:
        done.append(number)
        if number % 3 == 0:
            raise ValueError(number)

    for number in range(20):
        worker.submit(lambda number=number: job(number))  # type: ignore[misc]
    worker.close(60)
    worker.submit(lambda: job(99))
    assert done == [*range(20)]


def test_a_job_that_hangs_keeps_nobody_and_what_is_behind_it_is_not_done() -> None:
    worker, let_go, done = ThreadWorker("test"), threading.Event(), []
    worker.submit(lambda: let_go.wait(60) and None)
    worker.submit(lambda: done.append(1))
    worker.close(0.01)
    let_go.set()
    worker._thread.join(60)
    assert not worker._thread.is_alive()
    assert not done


@pytest.mark.parametrize("patient", [False, True])
def test_no_thread_has_a_lower_priority(patient: bool) -> None:
    """It would hold the interpreter's lock while others of its priority are let on."""
    worker, found = ThreadWorker("test", patient=patient), []

    def job() -> None:
        thread = threading.get_native_id()
        found.append((os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)))

    worker.submit(job)
    worker.close(60)
    thread = threading.get_native_id()
    assert found == [(os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread))]


def test_a_patient_one_rests_until_the_end_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTS", 1e9)
    worker, done, some = ThreadWorker("test", patient=True), [], threading.Event()

    def job() -> None:
        sum(range(10_000))
        done.append(time.thread_time())
        some.set()

    for _ in range(3):
        worker.submit(job)
    assert some.wait(60)
    assert len(done) == 1
    worker.hurry()
    worker.close(60)
    assert len(done) == 3


def test_a_job_whose_thread_did_not_start_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has been told so, and has given its buffer to another."""
    worker, ran = ThreadWorker("w"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError()))
        with pytest.raises(RuntimeError):
            worker.submit(lambda: ran.append("first"))
    worker.submit(lambda: ran.append("second"))
    worker.close(60)
    assert ran == ["second"]
