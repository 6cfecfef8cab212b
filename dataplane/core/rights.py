"""What a caller may do: three rights, each including those before it, and the check of every verb."""

from enum import IntEnum

from dataplane.core.errors import ForbiddenError


class Right(IntEnum):
    """Ordered: who may write may also read, who is admin may do everything."""

    READ = 1
    """See and read what the node holds, or can make again from refs."""
    WRITE = 2
    """Store, make and release objects."""
    ADMIN = 3
    """What touches everybody."""

    @property
    def word(self) -> str:
        """As token files and messages spell it."""
        return self.name.lower()


RIGHTS = {right.word: right for right in Right}


def check_right(has: Right, wanted: Right, verb: str) -> None:
    """ForbiddenError unless `has` includes what the verb wants."""
    if has < wanted:
        raise ForbiddenError(
            f"{verb} needs the right {wanted.word!r}, this token has {has.word!r}; use a token with {wanted.word!r}"
        )
