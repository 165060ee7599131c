"""The roll call among ranks that share a store: threads of one process stand in for them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from train.extras.endurance import lost_rank
from train.extras.endurance.lost_rank import RankLeftError, RankWatch, Store
from train.launch import Launch
from train.records import EXIT_ERROR

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:4711")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(lost_rank, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(lost_rank, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return server


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def watch(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., RankWatch]:
    def make(
        rank: int, world_size: int = 3, timeout_seconds: float = 60, local_rank: int = 0, host: int = 0
    ) -> RankWatch:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("GROUP_RANK", str(host))
        launch = Launch(world_size=world_size, rank=rank)
        return RankWatch(launch, timeout_seconds, lambda: "Do this.", told.append)

    return make


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (BROKEN, True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),  # gloo's, in a backward
        (RuntimeError("Remote peer closed the connection."), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp: remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (DistStoreError("wait timeout after 4000ms, keys: /default_pg/0//cpu//0/rank_1"), True),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_tells_broken_connections_from_other_errors(
    error: Exception, broken: bool, watch: Callable[..., RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_rank, "ANSWER_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert watch(1).concludes(error) is broken  # it has no store, so rank 0 is lost


def test_rank_that_does_not_answer_is_named_once(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with watch(0) as first, watch(1) as second:  # and none for rank 2
        assert first.concludes(BROKEN)
        assert second.concludes(BROKEN)
    assert len(told) == 1
    assert told[0].startswith("rank 2 (never came) is lost")
    assert "The other 2 of 3 ended because of this. Do this." in told[0]


def test_error_that_is_no_broken_connection_concludes_nothing(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str]
) -> None:
    with watch(0) as first:
        assert not first.concludes(ValueError("a bug"))
    assert told == []


def test_nobody_is_blamed_while_all_answer(store: TCPStore, watch: Callable[..., RankWatch], told: list[str]) -> None:
    with watch(0) as first, watch(1), watch(2):
        assert not first.concludes(BROKEN)
        assert not first.concludes(BROKEN)  # answers to an earlier call do not count
    assert told == []


def test_rank_that_ended_by_itself_is_not_called_lost(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str]
) -> None:
    with watch(0) as first, watch(1):
        with watch(2) as third:
            third._connected.wait(20)
        assert first.concludes(BROKEN)
    assert told == ["rank 2 ended before the others; its own message says why."]


def test_silent_neighbour_is_named_and_ends_a_rank_that_waits_for_it(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with watch(0, 2, timeout_seconds=0.5):
        deadline = time.monotonic() + 20
        while not statuses and time.monotonic() < deadline:
            time.sleep(0.05)
    assert statuses == [EXIT_ERROR]
    assert len(told) == 1 and told[0].startswith("rank 1 (never came) is lost")


@pytest.mark.parametrize(
    ("rank", "lost"),
    [(0, "the launcher of this host, 127.0.0.1"), (1, "rank 0 is lost: the launcher of its host, 127.0.0.1")],
)
def test_lost_store_means_the_launcher_of_rank_0(
    store: TCPStore,
    watch: Callable[..., RankWatch],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    lost: str,
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("Broken pipe")

    with watch(rank) as one:
        monkeypatch.setattr(one, "_call_roll", broken)
        assert one.concludes(BROKEN)
    assert told[0].startswith(lost)
    assert told[0].endswith("Do this.")


def test_store_may_be_opened_after_the_watch_began(
    watch: Callable[..., RankWatch], told: list[str], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a launcher, where rank 0 opens it when it meets the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(lost_rank, "STORE_SECONDS", 0.2)
    with watch(0) as first, watch(1):
        time.sleep(0.5)
        opened = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert first.concludes(BROKEN)
    assert len(told) == 1 and told[0].startswith("rank 2 (never came) is lost")
    del opened


@pytest.mark.slow
def test_where_no_store_is_opened_rank_0_did_not_come(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(lost_rank, "STORE_SECONDS", 0.2)
    with watch(1) as second:
        assert second.concludes(DistNetworkError("The client socket has timed out while trying to connect"))
    assert len(told) == 1
    assert told[0].startswith("rank 0 did not come: nothing answers at 127.0.0.1:1 ")
    with watch(0) as first:
        assert first.concludes(DistNetworkError("The client socket has timed out while trying to connect"))
    assert told[1].startswith("this process is rank 0, and is not to be found: nothing answers at 127.0.0.1:1 ")


class Clock:
    """Ranks of several hosts that prepare, and the order in which they do."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, its: RankWatch) -> None:
        def prepare() -> None:
            with its.preparing():
                self.order.append(f"{rank} prepares")
            self.order.append("leaves")

        self.threads.append(threading.Thread(target=prepare))
        self.threads[-1].start()

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(20)
        return self.order


