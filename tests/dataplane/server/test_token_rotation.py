"""Tests that a token which is replaced while clients are connected concerns those who use it, and no other caller."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.client.reader import Reader
from dataplane.client.writer import Writer
from dataplane.core.errors import UnauthenticatedError
from dataplane.core.refs import Ref
from tests.dataplane.serving import serving

OLD, NEW, STAYS = "old-0123456789abcdef", "new-0123456789abcdef", "stays-0123456789abcdef"
BIG = np.resize(np.arange(251, dtype=np.uint8), 1 << 20)
"""An object that a client writes in place, over a stream that stays open."""


def rewrite(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def rename(path: Path, lines: Sequence[str]) -> None:
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    rewrite(new, lines)
    new.rename(path)


def put_array(writer: Writer, name: str) -> Ref:
    with writer.create(name, "uint8", BIG.shape) as place:
        place.array[:] = BIG
    assert place.ref is not None
    return place.ref


def as_(token: str) -> Credentials:
    return Credentials(token=token)


@pytest.mark.parametrize("replace", [rewrite, rename])
def test_a_token_that_is_replaced_is_refused_at_once_and_no_other_caller_notices(
    tmp_path: Path, replace: Callable[[Path, Sequence[str]], None]
) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    rewrite(path, [f"{OLD} write", f"{STAYS} write"])
    with (
        serving(tmp_path / "log", "--token-file", str(path)) as served,
        Client(served.uri, timeout_s=20, credentials=as_(OLD)) as old,
        Client(served.uri, timeout_s=20, credentials=as_(STAYS)) as other,
        Reader(served.uri, timeout_s=20, credentials=as_(OLD)) as old_reader,
        Reader(served.uri, timeout_s=20, credentials=as_(STAYS)) as reader,
        Writer(served.uri, timeout_s=20, credentials=as_(OLD)) as old_writer,
        Writer(served.uri, timeout_s=20, credentials=as_(STAYS)) as writer,
    ):
        old.open_scope("old")
        other.open_scope("other")
        refs = [old.put(BIG, name="of old"), other.put(BIG, name="of other", scope="other")]
        for each, name in ((old_writer, "old/0"), (writer, "other/0")):
            refs.append(put_array(each, name))
        views = [*old_reader.resolve(refs), *reader.resolve(refs)]
        before = other.stat()

        replace(path, [f"{NEW} write", f"{STAYS} write"])

        for call in (
            old.stat,
            lambda: old.put(b"small", name="small"),
            lambda: old.put(BIG, name="big"),
            lambda: old.get(refs[0]),
            lambda: old.open_scope("another"),
            lambda: old_reader.resolve(refs[:1]),
            lambda: put_array(old_writer, "old/1"),
        ):
            with pytest.raises(UnauthenticatedError, match="does not know the token"):
                call()
        for view in views:
            assert np.array_equal(view, BIG)
        assert np.array_equal(reader.resolve(refs)[0], BIG)
        refs += [other.put(BIG, name="again", scope="other"), put_array(writer, "other/1")]
        after = other.stat()
        assert {key: after[key] for key in ("num_readers", "incarnation")} == {
            key: before[key] for key in ("num_readers", "incarnation")
        }
        with Client(served.uri, timeout_s=20, credentials=as_(NEW)) as new:
            assert new.put(BIG, name="of new").nbytes == BIG.nbytes
            assert new.get(refs[0]) == BIG.tobytes()
        with Reader(served.uri, timeout_s=20, credentials=as_(NEW)) as new_reader:
            assert np.array_equal(new_reader.resolve(refs[:1])[0], BIG)
        del view, views
    assert OLD not in served.log() and NEW not in served.log()
