"""One node of the doctor's job: a Python that does what is asked of it through two files. Standard library only.

    python -I slurm_visit_node.py FOLDER NUMBER BOOT

What comes in the file ``NUMBER.in`` goes to the Python's stdin, and what it says into ``NUMBER.out``. It ends when
the folder is gone, and when nobody has written into ``beat`` for a while: whoever asked has been killed, or is out of
reach. What keeps it from its work it says on stderr, which srun carries to the job's log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

LOOK_S, LOOK_MOST_S = 0.1, 1.0
"""Between two looks into the file: longer the longer nothing has come, since the file system serves everybody."""
BEAT_LOOK_S = 2.0
QUIET_S = 120.0
"""So long nobody need ask: the SSH link to the login node may be lost, and made again."""
PIECE_BYTES = 1 << 20


def attend(folder: str, number: str, boot: str) -> None:
    """Carry bytes to and from a Python until there is nobody to carry them for."""
    out = os.path.join(folder, number + ".out")
    try:
        add(out, b"")
    except OSError as error:
        sys.exit(f"cannot write into {folder}: {error.strerror}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # a session of its own: everything that is begun for a question ends with it
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        threading.Thread(target=carry_out, args=(child, out), daemon=True).start()
        carry_in(child, folder, number)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)


def carry_in(child: subprocess.Popen[bytes], folder: str, number: str) -> None:
    """From the file to the Python."""
    assert child.stdin is not None
    path, at = os.path.join(folder, number + ".in"), 0
    beat, heard, looked, pause = b"", time.monotonic(), 0.0, LOOK_S
    while child.poll() is None:
        data = read_from(path, at)
        if data:
            at, pause = at + len(data), LOOK_S
            child.stdin.write(data)
            child.stdin.flush()
            continue
        if time.monotonic() - looked > BEAT_LOOK_S:
            looked = time.monotonic()
            now = read_from(os.path.join(folder, "beat"), 0)
            if now != beat:
                beat, heard = now, looked
            if looked - heard > QUIET_S:
                sys.exit(f"nobody has asked for {QUIET_S:.0f} s")
        time.sleep(pause)
        pause = min(LOOK_MOST_S, 1.1 * pause)
    sys.exit(f"its Python has ended (exit code {child.returncode})")


def carry_out(child: subprocess.Popen[bytes], path: str) -> None:
    """From the Python to the file."""
    assert child.stdout is not None
    try:
        while True:
            data = os.read(child.stdout.fileno(), PIECE_BYTES)
            if not data:
                return
            add(path, data)
    except OSError as error:
        sys.stderr.write(f"cannot write into {os.path.dirname(path)}: {error.strerror}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)


def add(path: str, data: bytes) -> None:
    """Write at a file's end, and have the file system pass it on. The file is there already."""
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_from(path: str, offset: int) -> bytes:
    """What lies behind an offset.

    Raises:
        SystemExit: the folder is gone: nobody will ask any more.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        sys.exit("its folder is gone")
    except OSError as error:  # a file system that stumbles may stand again
        sys.stderr.write(f"{path}: {error.strerror}\n")
        time.sleep(1.0)
        return b""


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: slurm_visit_node.py FOLDER NUMBER BOOT")
    attend(*sys.argv[1:])
