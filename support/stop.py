"""Signals that stop a run: they set a flag, and end what a reward has forked."""

import contextlib
import os
import signal
from typing import Any

from support.ranks import all_list, rank


class StopSignals:
    """Within `with`, Ctrl-C, SIGTERM and SIGHUP (a lost terminal) set a flag, and do nothing else.

    The program looks at the flag after each step. Launchers repeat signals, so a second one means
    the same. SIGQUIT (Ctrl and a backslash) ends the program at once.
    """

    def __enter__(self) -> "StopSignals":
        self.flag, self.before = False, {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                self.before[number] = signal.signal(number, self.set_flag)
        return self

    def __exit__(self, *_error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def set_flag(self, _number: int, _frame: Any) -> None:
        if not self.flag and rank() == 0:
            # print fails if the signal arrives during another write to the same stream.
            with contextlib.suppress(OSError):  # the terminal is lost
                os.write(2, b"\nstopping after this step; Ctrl-\\ ends at once\n")
        self.flag = True

    def asked(self) -> bool:
        """Whether any rank was asked to stop. Every rank must call this."""
        return any(all_list(self.flag))


# SIGTERM ends a process that a reward has forked: time limits rely on it.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
