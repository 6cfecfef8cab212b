"""Tests of JSON lines with paths as a dataset, and of the files to which these paths may lead."""

import base64
import json
import os
from pathlib import Path

import fsspec
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.digests import content_digest
from dataplane.core.errors import DatasetError
from dataplane.core.refs import BadMedia, Lineage, Ref
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.formats.media_paths import media_folders
from dataplane.datasets.formats.range_files import RangeFile
from tests.dataplane.shards import RECIPE, encode, noise
from tests.dataplane.tables import write_lines

IMAGES = [encode(noise(at)) for at in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `set/images/0.png` and the other images, and no JSON lines yet."""
    (tmp_path / "set" / "images").mkdir(parents=True)
    for at, data in enumerate(IMAGES):
        (tmp_path / "set" / "images" / f"{at}.png").write_bytes(data)
    return tmp_path / "set"


def datasets_of(pattern: object, *media_roots: Path) -> Catalog:
    return Catalog({"d": [str(pattern)]}, "node", media_roots)


def name(at: int) -> str:
    return f"s/{content_digest(IMAGES[at])}"


def test_lines_are_samples_and_their_media_keys_paths_beside_them(folder: Path) -> None:
    rows = [
        {"question": "one?", "image": "images/0.png", "answer": 1},
        {"images": ["images/1.png", "images/2.png"], "at": {"deep": [1, None]}},
        {"question": "no picture", "images": None},
    ]
    datasets = datasets_of(write_lines(folder / "a.jsonl", rows))
    found = datasets.ingest("d")
    assert (found.num_samples, found.bad) == (3, ())
    one, two, three = datasets.samples("d", [0, 1, 2])
    assert (one.key, one.fields) == ("line 1", {"question": "one?", "answer": 1})
    assert [ref.name for ref in (*one.media, *two.media)] == [name(0), name(1), name(2)]
    assert [ref.lineage.part for ref in two.media if ref.lineage] == ["images/0", "images/1"]
    assert (two.fields, three.media, three.bad) == ({"at": {"deep": [1, None]}}, (), ())
    lineage = two.media[1].lineage
    assert lineage is not None
    place = datasets_of(folder / "a.jsonl").locate(lineage)
    assert (place.file.path, place.file.is_local, place.formats) == (str(folder / "images" / "2.png"), True, ("PNG",))
    for change in ({"offset": 0}, {"offset": 9}, {"part": "images/2"}, {"part": "question/0"}, {"nbytes": 7}):
        with pytest.raises(DatasetError, match="has no medium"):
            datasets.locate(Lineage(**(lineage.to_dict() | change)))


def test_chat_turns_name_media_among_their_contents(folder: Path) -> None:
    contents = [
        {"type": "image", "image": "images/3.png"},
        {"type": "text", "text": "?"},
        {"type": "image", "image": "images/1.png"},
    ]
    path = write_lines(folder / "a.jsonl", [{"messages": [{"role": "user", "content": contents}]}])
    sample = datasets_of(path).samples("d", [0])[0]
    assert [ref.name for ref in sample.media] == [name(3), name(1)]
    assert sample.fields["messages"][0]["content"] == contents


def test_lines_that_cannot_be_used_are_named_by_their_number_and_the_others_served(folder: Path) -> None:
    lines = ['{"image": "images/0.png"}', "", "{broken", "[1]", "\udcff", '{"n": 5}', "   "]
    (folder / "a.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    datasets = datasets_of(folder / "a.jsonl")
    assert datasets.ingest("d").num_samples == 5
    samples = datasets.samples("d", range(5))
    assert [sample.key for sample in samples] == ["line 1", "line 3", "line 4", "line 5", "line 6"]
    reasons = [bad.reason for sample in samples for bad in sample.bad]
    wanted = (
        "line 3 of .* is not JSON",
        "line 4 of .* holds a JSON list; wanted an object",
        "line 5 of .* is not JSON",
    )
    assert len(reasons) == 3
    for reason, words in zip(reasons, wanted):
        with pytest.raises(ValueError, match=words):
            raise ValueError(reason)
    assert samples[4].fields == {"n": 5}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("images/missing.png", "cannot be read: No such file"),
        ("images", "is no file"),
        ("../outside/secret.png", "outside of"),
        ("link.png", "outside of"),
        ("/etc/passwd", "outside of"),
        ("file:///etc/passwd", "outside of"),
        ("http://127.0.0.1/x.png", "is a URL; a node follows none"),
        ("data:image/png,AAAA", "is no data: URL in base64"),
        ("a\0b", "zero byte"),
        ("", "an empty path"),
        (None, "null"),
        (7, "int '7'; wanted a path"),
        ({"bytes": "AAAA"}, "JSON holds no bytes"),
        ([["images/0.png"]], "list .*; wanted a path"),
    ],
)
def test_a_medium_that_cannot_be_had_is_quarantined_with_its_reason(folder: Path, value: object, reason: str) -> None:
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / "secret.png").write_bytes(IMAGES[0])
    (folder / "link.png").symlink_to(folder.parent / "outside" / "secret.png")
    path = write_lines(folder / "a.jsonl", [{"image": value, "images": ["images/1.png"]}])
    sample = datasets_of(path).samples("d", [0])[0]
    assert [ref.name for ref in sample.media] == [name(1)]
    assert [(bad.shard, bad.offset, bad.key) for bad in sample.bad] == [("a.jsonl", 0, "line 1 image/0")]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(sample.bad[0].reason)


def swap_for_link(folder: Path) -> None:
    """Replace `images` by a link to a folder outside, which has other files with the same names."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "0.png").write_bytes(IMAGES[3])
    (folder / "images").rename(folder / "before")
    (folder / "images").symlink_to(outside)


def test_a_folder_that_becomes_a_link_between_check_and_opening_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = datasets_of(write_lines(folder / "a.jsonl", [{"image": "images/0.png"}]))
    datasets.ingest("d")
    real = os.path.realpath

    def swapped(path: str) -> str:
        found = real(path)
        swap_for_link(folder)
        return found

    monkeypatch.setattr("dataplane.datasets.formats.media_paths.os.path.realpath", swapped)
    sample = datasets.samples("d", [0])[0]
    assert sample.media == () and "outside/0.png, outside of" in sample.bad[0].reason


def test_a_folder_that_becomes_a_link_between_opening_and_reading_leads_nowhere(folder: Path) -> None:
    file = media_folders(RangeFile(str(folder / "a.jsonl"), 0), str(folder), ()).find("images/0.png")
    assert file.read(0, 1 << 20) == IMAGES[0]
    swap_for_link(folder)
    with pytest.raises(DatasetError, match=r"a link leads to .*/outside/0.png by now; none may"):
        file.read(0, 1 << 20)


def test_a_pipe_in_the_place_of_a_medium_blocks_no_reader(folder: Path) -> None:
    file = media_folders(RangeFile(str(folder / "a.jsonl"), 0), str(folder), ()).find("images/0.png")
    (folder / "images" / "0.png").unlink()
    os.mkfifo(folder / "images" / "0.png")
    with pytest.raises(DatasetError, match="no regular file"):
        file.read(0, 1 << 20)


def test_paths_may_leave_the_files_folder_within_the_root_or_an_extra_one(folder: Path) -> None:
    (folder / "lists").mkdir()
    path = write_lines(folder / "lists" / "a.jsonl", [{"image": "../images/0.png"}])
    assert datasets_of(path).samples("d", [0])[0].media == ()
    for datasets in (datasets_of(folder / "*" / "a.jsonl"), datasets_of(path, folder / "images")):
        sample = datasets.samples("d", [0])[0]
        assert [ref.name for ref in sample.media] == [name(0)]
        assert sample.media[0].lineage is not None
        assert datasets.locate(sample.media[0].lineage).file.path == str(folder / "images" / "0.png")


@pytest.mark.parametrize("block", [1, 7, 4 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_elements_of_an_array_are_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None
) -> None:
    monkeypatch.setattr("dataplane.datasets.formats.json_items.SCAN_BYTES", block)
    rows = [{"n": at, "text": '} ], [ {"é\\' + "x" * at, "in": [{"a": [at]}]} for at in range(9)]
    (folder / "a.json").write_text(json.dumps([*rows, 12, "text"], indent=indent, ensure_ascii=False))
    datasets = datasets_of(folder / "a.json")
    assert datasets.ingest("d").num_samples == 11
    samples = datasets.samples("d", range(11))
    assert [sample.fields for sample in samples[:9]] == rows
    assert [sample.key for sample in samples[:2]] == ["element 1", "element 2"]
    reasons = [sample.bad[0].reason for sample in samples[9:]]
    assert "element 10" in reasons[0] and "holds a JSON int; wanted an object" in reasons[0]


@pytest.mark.parametrize("text", ['[{"n": 1}, {"n": 2}]', '{"n": 1}\n{"n": 2}\n'])
def test_the_mark_of_utf_8_before_a_file_is_passed_over(folder: Path, text: str) -> None:
    (folder / "a.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [sample.fields["n"] for sample in datasets_of(folder / "a.json").samples("d", [0, 1])] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": ', "at byte 11 it cannot be read: "),
        ('[{"a": 1}', "ends inside its JSON array: torn"),
        ('[{"a": 1} {"a": 2}]', "at byte 10 it cannot be read: b'{' stands where b',' is wanted"),
        ('[{"a": 1}]\n[{"a": 2}]', "at byte 11 it cannot be read: b'\\[' follows the array"),
        ("[" * 100_000, "inside each other too deeply"),
        ("[]", "no sample in 1 shard"),
        ("\n\n", "no sample in 1 shard"),
    ],
)
def test_a_damaged_array_and_an_empty_file_are_no_dataset(folder: Path, text: str, message: str) -> None:
    (folder / "a.json").write_text(text)
    with pytest.raises(DatasetError, match=message):
        datasets_of(folder / "a.json").ingest("d")


def test_lines_across_blocks_and_without_a_last_newline_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.datasets.formats.json_items.SCAN_BYTES", 7)
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"n": at, "pad": "x" * at}) for at in range(20)))
    samples = datasets_of(folder / "a.jsonl").samples("d", range(20))
    assert [sample.fields["n"] for sample in samples] == list(range(20))


