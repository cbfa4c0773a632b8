"""Locks on files, which go with the process that has them. Without POSIX, taking one fails as a full disk would."""

from __future__ import annotations

import errno


def take_lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file. Raises BlockingIOError where somebody holds it, OSError where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has no file locks, so nothing is kept on its disk") from None
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
