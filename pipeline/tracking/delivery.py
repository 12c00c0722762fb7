"""From spools to the store: in order, once, in a thread that nobody waits for."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from filelock import Timeout

from pipeline.tracking.runs import Refused, Runs, Unavailable
from pipeline.tracking.spool import Delivered, Entry, Spool
from pipeline.tracking.store import Store

BATCH = 1000  # metrics; MLflow takes no more in one request
PAUSE = 1.0  # seconds between two looks at the spool: what came meanwhile goes in one request
LONGEST_PAUSE = 60.0  # where nobody answers
Tell = Callable[[str], None]


class Placed(NamedTuple):
    """An entry, and the byte of the spool at which it begins."""

    entry: Entry
    start: int


def deliver(spool: Spool, store: Store, tell: Tell, again: bool = False) -> int:
    """Delivers what waits in a spool, whose lock the caller holds; how many entries arrived.

    again: tries what is held once more, too.

    Raises:
        Unavailable: the store stopped answering; what arrived until then is noted.
    """
    state = spool.delivered
    before = len(state.held)
    count = 0
    for batch, end in batches(spool.read(state.offset), state.offset):
        if batch[0].entry["do"] == "create":
            runs = store.open_runs(spool.run, batch[0].entry)
            state = replace(state, run_id=runs.run, parent_id=runs.parent)
        refused = _hand_over(batch, state, spool, store, tell)
        state = replace(state, offset=end, held=(*state.held, *refused))
        spool.note(state)
        count += len(batch)
    if again and state.held:
        held = [Placed(next(spool.read(start))[0], start) for start in state.held]
        state = replace(state, held=tuple(_one_by_one(held, state, spool, store, tell)))
        spool.note(state)
    return count + before - len(state.held)


def begin_anew_elsewhere(spool: Spool, store: Store) -> None:
    """A store that does not know the run is another than last time, and gets the whole spool.

    Raises:
        Unavailable: the store does not answer.
    """
    run_id = spool.delivered.run_id
    if run_id is not None and not store.knows(run_id):
        spool.note(Delivered())


def batches(entries: Iterable[tuple[Entry, int]], offset: int) -> Iterator[tuple[list[Placed], int]]:
    """(entries, byte after): metrics of one run that follow each other together, all else alone."""
    batch: list[Placed] = []
    for entry, after in entries:
        if batch and not _joins(batch, entry):
            yield batch, offset
            batch = []
        batch.append(Placed(entry, offset))
        offset = after
    if batch:
        yield batch, offset


def _joins(batch: list[Placed], entry: Entry) -> bool:
    first = batch[0].entry
    if not entry["do"] == first["do"] == "metrics" or entry["on"] != first["on"]:
        return False
    return len(entry["values"]) + sum(len(known.entry["values"]) for known in batch) <= BATCH


def _hand_over(batch: list[Placed], state: Delivered, spool: Spool, store: Store, tell: Tell) -> list[int]:
    """Where the entries of the batch begin that the store refused. One bad entry does not cost the others."""
    try:
        for note in store.deliver([placed.entry for placed in batch], Runs(state.run_id, state.parent_id), spool.files):
            tell(note)
    except Refused as error:
        if len(batch) > 1:
            return _one_by_one(batch, state, spool, store, tell)
        if not state.held:
            tell(f"MLflow did not take {_what(batch[0].entry)} ({error}); it is kept, and tried again later.")
        return [batch[0].start]
    return []


def _one_by_one(batch: list[Placed], state: Delivered, spool: Spool, store: Store, tell: Tell) -> list[int]:
    refused: list[int] = []
    for placed in batch:
        refused += _hand_over([placed], replace(state, held=(*state.held, *refused)), spool, store, tell)
    return refused


def _what(entry: Entry) -> str:
    return entry["file"] if entry["do"] == "file" else f"an entry of kind {entry['do']}"


def deliver_earlier(spool: Spool, store: Store, tell: Tell) -> int:
    """Delivers what an earlier run left behind, unless somebody else is at it; how many entries arrived.

    Raises:
        Unavailable: see `deliver`.
    """
    try:
        spool.lock.acquire(timeout=0)
    except Timeout:
        return 0
    try:
        spool.repair()
        spool.end_if_dead()
        if spool.waiting():
            begin_anew_elsewhere(spool, store)
        arrived = deliver(spool, store, tell, again=True)
        spool.forget_if_old()
        return arrived
    finally:
        spool.lock.release()


class Courier:
    """Delivers a stage's spool in the background, after what earlier runs left behind.

    Only `stop` ever waits for it, and only so long. Whoever it is told `connect` for may be away: it tries again.
    """

    def __init__(self, spool: Spool, earlier: list[Spool], connect: Callable[[], Store], tell: Tell):
        self.spool = spool
        self._earlier = earlier
        self._connect = connect
        self._tell = tell
        self._store: Store | None = None
        self._change = threading.Condition()
        self._ending = False
        self._begun = False
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)

    def start(self) -> None:
        """From now on the spool is ours, if nobody has it; and what comes into it is delivered."""
        self._try_lock()
        self._thread.start()

    def stop(self, seconds: float) -> int:
        """Waits until all is delivered, a try fails, or the time is over; how many entries are left for later."""
        with self._change:
            self._ending = True
            self._change.notify_all()
        self._thread.join(seconds)
        return self.spool.waiting()

    def _work(self) -> None:
        pause = PAUSE
        try:
            while True:
                ending = self._ending  # before the round, so that the last round sees all
                delivered = self._round(again=ending)
                if ending:
                    return
                pause = PAUSE if delivered else min(2 * pause, LONGEST_PAUSE)
                with self._change:
                    self._change.wait_for(lambda: self._ending, pause)
        finally:
            self.spool.lock.release()

    def _round(self, again: bool) -> bool:
        try:
            if self._store is None:
                self._store = self._connect()
            while self._earlier:
                deliver_earlier(self._earlier[0], self._store, self._tell)
                self._earlier.pop(0)
            if not self._try_lock():
                raise Unavailable("another process is delivering this run")
            if not self._begun:
                begin_anew_elsewhere(self.spool, self._store)
                self._begun = True
            deliver(self.spool, self._store, self._tell, again)
        except Unavailable as error:
            if not self._failed:
                self._tell(f"MLflow does not answer ({error}); the stage goes on, and its figures are sent later.")
            self._failed = True
            return False
        return True

    def _try_lock(self) -> bool:
        if not self.spool.lock.is_locked:
            try:
                self.spool.lock.acquire(timeout=0)
            except Timeout:
                return False
        return True