def test_media_inside_an_object_are_served_and_leave_its_fields(folder: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(IMAGES[0]).decode()
    said = [
        {"type": "text", "text": "Which?"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": f"file://{folder}/images/1.png"}},
        {"type": "input_image", "image_url": url},
    ]
    rows = [
        {"messages": [{"role": "system", "content": "Look."}, {"role": "user", "content": said}]},
        {"images": [{"path": "images/2.png"}, {"url": url}]},
        {"image": "data:image/png,abc"},
        {"image": "data:image/png;base64,\u00e9"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}]},
    ]
    with EmbeddedNode(memory_bytes=8 << 20, roots={"d": [str(write_lines(folder / "a.jsonl", rows))]}) as node:
        with Client(node.uri, timeout_s=30) as client:
            client.ingest("d")
            turns, listed, *bad = client.samples("d", range(5))
            assert [ref.name for ref in turns.media] == [name(0), name(1), name(0)]
            assert [ref.name for ref in listed.media] == [name(2), name(0)]
            assert turns.fields["messages"][1]["content"] == [said[0], {"type": "image"}, said[2], {"type": "image"}]
            assert turns.fields["messages"][0] == rows[0]["messages"][0]
            reasons = [sample.bad[0].reason for sample in bad]
            assert "is no data: URL in base64" in reasons[0] and "not in base64: " in reasons[1]
            assert "is a URL; a node follows none" in reasons[2]
            assert all(isinstance(ref, Ref) for ref in client.derive([*turns.media, *listed.media], RECIPE))
            lineage = turns.media[0].lineage
    assert lineage is not None
    place = datasets_of(folder / "a.jsonl").locate(lineage)
    assert (place.file.is_local, place.file.read(0, 1 << 20)) == (False, IMAGES[0])


