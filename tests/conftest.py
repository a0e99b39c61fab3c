"""What holds for every test."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# In CI the same inputs every time: a red run must be about the change. Elsewhere new inputs every time.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# What a shell runs in its background begins with SIGINT ignored, and so do its children: no Ctrl-C would reach them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
