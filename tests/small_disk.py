"""A disk that is full, for this process: the system refuses what is written beyond a size, as it refuses any user."""

import resource
import sys
from contextlib import contextmanager


@contextmanager
def no_space(size):
    """This process can write no file beyond `size` bytes: a real OSError, as of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python (3.11) takes a byte code file that was cut short for written: what is imported for the first time in here
    # would be broken for all that come later
    writes_byte_code = not sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = not writes_byte_code