def test_remote_lines_name_files_of_their_own_store(folder: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/lines/images/0.png", IMAGES[0])
    filesystem.pipe("/secret.png", IMAGES[1])
    rows = b'{"image": "images/0.png"}\n{"image": "../secret.png"}\n{"image": "images/no.png"}\n'
    filesystem.pipe("/lines/a.jsonl", rows)
    try:
        datasets = datasets_of("memory://lines/a.jsonl")
        samples = datasets.samples("d", [0, 1, 2])
        assert samples[0].media[0].name == name(0)
        assert samples[0].media[0].lineage is not None
        assert datasets.locate(samples[0].media[0].lineage).file.read(0, 99999) == IMAGES[0]
        assert "outside of" in samples[1].bad[0].reason and "cannot be read" in samples[2].bad[0].reason
    finally:
        filesystem.rm("/lines", recursive=True)
        filesystem.rm("/secret.png")


def test_a_node_serves_lines_and_notices_a_file_that_changed(folder: Path) -> None:
    write_lines(folder / "a.jsonl", [{"image": f"images/{at}.png"} for at in range(4)])
    (folder / "images" / "1.png").write_bytes(encode(noise(1), "JPEG"))
    with EmbeddedNode(memory_bytes=8 << 20, roots={"d": [f"{folder}/a.jsonl"]}) as node:
        with Client(node.uri, timeout_s=30) as client:
            refs = [sample.media[0] for sample in client.samples("d", range(4))]
            (folder / "images" / "3.png").write_bytes(IMAGES[3][:-1])
            made = client.derive(refs[:2], RECIPE)
            assert isinstance(made[0], Ref) and isinstance(made[1], BadMedia)
            assert (made[1].key, made[1].reason) == ("line 2 image/0", "mislabelled: named as PNG, holds JPEG")
            with pytest.raises(DatasetError, match="has no medium of"):
                client.derive(refs[3:], RECIPE)