def test_first_rank_prepares_first_and_all_leave_together_however_long_it_takes(
    store: TCPStore, watch: Callable[..., RankWatch]
) -> None:
    """Each waits longer than a rank may be silent."""
    clock = Clock()
    with (
        watch(0, timeout_seconds=0.5) as first,
        watch(1, timeout_seconds=0.5, local_rank=1) as second,
        watch(2, timeout_seconds=0.5, host=1) as other,
    ):
        clock.start(1, second)
        time.sleep(1.0)
        clock.start(0, first)
        time.sleep(1.0)
        assert clock.order == ["0 prepares", "1 prepares"]
        clock.start(2, other)
        assert clock.join() == ["0 prepares", "1 prepares", "2 prepares", *["leaves"] * 3]


def test_ranks_may_be_dealt_to_hosts_in_any_order(store: TCPStore, watch: Callable[..., RankWatch]) -> None:
    clock = Clock()
    with (
        watch(0, 4) as a,
        watch(1, 4, host=1) as b,
        watch(2, 4, local_rank=1) as c,
        watch(3, 4, host=1, local_rank=1) as d,
    ):
        for rank, its in ((3, d), (2, c), (1, b)):
            clock.start(rank, its)
        time.sleep(0.5)
        assert clock.order == ["1 prepares", "3 prepares"]
        clock.start(0, a)
        assert clock.join()[:4] == ["1 prepares", "3 prepares", "0 prepares", "2 prepares"]


@pytest.mark.parametrize("local_rank", [0, 1])
def test_who_waits_for_a_rank_that_ends_is_told(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], local_rank: int
) -> None:
    with watch(1, 2, local_rank=local_rank) as second:
        with watch(0, 2) as first:
            first._connected.wait(20)
        began = time.monotonic()
        with pytest.raises(RankLeftError) as left, second.preparing():
            assert local_rank == 0, "the first one never went"
        assert time.monotonic() - began < 20  # not only when its patience ends
        assert second.concludes(left.value)
    assert told == ["rank 0 ended before the others; its own message says why."]


def test_request_to_stop_is_one_where_all_are_there_or_were_asked_too(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str]
) -> None:
    with watch(0) as first, watch(1):
        with watch(2) as third:
            assert third.confirms_stop()
        assert first.confirms_stop()
        assert told == []
        assert first.concludes(BROKEN)  # who trains on cannot do without it
    assert told == ["rank 2 ended before the others; its own message says why."]


