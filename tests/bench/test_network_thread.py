"""What the thread for the network takes of a core, of a process in which another one has its name."""

import threading
import time
from pathlib import Path

from megatron_ep import _C
from megatron_ep.bench.network_thread import NetworkThread


def test_the_share_of_a_core_is_that_of_threads_with_its_name():
    named, busy, over = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(_C.SoftwareNic.thread_name)
        named.set()
        busy.wait()
        while not over.is_set():
            pass

    other = threading.Thread(target=run)
    other.start()
    named.wait()
    idle = NetworkThread()
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:  # this thread's time is not its
        pass
    assert idle.share() < 0.05
    working = NetworkThread()
    busy.set()
    time.sleep(0.3)
    assert 0.1 < working.share() < 1.1
    over.set()
    other.join()
