"""Tests of the command line against a real node."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.cli.main import main
from dataplane.cli.parsers import parse_memory, parse_root
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.serving import about_itself


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


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore the signal handlers after the test, because `serve` in this process replaces them with those of its
    node."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    wakeup = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(wakeup)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_errors_are_one_line_and_exit_1(
    node: EmbeddedNode, capsys: pytest.CaptureFixture[str], own_signals: None
) -> None:
    code, _, err = run(capsys, "get", "--uri", node.uri, "nope")
    assert code == 1 and err.startswith("dataplane get: no object is named 'nope'")
    code, _, err = run(capsys, "put", "--uri", node.uri, "/no/such/file")
    assert code == 1 and err == "dataplane put: '/no/such/file': no such file or directory; check the path\n"
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
        with pytest.raises(Exception, match="is not a size"):
            parse_memory(bad)
    with pytest.raises(Exception, match="does not name a dataset"):
        parse_root("train")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["serve", "--help"], ["put", "--help"]):
        with pytest.raises(SystemExit):
            main(argv)
        assert "python -m dataplane serve --memory 1GiB" in capsys.readouterr().out


def test_help_of_a_limit_says_what_it_limits_and_in_which_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "more encoded bytes, default 512 MiB",
        "more frames, sampled or not, default 1,048,576",
        "longer to decode, default 120",
    ):
        assert part in text
    assert "--max-decode-seconds SECONDS" in text and "above this" not in text


def test_put_stores_into_a_scope_and_durably(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(b"some bytes")
    with EmbeddedNode(memory_bytes=2 << 20, roots={}, spill_dir=tmp_path / "disk", spill_bytes=8 << 20) as started:
        options = ("put", "--uri", started.uri, str(tmp_path / "a.bin"))
        with Client(started.uri) as client:
            client.open_scope("step")
            assert run(capsys, *options, "--name", "run/a", "--scope", "step")[0] == 0
            code, name, _ = run(capsys, *options, "--scope", "step")
            assert code == 0 and name.startswith("s/")
            assert client.close_scope("step")["num_dropped"] == 1
        assert run(capsys, *options, "--name", "run/a", "--durable")[0] == 0
        _, out, _ = run(capsys, "stat", "--uri", started.uri, "--json")
        assert json.loads(out)["num_durable"] == 1
        code, _, err = run(capsys, *options, "--scope", "other")
        assert code == 1 and "scope 'other' is not open" in err


def test_ingest_and_quarantine_show_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cat.png").write_bytes(b"no picture")
    lines = ('{"image": "cat.png"}', '{"image": "gone.png"}', "no JSON")
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with EmbeddedNode(memory_bytes=2 << 20, roots={"rows": [str(tmp_path / "rows.jsonl")]}) as started:
        code, out, _ = run(capsys, "ingest", "--uri", started.uri, "rows")
        assert code == 0 and "3 samples" in out and "are checked when they are read (--check 3" in out
        code, out, _ = run(capsys, "ingest", "--uri", started.uri, "rows", "--check", "10")
        assert code == 0 and "2 found bad" in out and "media of 3 samples were read" in out
        _, out, _ = run(capsys, "ingest", "--uri", started.uri, "rows", "--check", "10", "--json")
        assert [bad["key"] for bad in json.loads(out)["bad"]] == ["line 2 image/0", "line 3"]
        assert "no medium is in quarantine" in run(capsys, "quarantine", "--uri", started.uri)[1]
        with Client(started.uri) as client:
            (sample,) = client.samples("rows", [0])
            client.derive(sample.media, {"kernel": "rgb", "version": 1})
        code, out, _ = run(capsys, "quarantine", "--uri", started.uri)
        assert code == 0 and "1 in quarantine" in out and "rows.jsonl" in out
        _, out, _ = run(capsys, "quarantine", "--uri", started.uri, "--json")
        assert json.loads(out)["bad"][0]["dataset"] == "rows"


def test_what_grpc_says_does_not_stand_before_what_we_say(node: EmbeddedNode) -> None:
    port = node.uri.rpartition(":")[2]
    command = [sys.executable, "-m", "dataplane", "serve", "--port", port, "--memory", "1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    message = about_itself(done.stderr)
    assert done.returncode == 1 and message.startswith("dataplane serve: ") and message.count("\n") == 1
    command = [sys.executable, "-m", "dataplane", "stat", "--uri", node.uri.replace("grpc://", "grpc+tls://")]
    done = subprocess.run([*command, "--timeout", "5"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("dataplane stat: ") and done.stderr.count("\n") == 1


def test_ctrl_c_while_a_command_is_loading_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *args):\n"
        "        if name == 'dataplane.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "dataplane", "serve", "--port", "0", "--memory", "1MiB"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
