"""Private folders for the Unix sockets of services that are started together."""

import os
import tempfile

from specwire.errors import FailedPreconditionError

_MAX_PARENT_BYTES = 64
"""Of a socket's 107; the rest is for the folder's name and the socket's."""


def socket_folder(prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """A new private folder for Unix sockets: in TMPDIR or the like, or in /tmp where paths there would be too long for a socket.

    Raises:
        FailedPreconditionError: none can be made.
    """
    parent = "any folder for temporary files"
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            parent = "/tmp"
        return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    except OSError as error:
        raise FailedPreconditionError(
            f"no folder for sockets can be made in {parent} ({error.strerror}); set TMPDIR to a folder that can be written"
        ) from error
