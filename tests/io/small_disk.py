"""A disk that is full, for this process: the system refuses what is written beyond a size, as it refuses any user."""

import resource
from contextlib import contextmanager


@contextmanager
def no_space(size):
    """This process can write no file beyond `size` bytes: a real OSError, as of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
