"""The command line against a real node."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.cli import main, parse_memory, parse_root
from dataplane.embedded import EmbeddedNode


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_put_prints_a_name_and_get_writes_the_bytes(
    node: EmbeddedNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"some bytes")
    code, out, _ = run(capsys, "put", "--uri", node.uri, str(tmp_path / "a.bin"))
    assert code == 0 and out.startswith("s/")
    code, _, _ = run(capsys, "get", "--uri", node.uri, out.strip(), "-o", str(tmp_path / "b.bin"))
    assert code == 0 and (tmp_path / "b.bin").read_bytes() == b"some bytes"
    _, out, _ = run(capsys, "put", "--uri", node.uri, "--json", "--name", "run/x", str(tmp_path / "a.bin"))
    assert json.loads(out)["name"] == "run/x"
    command = [sys.executable, "-m", "dataplane", "get", "--uri", node.uri, out]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"some bytes"
    assert [run(capsys, "release", "--uri", node.uri, "run/x")[0] for _ in range(2)] == [0, 1]


def test_stat_and_ingest_print_tables_and_json(node: EmbeddedNode, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ingest", "--uri", node.uri, "good")
    assert code == 0 and "16 samples in 2 shards" in out
    _, out, _ = run(capsys, "ingest", "--uri", node.uri, "good", "--json")
    assert json.loads(out)["num_samples"] == 16
    code, out, _ = run(capsys, "stat", "--uri", node.uri)
    assert code == 0 and "budget_bytes" in out and "16 MiB" in out
    _, out, _ = run(capsys, "stat", "--uri", node.uri, "--json")
    assert json.loads(out)["datasets"]["good"]["num_samples"] == 16


def test_errors_are_one_line_and_exit_1(node: EmbeddedNode, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "get", "--uri", node.uri, "nope")
    assert code == 1 and err.startswith("dataplane get: no object is named 'nope'")
    code, _, err = run(capsys, "put", "--uri", node.uri, "/no/such/file")
    assert code == 1 and "No such file" in err
    code, _, err = run(capsys, "stat", "--uri", "grpc://127.0.0.1:1", "--timeout", "5")
    assert code == 1 and "is it running" in err
    code, _, err = run(capsys, "serve", "--host", "0.0.0.0", "--port", "0", "--memory", "1MiB")
    assert code == 1 and "--token-file" in err
    port = node.uri.rpartition(":")[2]
    code, _, err = run(capsys, "serve", "--port", port, "--memory", "1MiB")
    assert code == 1 and f"port {port} is taken" in err and "--port" in err and err.count("\n") == 1
    for argv in (["stat", "--timeout", "-1"], ["stat", "--timeout", "nan"], ["serve", "--port", "70000"]):
        with pytest.raises(SystemExit):
            main(argv)
        assert "wanted" in capsys.readouterr().err


def test_sizes_and_roots_are_parsed_or_refused() -> None:
    assert [parse_memory(text) for text in ("1GiB", "1.5 KiB", "2MB", "77")] == [1 << 30, 1536, 2_000_000, 77]
    assert parse_root("train=a-*.tar") == ("train", "a-*.tar")
    for bad in ("much", "-1", "1 parsec"):
        with pytest.raises(Exception, match="is no size"):
            parse_memory(bad)
    with pytest.raises(Exception, match="names no dataset"):
        parse_root("train")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["serve", "--help"], ["put", "--help"]):
        with pytest.raises(SystemExit):
            main(argv)
        assert "python -m dataplane serve --memory 1GiB" in capsys.readouterr().out
