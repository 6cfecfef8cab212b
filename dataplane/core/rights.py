"""The three rights that a client's token can have, and the check that each verb makes.

`read` allows listing and reading, `write` also storing, making and releasing objects, `admin` everything. The right
that a verb needs stands in the tables of `server/flight_server.py`, `server/actions.py` and `server/do_exchange.py`.
"""

from enum import IntEnum

from dataplane.core.errors import ForbiddenError


class Right(IntEnum):
    """A right of a client. The rights are ordered: each right includes the lower rights."""

    READ = 1
    """The right to list and read what the node holds, or can make again from refs."""
    WRITE = 2
    """The right to store, make and release objects."""
    ADMIN = 3
    """The right to do everything. No verb needs more than WRITE at present."""

    @property
    def word(self) -> str:
        """The name of the right in token files and messages: `read`, `write` or `admin`."""
        return self.name.lower()


RIGHTS = {right.word: right for right in Right}
"""The rights by the name that token files use."""


def check_right(has: Right, wanted: Right, verb: str) -> None:
    """Check that the right `has` includes the right `wanted`. Raises ForbiddenError, which names the verb, if not."""
    if has < wanted:
        raise ForbiddenError(
            f"{verb} needs the right {wanted.word!r}, this token has {has.word!r}; use a token with {wanted.word!r}"
        )