@pytest.mark.parametrize("comes", [True, False])
def test_request_to_stop_because_a_rank_failed_is_none(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Launchers end the others with the same signal."""
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with watch(0, 2) as first:
        if comes:
            with watch(1, 2) as second:
                second._connected.wait(20)
        assert not first.confirms_stop()
        assert not first.confirms_stop()
    [message] = told
    assert message.startswith("rank 1 ended before the others" if comes else "rank 1 (never came) is lost")


def test_rank_that_ends_before_all_have_met_ends_those_who_wait_for_it(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with watch(0, 2):
        with watch(1, 2) as second:
            second._connected.wait(20)
        deadline = time.monotonic() + 20
        while not statuses and time.monotonic() < deadline:
            time.sleep(0.05)
    assert statuses == [EXIT_ERROR]
    assert told == ["rank 1 ended before the others; its own message says why."]


@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rank_that_fails_ends_those_whose_collectives_do_not_notice(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As on two hosts under NCCL, after a time for ranks that all fail. One that ends without an error ends nobody."""
    monkeypatch.setattr(lost_rank, "SECONDS_TO_FAIL", 1.5)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with watch(0, 2):
        with contextlib.suppress(ZeroDivisionError), watch(1, 2) as second:
            second._connected.wait(20)
            _ = 1 / (not fails)
        time.sleep(1)
        assert not (statuses or told)
        deadline = time.monotonic() + (20 if fails else 2)
        while not statuses and time.monotonic() < deadline:
            time.sleep(0.05)
    assert statuses == [EXIT_ERROR] * fails
    assert told == ["rank 1 ended before the others; its own message says why."] * fails


@pytest.mark.parametrize("fails", [True, False])
def test_nobody_ends_before_rank_0_which_may_still_write(
    store: TCPStore, watch: Callable[..., RankWatch], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    order: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with watch(1, 2) as second:
        thread = threading.Thread(target=lambda: (second.wait_for_first(), order.append("1 ends")))
        with contextlib.suppress(ZeroDivisionError), watch(0, 2) as first:
            thread.start()
            time.sleep(1)
            order.append("0 has written")
            _ = 1 / (not fails)
            first.wait_for_first()
        thread.join(20)
    assert order == ["0 has written", "1 ends"]


def test_what_was_gathered_is_not_kept(store: TCPStore, watch: Callable[..., RankWatch]) -> None:
    with watch(0, 2) as first, watch(1, 2) as second:
        assert second.gather("of step 1", "x" * 1000) == []
        assert first.gather("of step 1", "y") == ["y", "x" * 1000]
        assert [Store("127.0.0.1", store.port).value(f"of step 1/{rank}") for rank in (0, 1)] == ["", ""]
        second.gather("of step 2", "x")
        put = Store.set
        gone = lambda self, key, value: put(self, key, value) if value else _fail()  # noqa: E731
        with pytest.MonkeyPatch.context() as patched:  # the connection is cut when all is known
            patched.setattr(Store, "set", gone)
            assert first.gather("of step 2", "y") == ["y", "x"]


def test_connection_that_breaks_is_made_anew(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look, broken = RankWatch._look, threading.Event()

    def breaks_once(self: RankWatch, its: Store) -> None:
        if not broken.is_set():
            broken.set()
            raise RuntimeError("Broken pipe")
        look(self, its)

    monkeypatch.setattr(RankWatch, "_look", breaks_once)
    with watch(0, 2, timeout_seconds=1) as first, watch(1, 2, timeout_seconds=1):
        time.sleep(2.5)
        assert not first.concludes(BROKEN)
    assert broken.is_set()
    assert told == []


class Cable:
    """What lies between this process and a store; unplugged, it loses what is sent and tells nobody."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._to = self._listener.getsockname()[1], port
        self.plugged = threading.Event()
        self.plugged.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, there = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.plugged.wait()  # as TCP sends again what was lost
                to.sendall(data)


@pytest.fixture
def cable(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Cable:
    between = Cable(store.port)
    monkeypatch.setenv("MASTER_PORT", str(between.port))
    monkeypatch.setattr(lost_rank, "STORE_SECONDS", 0.3)
    return between


BREAKS = [pytest.param(True, id="its collective breaks"), pytest.param(False, id="it waits", marks=pytest.mark.slow)]


@pytest.mark.parametrize("breaks", BREAKS)
def test_rank_whose_host_is_cut_off_ends_too(
    cable: Cable,
    watch: Callable[..., RankWatch],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    breaks: bool,
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with watch(1, 2, timeout_seconds=1) as second:
        assert second._connected.wait(20)
        cable.plugged.clear()
        began = time.monotonic()
        if breaks:
            assert second.concludes(BROKEN)
        while not (breaks or statuses) and time.monotonic() < began + 20:
            time.sleep(0.05)
        assert time.monotonic() < began + 10
    assert breaks or statuses == [EXIT_ERROR]
    assert len(told) == 1 and told[0].startswith("rank 0 is lost: the launcher of its host, 127.0.0.1")


def test_who_waits_at_a_store_that_is_cut_off_gives_up(
    cable: Cable, watch: Callable[..., RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with watch(1, 2, timeout_seconds=0.5, local_rank=1) as second:
        assert second._connected.wait(20)
        cable.plugged.clear()
        with pytest.raises(DistNetworkError, match="timed out waiting for the store"), second.preparing():
            pytest.fail("nobody said that the first one went")


@pytest.mark.slow
def test_cut_that_is_mended_in_time_changes_nothing(
    cable: Cable, watch: Callable[..., RankWatch], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watch(0, 2, timeout_seconds=4) as first, watch(1, 2, timeout_seconds=4) as second:
        for its in (first, second):
            assert its._connected.wait(20)
        cable.plugged.clear()
        time.sleep(1.5)
        cable.plugged.set()
        time.sleep(4)
        assert not first.concludes(BROKEN) and not second.concludes(BROKEN)
    assert told == []


def test_port_that_another_run_has_taken_concludes_nothing(
    store: TCPStore, watch: Callable[..., RankWatch], told: list[str]
) -> None:
    with watch(0, 2) as first:
        error = DistNetworkError("The server socket has failed to bind. code: -98, name: EADDRINUSE")
        assert not first.concludes(error)
    assert told == []


def _fail() -> bool:
    raise DistNetworkError("cut")
