"""Imported by a command that a test stops half way: answers leave it slowly."""

import signal
import time

from decode import ledger

# Tests that run in a shell's background have it ignored, and so would the command.
signal.signal(signal.SIGINT, signal.default_int_handler)
added = ledger.Ledger.add


def add_slowly(self, entry):
    added(self, entry)
    time.sleep(0.5)


ledger.Ledger.add = add_slowly
