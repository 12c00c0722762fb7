"""Spool and courier without MLflow: order, once, crashes, a store that is away, slow, or refuses."""

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline import sync_tracking
from pipeline.tracking import tracker as tracker_module
from pipeline.tracking.delivery import Courier, batches, deliver, deliver_earlier
from pipeline.tracking.destination import Destination
from pipeline.tracking.runs import Refused, Runs, Unavailable
from pipeline.tracking.spool import KEEP_SECONDS, Entry, Spool, spools
from pipeline.tracking.tracker import Tracker, start_run


class Double:
    """A store that keeps what it is given, and fails when told to.

    answers: how many more calls it takes before nobody answers; refuses: what it never takes.
    """

    def __init__(self, answers: float = float("inf"), refuses: Callable[[Entry], bool] = lambda entry: False):
        self.answers = answers
        self.refuses = refuses
        self.calls: list[list[Entry]] = []
        self.opened: list[str] = []

    @property
    def taken(self) -> list[Entry]:
        return [entry for call in self.calls for entry in call]

    @property
    def steps(self) -> list[int]:
        return [entry["step"] for entry in self.taken if entry["do"] == "metrics"]

    @property
    def statuses(self) -> list[str]:
        return [entry["status"] for entry in self.taken if entry["do"] == "status"]

    def _answer(self) -> None:
        if self.answers <= 0:
            raise Unavailable("away")
        self.answers -= 1

    def knows(self, run_id: str) -> bool:
        return any(run_id == f"mlflow-{run}" for run in self.opened)

    def open_runs(self, run: str, entry: Entry) -> Runs:
        self._answer()
        self.opened.append(run)
        return Runs(f"mlflow-{run}", "mlflow-parent")

    def deliver(self, entries: Sequence[Entry], runs: Runs, folder: Path) -> list[str]:
        self._answer()
        if any(map(self.refuses, entries)):
            raise Refused("never")
        self.calls.append(list(entries))
        return []


def filled(folder: Path, run: str = "r1", steps: int = 3, ended: bool = True) -> Spool:
    """A spool as a stage of some steps leaves it."""
    spool = Spool(folder, run)
    spool.append("create", experiment="e", stage="sft", parent={"key": "k", "name": "n"})
    for step in range(steps):
        spool.append("metrics", on="run", step=step, values={"loss": float(step)})
    if ended:
        spool.append("status", status="FINISHED")
    return spool


@pytest.fixture
def said() -> list[str]:
    return []


def test_entries_arrive_in_order_and_once_over_any_number_of_failures(tmp_path: Path, said: list[str]) -> None:
    """The store goes away after each call: 1 creation, 3 steps apart (tags between), 1 end."""
    spool = Spool(tmp_path, "r1")
    spool.append("create", experiment="e", stage="sft", parent={"key": "k", "name": "n"})
    for step in range(3):
        spool.append("metrics", on="run", step=step, values={"loss": 1.0})
        spool.append("tags", tags={"step": str(step)})
    store = Double()
    for _ in range(20):
        store.answers = 2
        try:
            deliver(spool, store, said.append)
        except Unavailable:
            continue
        break
    assert store.steps == [0, 1, 2]
    assert [entry["do"] for entry in store.taken] == ["create", *["metrics", "tags"] * 3]
    assert spool.waiting() == 0


def test_what_came_meanwhile_goes_in_one_request() -> None:
    """At most 1000 metrics, the same run, and nothing overtakes anything."""

    def metrics(step: int, count: int, on: str = "run") -> Entry:
        return {"do": "metrics", "on": on, "step": step, "values": dict.fromkeys(map(str, range(count)), 1.0)}

    tags = {"do": "tags"}
    entries = [metrics(0, 400), metrics(1, 600), metrics(2, 1), metrics(3, 1, "parent"), tags, metrics(4, 1)]
    found = list(batches([(entry, 10 * number) for number, entry in enumerate(entries, 1)], 0))
    assert [([start for _, start in batch], end) for batch, end in found] == [
        ([0, 10], 20),
        ([20], 30),
        ([30], 40),
        ([40], 50),
        ([50], 60),
    ]


def test_one_bad_entry_costs_no_other_and_is_tried_again(tmp_path: Path, said: list[str]) -> None:
    spool = filled(tmp_path, steps=5)
    store = Double(refuses=lambda entry: entry.get("step") in (1, 3))
    assert deliver(spool, store, said.append) == 5
    assert store.steps == [0, 2, 4] and store.statuses == ["FINISHED"]
    assert spool.waiting() == 2
    assert said == ["MLflow did not take an entry of kind metrics (never); it is kept, and tried again later."]
    store.refuses = lambda entry: entry.get("step") == 3
    assert deliver(spool, store, said.append, again=True) == 1
    store.refuses = lambda entry: False
    assert deliver(spool, store, said.append, again=True) == 1
    assert store.steps == [0, 2, 4, 1, 3] and spool.waiting() == 0


