"""Tests of the offsets that are read from tar headers, and of the messages for files that are torn, compressed or no
tars."""

import gzip
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.tar_index import TarIndex, TarMember, _plain_header, index_tar
from tests.dataplane.shards import write_tar


def index(path: Path) -> TarIndex:
    return index_tar(RangeFile(str(path), path.stat().st_size))


def samples(found: TarIndex) -> list[list[TarMember]]:
    return [[member for _, member in found.sample(number)] for number in range(found.num_samples)]


def keys(found: TarIndex) -> list[str]:
    return [sample[0].key for sample in samples(found)]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_offsets_are_those_of_the_bytes_in_every_tar_format(tmp_path: Path, tar_format: int) -> None:
    folder = "x" * 60 + "/" + "y" * 60
    members = {f"{folder}/{at:04d}.{ext}": bytes([at]) * (at * 300) for at in range(5) for ext in ("a.png", "json")}
    if tar_format != tarfile.USTAR_FORMAT:
        members |= {f"{'z' * 140}/é.png": b"unicode"}
    path = write_tar(tmp_path / "a.tar", members, tar_format)
    found = index(path)
    assert found.flaws == ()
    read = {m.path: path.read_bytes()[m.offset : m.offset + m.nbytes] for sample in samples(found) for m in sample}
    assert read == members
    assert samples(found)[0][0].key == f"{folder}/0000"
    assert samples(found)[0][0].extension == "a.png"


def test_folders_and_links_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"data")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.png").symlink_to("0.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("folder", "0.png", "link.png"):
            tar.add(tmp_path / name, arcname=f"./{name}")
    assert [member.path for sample in samples(index(tmp_path / "a.tar")) for member in sample] == ["0.png"]


@pytest.mark.parametrize("folder", ["", "./"])
def test_a_torn_shard_keeps_the_samples_before_the_tear(tmp_path: Path, folder: str) -> None:
    members = {f"{folder}{at}.{ext}": b"x" * 600 for at in range(4) for ext in ("png", "json")}
    path = write_tar(tmp_path / "a.tar", members)
    whole = index(path)
    assert keys(whole) == ["0", "1", "2", "3"]
    last = samples(whole)[3][1]
    path.write_bytes(path.read_bytes()[: last.offset + 100])
    torn = index(path)
    assert keys(torn) == ["0", "1", "2"]
    assert [(flaw.offset, flaw.key) for flaw in torn.flaws] == [(last.offset - 512, "3")]
    assert "torn" in torn.flaws[0].reason


def test_a_shard_without_an_end_marker_and_one_with_a_damaged_header_are_reported(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{at}.png": b"x" * 512 for at in range(3)})
    data = path.read_bytes()
    path.write_bytes(data[: 3 * 1024])
    assert keys(index(path)) == ["0", "1", "2"]
    assert "end-of-archive" in index(path).flaws[0].reason
    path.write_bytes(data[:1024] + b"garbage!" * 64 + data[1536:])
    assert keys(index(path)) == ["0"]
    assert index(path).flaws[0].offset == 1024


def test_two_members_of_one_extension_in_a_sample_are_a_flaw(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a/0.png": b"1", "a/0.PNG": b"2", "b/0.png": b"3"})
    found = index(path)
    assert keys(found) == ["b/0"]
    assert "two members 'png'" in found.flaws[0].reason


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(b"x" * 2000, mtime=0), r"is compressed \(gzip\).*decompress it"),
        (b"no tar at all" * 100, "is not a tar"),
    ],
    ids=["empty", "gzip", "text"],
)
def test_what_is_no_uncompressed_tar_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DatasetError, match=message):
        index(tmp_path / "a.tar")


def test_a_member_of_negative_size_ends_the_scan_with_a_flaw(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{at}.png": b"x" * 512 for at in range(3)})
    data = bytearray(path.read_bytes())
    data[1024 + 124 : 1024 + 136] = tarfile.itn(-512, 12, tarfile.GNU_FORMAT)  # type: ignore[attr-defined]
    checksum = sum(data[1024 : 1024 + 148]) + sum(data[1024 + 156 : 1536]) + 8 * 32
    data[1024 + 148 : 1024 + 156] = b"%06o\0 " % checksum
    path.write_bytes(data)
    found = index(path)
    assert keys(found) == ["0"]
    assert "-512 bytes" in found.flaws[0].reason


def test_a_pax_size_of_odd_digits_is_ignored(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("0.png")
        info.pax_headers = {"size": "\u00b2"}
        tar.addfile(info)
    assert keys(index(tmp_path / "a.tar")) == ["0"]


@settings(max_examples=300, deadline=None)
@given(
    st.binary(min_size=1, max_size=90).filter(lambda name: b"\0" not in name),
    st.integers(0, 8**11 - 1),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT]),
    st.sampled_from([tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE]),
    st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=2),
)
def test_the_fast_path_reads_headers_as_tarfile_does_or_leaves_them_to_it(
    name: bytes, size: int, tar_format: int, kind: bytes, damage: list[tuple[int, int]]
) -> None:
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    info.size, info.type = size, kind
    header = bytearray(info.tobuf(tar_format, "utf-8", "surrogateescape")[-512:])
    for place, value in damage:
        header[place] = value
    found = _plain_header(bytes(header))
    if found is not None:
        wanted = tarfile.TarInfo.frombuf(bytes(header), "utf-8", "surrogateescape")
        assert (found.name, found.size, found.isreg()) == (wanted.name, wanted.size, wanted.isreg())
    elif not damage and tar_format == tarfile.USTAR_FORMAT:
        assert kind != tarfile.REGTYPE or name.endswith(b"/")
