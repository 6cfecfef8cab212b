"""One-line messages for operating-system errors: which file, what is wrong with it, and what to change."""

import errno

_ADVICE = {
    errno.ENOENT: "check the path",
    errno.EACCES: "check who owns it and its mode",
    errno.EPERM: "check who owns it and its mode",
    errno.EISDIR: "wanted a file",
    errno.ENOTDIR: "a part of the path is not a folder; check the path",
    errno.ENOSPC: "make room there, or choose another place",
    errno.EROFS: "choose a place that can be written",
}
"""The advice for an error of the operating system, by its errno."""


def describe_error(error: Exception) -> str:
    """Return the message of an error in one line. For an OSError about a file, the line has the path, the problem and
    advice."""
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return str(error)
    advice = _ADVICE.get(error.errno or 0, "")
    what = f"{str(error.filename)!r}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return f"{what}; {advice}" if advice else what
