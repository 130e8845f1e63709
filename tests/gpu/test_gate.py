"""Who is let in to the device, and in which order; nothing here touches one."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from dualpace.gpu.gate import capturing, device_alone, end_waiting_work, start_waiting_work


def test_whoever_holds_the_device_again_and_again_lets_waiting_work_in_between() -> None:
    seen: list[str] = []
    about_to_start = threading.Event()

    def work() -> None:
        about_to_start.set()
        start_waiting_work()
        seen.append("work")
        end_waiting_work()

    worker = threading.Thread(target=work)
    for hold in range(20):
        with device_alone("a test"):
            seen.append("hold")
            if hold == 0:
                worker.start()
                about_to_start.wait()
                time.sleep(0.1)  # it waits by now
    worker.join()
    assert seen == ["hold", "work", *["hold"] * 19]


def test_the_device_is_held_alone_also_by_one_that_enters_twice() -> None:
    held = threading.Event()
    inside = False
    overlaps: list[bool] = []

    def work() -> None:
        held.wait()
        start_waiting_work()
        overlaps.append(inside)
        end_waiting_work()

    worker = threading.Thread(target=work)
    worker.start()
    with device_alone("a test"):
        inside = True
        held.set()
        time.sleep(0.1)
        with device_alone("the same once more"):
            pass
        time.sleep(0.1)
        inside = False
    worker.join()
    assert overlaps == [False]


def test_the_device_is_not_held_before_waiting_work_has_ended() -> None:
    seen: list[str] = []
    start_waiting_work()

    def hold() -> None:
        with device_alone("a test"):
            seen.append("held")

    holder = threading.Thread(target=hold)
    holder.start()
    time.sleep(0.05)
    start_waiting_work()  # more of the same is let in although the device is wanted
    seen.append("more")
    end_waiting_work()
    time.sleep(0.05)
    end_waiting_work()
    holder.join()
    assert seen == ["more", "held"]


class Cycle:
    """What only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_no_garbage_is_freed_while_graphs_are_captured() -> None:
    before = weakref.ref(Cycle())
    with capturing("a test"):
        assert before() is None
        meanwhile = weakref.ref(Cycle())
        many = [[place] for place in range(100_000)]  # far more than starts a collection
        assert meanwhile() is not None
    assert gc.isenabled()
    del many
    gc.collect()
    assert meanwhile() is None