def test_a_crash_between_delivering_and_noting_repeats_one_request(tmp_path: Path, said: list[str]) -> None:
    """tests/test_tracking.py shows that MLflow makes one row of both."""
    spool = filled(tmp_path)
    before = spool.delivered
    store = Double()
    deliver(spool, store, said.append)
    spool.note(before)
    deliver(spool, store, said.append)
    first, second = store.taken[: len(store.taken) // 2], store.taken[len(store.taken) // 2 :]
    assert first == second  # the same times too


def test_another_store_gets_everything(tmp_path: Path, said: list[str]) -> None:
    spool = filled(tmp_path, ended=False)
    deliver(spool, Double(), said.append)
    spool.append("metrics", on="run", step=3, values={"loss": 1.0})
    other = Double()
    deliver_earlier(spool, other, said.append)
    assert other.steps == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"do": "metrics", "on": "ru', b"\0" * 40, b'{"do": \n{"do": "tags"}\n'])
def test_a_line_that_a_crash_left_half_written_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    spool = filled(tmp_path, ended=False)
    whole = spool.file.read_bytes()
    with spool.file.open("ab") as stream:
        stream.write(torn)
    spool.repair()
    assert spool.file.read_bytes() == whole
    spool.append("status", status="KILLED")
    assert [entry["do"] for entry, _ in spool.read()][-2:] == ["metrics", "status"]


def test_a_full_disk_leaves_whole_lines_and_does_not_stop_the_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size of files is limited for a while: the system writes the part of the line that fits."""
    spool = filled(tmp_path, ended=False)
    tracker = Tracker(spool)
    whole = spool.file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        tracker.log_metrics(7, {"loss": 1.0})
        tracker.log_metrics(8, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert spool.file.read_bytes() == whole
    tracker.log_metrics(9, {"loss": 1.0})
    assert [entry["step"] for entry, _ in spool.read() if entry["do"] == "metrics"] == [0, 1, 2, 9]
    tracker.end("FINISHED")
    printed = capsys.readouterr().out
    assert printed.count("cannot be written") == 1 and "MLflow misses 2 entries" in printed


def test_a_dead_run_is_killed_and_a_run_that_said_its_end_is_not(tmp_path: Path, said: list[str]) -> None:
    store = Double()
    dead, ended = filled(tmp_path, "r1", ended=False), filled(tmp_path, "r2")
    for spool in (dead, ended):
        deliver_earlier(spool, store, said.append)
    assert store.statuses == ["KILLED", "FINISHED"]
    _, _, _, last_step, killed = store.taken[:5]
    assert killed["ended"] == last_step["at"]


def test_a_spool_that_another_process_delivers_is_left_to_it(tmp_path: Path, said: list[str]) -> None:
    spool = filled(tmp_path)
    with Spool(tmp_path, "r1").lock:
        assert deliver_earlier(spool, Double(), said.append) == 0
    assert deliver_earlier(spool, Double(), said.append) == 5


def test_delivered_spools_are_kept_for_a_week(tmp_path: Path, said: list[str]) -> None:
    for run, age in (("new", KEEP_SECONDS / 2), ("old", KEEP_SECONDS * 2)):
        spool = filled(tmp_path, run)
        deliver(spool, Double(), said.append)
        os.utime(spool.file, (time.time() - age,) * 2)
        deliver_earlier(spool, Double(), said.append)
    assert [spool.run for spool in spools(tmp_path)] == ["new"]
    undelivered = filled(tmp_path, "old")
    os.utime(undelivered.file, (0, 0))
    undelivered.forget_if_old()
    assert undelivered.file.exists()


def begin(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    connect: Callable[[], Double],
    wait: float = 10,
    resume: str | None = None,
) -> Tracker:
    """`start_run` with a double for MLflow."""
    monkeypatch.setattr(tracker_module.Store, "connect", lambda uri, lock_file: connect())
    to = Destination("http://127.0.0.1:9", "e", folder, wait)
    return start_run(to, "ppo", "key", "seed 1", {"lr": "1"}, {}, {"a": "b"}, resume)


def test_a_store_that_hangs_slows_neither_the_start_nor_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first request takes for ever; 200 steps of 60 metrics and the end of the stage do not."""
    hung = threading.Event()

    def connect() -> Double:
        hung.wait()
        return Double()

    started = time.monotonic()
    tracker = begin(monkeypatch, tmp_path, connect, wait=0.5)
    for step in range(200):
        tracker.log_metrics(step, dict.fromkeys(map(str, range(60)), 1.0))
    tracker.flush()
    logged = time.monotonic() - started
    tracker.end("FINISHED")
    ended = time.monotonic() - started
    hung.set()
    assert logged < 10 and 0.5 <= ended - logged < 5
    assert (
        "207 entries of this stage have not reached MLflow yet" in capsys.readouterr().out
    )  # 200, and what a start writes


def test_the_next_stage_sends_what_was_left_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> Double:
        raise Unavailable("connection refused")

    first = begin(monkeypatch, tmp_path, away)
    first.log_metrics(0, {"loss": 1.0})
    first.end("FINISHED")
    printed = capsys.readouterr().out
    assert printed.count("MLflow does not answer (connection refused)") == 1 and "make sync-tracking" in printed
    store = Double()
    second = begin(monkeypatch, tmp_path, lambda: store)
    second.log_metrics(5, {"loss": 1.0})
    second.end("FINISHED")
    assert store.steps == [0, 5] and store.opened == [first.run, second.run]
    assert "have not reached" not in capsys.readouterr().out


def test_steps_computed_again_after_a_resume_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report mlflow/mlflow#4248: saved at 10, killed at 17, resumed from 10: one run, one row per step.

    A run that did not say how it ended is KILLED before it goes on.
    """
    store = Double()
    killed = begin(monkeypatch, tmp_path, lambda: store)
    for step in range(17):
        killed.log_metrics(step, {"loss": step / 2})
    killed._courier.stop(10)  # the process is gone; nobody called `end`
    again = begin(monkeypatch, tmp_path, lambda: store, resume=killed.run)
    for step in range(10, 20):
        again.log_metrics(step, {"loss": step / 2})
    again.end("FINISHED")
    assert again.run == killed.run and store.opened == [killed.run]
    assert store.steps == list(range(20))
    assert store.statuses == ["RUNNING", "KILLED", "RUNNING", "FINISHED"]


def test_make_sync_tracking_says_what_it_delivered_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Double(answers=0)
    monkeypatch.setattr(
        sync_tracking, "destination", lambda runtime: Destination("http://127.0.0.1:9", "e", tmp_path, 1)
    )
    monkeypatch.setattr(sync_tracking.Store, "connect", lambda uri, lock_file: store)
    filled(tmp_path, "r1")
    filled(tmp_path, "r2", ended=False)
    with pytest.raises(SystemExit, match="1"):
        sync_tracking.main()
    said = "MLflow does not answer: away\nr1: 5 entries are left\nr2: 4 entries are left\n"
    assert capsys.readouterr().out == said
    store.answers = 3  # creation, its entry, the three steps in one; not the end
    with pytest.raises(SystemExit, match="1"):
        sync_tracking.main()
    assert capsys.readouterr().out.endswith("r1: 1 entries are left\nr2: 4 entries are left\n")
    store.answers = 100
    sync_tracking.main()
    said = "r1: 1 entries delivered\nr2: 5 entries delivered\nNothing is waiting: MLflow has everything.\n"
    assert capsys.readouterr().out == said  # r2 never said how it ended: that is the fifth
    assert store.steps == [0, 1, 2] * 2 and store.statuses == ["FINISHED", "KILLED"]


def test_without_a_folder_for_spools_a_stage_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    tracker = begin(monkeypatch, tmp_path / "file" / "tracking", Double)
    tracker.log_metrics(0, {"loss": 1.0})
    tracker.end("FINISHED")
    assert "the stage goes on, and MLflow will not know of it" in capsys.readouterr().out


def test_no_secret_reaches_a_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    spool = Spool(tmp_path, "r1")
    spool.append("params", params={"runtime.tracking_uri": "http://me:hunter2@host:5000/x", "note": "hf_abcdefgh!"})
    ((entry, _),) = spool.read()
    assert entry["params"] == {"runtime.tracking_uri": "http://***@host:5000/x", "note": "***!"}


def test_a_courier_that_fails_by_a_fault_of_ours_lets_the_stage_end(tmp_path: Path) -> None:
    spool = filled(tmp_path)
    courier = Courier(spool, [], lambda: 1 / 0, print)
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        courier.start()
        assert courier.stop(10) == 5
    finally:
        threading.excepthook = hook
