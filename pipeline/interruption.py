"""When a stage is to stop: SIGINT, SIGTERM, a terminal that closes, or the death of the DVC that started it.

Before training nothing can be lost, and a signal stops the stage wherever it is. Training goes on to the next poll: between
two micro-batches or two decoded tokens all weights are those of the last optimizer step. A second signal does not wait.
The module cannot change a result: it ends the process or does nothing.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from pipeline.processes import TORCHRUN

# Not SIGTERM: where a whole process group is ended, the parent's death must not count as the second signal.
PARENT_DIED = signal.SIGUSR2
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The process is to end. No Exception, so that no library takes it for a failure of its own."""

    def __init__(self, received: signal.Signals):
        super().__init__(received.name)
        self.received = received

    @property
    def reason(self) -> str:
        """For a sentence: stopped by ..."""
        return "the end of the DVC that started it" if self.received == PARENT_DIED else self.received.name

    @property
    def exit_status(self) -> int:
        """As a shell has it: 128 + the signal's number."""
        return 128 + self.received


class _Asked:
    """What signals have asked of this process. Signals belong to the process, so there is one of these."""

    received: signal.Signals | None = None
    waits_for_poll = True


@contextmanager
def listening() -> Iterator[None]:
    """Answers signals as this module says, at polls; where DVC runs the process, the death of DVC is one.

    Raises:
        Interrupted: DVC has died already.
    """
    before = {number: signal.getsignal(number) for number in (*STOPPING, PARENT_DIED)}
    for number, answer in before.items():
        if answer is not signal.SIG_IGN:  # `nohup` ignores SIGHUP, and a shell's `&` SIGINT: that is to stay
            signal.signal(number, _answer)
    _Asked.received, _Asked.waits_for_poll = None, True
    ended = threading.Event()
    try:
        if TORCHRUN in os.environ:
            threading.Thread(target=_tell_of_death, args=(psutil.Process(os.getppid()), ended), daemon=True).start()
        elif "DVC_STAGE" in os.environ:
            threading.Thread(target=_tell_of_death, args=(_dvc(), ended), daemon=True).start()
        yield
    finally:
        ended.set()
        _Asked.received = None
        for number, answer in before.items():
            signal.signal(number, answer)


def stop_anywhere() -> None:
    """From now on a first signal is answered wherever it comes.

    Raises:
        Interrupted: one has come.
    """
    _Asked.waits_for_poll = False
    poll()


def wait_for_polls() -> None:
    """From now on a first signal is answered at the next `poll`."""
    _Asked.waits_for_poll = True


def received() -> signal.Signals | None:
    """The first signal that has come, if any."""
    return _Asked.received


def poll() -> None:
    """A place to stop at.

    Raises:
        Interrupted: a signal has come.
    """
    if _Asked.received is not None:
        raise Interrupted(_Asked.received)


def _dvc() -> psutil.Process:
    """The DVC that runs this process: the nearest ancestor without the variable that DVC gives to whatever it starts.

    It need not be the parent: DVC starts a shell, and not every shell makes way for its last command.

    Raises:
        Interrupted: it has died. DVC runs a stage in its own process group; whoever takes over an orphan is in another.
    """
    for ancestor in psutil.Process().parents():
        try:
            if os.getpgid(ancestor.pid) != os.getpgid(0):
                break
            if "DVC_STAGE" not in ancestor.environ():
                return ancestor
        except (ProcessLookupError, psutil.NoSuchProcess):  # a shell that ended just now
            continue
    raise Interrupted(PARENT_DIED)


def _tell_of_death(dvc: psutil.Process, ended: threading.Event) -> None:
    """Signals the main thread once the process is no more; looks twice a second, until `ended`."""
    while not ended.wait(0.5):
        if not _lives(dvc):
            signal.pthread_kill(threading.main_thread().ident, PARENT_DIED)
            return


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _answer(number: int, _: FrameType | None) -> None:
    received, before = signal.Signals(number), _Asked.received
    if before is None or before == PARENT_DIED:
        _Asked.received = received
    elif received != PARENT_DIED:
        signal.signal(received, signal.SIG_DFL)
        os.kill(os.getpid(), received)
    if before is not None:
        return
    if not _Asked.waits_for_poll:
        raise Interrupted(received)
    # not print: a handler may come in the middle of one
    os.write(2, f"{received.name}: stopping where nothing is lost; once more: at once.\n".encode())
