"""Stopping: signals set a flag, and the program looks at it where nothing is lost."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from support.distributed import STOP_SIGNALS, all_max, rank


class Stopped(SystemExit):
    """A stop was asked for. The program ends with status 130, as shells expect after Ctrl-C."""


class StopSignal:
    """A flag that Ctrl-C, SIGTERM and SIGHUP (a lost terminal) set.

    The program looks at the flag when it can stop without a loss. Launchers repeat signals, so a
    second one means the same. SIGQUIT (Ctrl and a backslash) ends the program at once.
    """

    asked = False

    def listen(self) -> None:
        """Begin to answer the signals, until distributed.session ends. No stop is asked for yet."""
        self.asked = False
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                signal.signal(number, self.ask)

    def ask(self, _number: int, _frame: Any) -> None:
        if not self.asked:
            self.asked = True
            if rank() == 0:
                # print fails if the signal arrives during another write to the same stream.
                with contextlib.suppress(OSError):  # a closed pipe
                    os.write(2, b"\nstopping: what is whole is kept (Ctrl-\\: at once)\n")

    def leave_if_asked(self) -> None:
        """Raise Stopped on every rank if any rank was asked to stop. Every rank must call this."""
        if all_max(int(self.asked)) > 0:
            self.asked = False  # for what a notebook does next
            raise Stopped(130)

    def together(self, work: Iterator) -> Iterator:
        """Iterate over `work` until a stop is asked for. Then raise Stopped on every rank.

        It ends in a collective: a rank that breaks out of the loop leaves the others waiting.
        """
        with contextlib.closing(work):
            for item in work:
                yield item
                if self.asked:
                    break
        self.leave_if_asked()


stop = StopSignal()  # one for the process, as signals are
# SIGTERM ends a process that a reward has forked: time limits rely on it.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
