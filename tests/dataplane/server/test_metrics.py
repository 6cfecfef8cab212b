"""Tests of a node's counters in the reply to stat and in the text for Prometheus."""

import contextlib
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.client.reader import Reader
from dataplane.core.errors import MissingObjectError
from dataplane.server.auth import Security
from dataplane.server.meter import BOUNDS_S, Meter
from dataplane.server.metrics_http import MAX_REQUESTS, MetricsServer
from dataplane.server.prometheus import Metrics
from tests.dataplane.certificates import issue
from tests.dataplane.serving import Served, refused, serving
from tests.dataplane.shards import wait_until

TOKEN = "0123456789abcdef"


def url_of(served: Served) -> str:
    return served.greeting.split("counts at ")[1].split("/metrics")[0]


def fetch(url: str, token: str = "", context: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the values by name and by the one label beside that of the node."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key not in ("node", "le")]
            assert "node" in sample.labels
            found[sample.name, "".join(labels) + sample.labels.get("le", "")] = sample.value
    return found


def is_counted(client: Client) -> bool:
    """Return True if the node has counted all calls of a test. It may count a call, and end its lease, after its
    answer."""
    stat = client.stat()
    num_calls = {verb: stat["verbs"].get(verb, {}).get("num_calls", 0) for verb in ("DoPut", "DoGet", "resolve")}
    return bool(stat["num_leases"] == 2 and num_calls == {"DoPut": 1, "DoGet": 4, "resolve": 1})


def test_prometheus_reads_what_was_done(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--metrics-port", "0") as served:
        with Client(served.uri, timeout_s=20) as client, Reader(served.uri, timeout_s=20) as reader:
            ref = client.put(np.arange(1000, dtype=np.uint8), name="one")
            views = reader.resolve([ref, ref])
            assert client.get(ref) == views[0].tobytes()
            for _ in range(3):
                with pytest.raises(MissingObjectError):
                    client.get("nope")
            wait_until(lambda: is_counted(client))
            found = samples(fetch(f"{url_of(served)}/metrics"))
            assert found["dataplane_hits_total", ""] == 2
            assert found["dataplane_leases", ""] == 2
            assert found["dataplane_received_bytes_total", ""] == 1000 == found["dataplane_sent_bytes_total", ""]
            assert found["dataplane_errors_total", "MissingObjectError"] == 3
            assert found["dataplane_call_errors_total", "DoGet"] == 3
            assert found["dataplane_call_seconds_count", "DoGet"] == 4
            assert found["dataplane_call_seconds_bucket", "DoPut+Inf"] == 1
            assert 0 < found["dataplane_call_seconds_sum", "resolve"] < 60
            assert found["dataplane_streams", "session"] == 1 == found["dataplane_streams", "resolve"]
            verbs = client.stat()["verbs"]
            assert verbs["resolve"]["num_calls"] == 1 and 0 < verbs["resolve"]["p50_s"] <= verbs["resolve"]["p99_s"]


def test_the_metrics_port_wants_the_nodes_tokens_and_speaks_its_tls(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"{TOKEN} read\n")
    authority = issue(tmp_path, "authority")
    server = issue(tmp_path, "server", authority)
    flags = ["--tls-cert", str(server.cert_file), "--tls-key", str(server.key_file), "--token-file", str(tokens)]
    with serving(tmp_path / "log", "--metrics-port", "0", *flags) as served:
        url = url_of(served)
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(authority.cert_file))
        assert "dataplane_used_bytes" in fetch(f"{url}/metrics", TOKEN, context)
        for token in ("", "wrong-0123456789"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                fetch(f"{url}/metrics", token, context)
        with Client(served.uri, timeout_s=20, credentials=Credentials(token="x" * 16, tls_ca=authority.cert_file)) as c:
            with pytest.raises(PermissionError):
                c.stat()
        assert samples(fetch(f"{url}/metrics", TOKEN, context))["dataplane_errors_total", "UnauthenticatedError"] == 1


def test_a_metrics_port_beyond_loopback_is_guarded(tmp_path: Path) -> None:
    authority = issue(tmp_path, "authority")
    flags = ["--tls-cert", str(authority.cert_file), "--tls-key", str(authority.key_file), "--host", "0.0.0.0"]
    assert "anyone there could read" in refused("--metrics-port", "0", *flags)


def test_connections_that_send_nothing_take_no_more_threads_than_slots_and_end_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dataplane.server.metrics_http.REQUEST_TIMEOUT_S", 1.0)
    metrics = Metrics("node", dict, Meter())
    server = MetricsServer("127.0.0.1", 0, metrics.registry, Security(), None)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    before = threading.active_count()
    idle = [socket.create_connection(address, timeout=10) for _ in range(3 * MAX_REQUESTS)]
    try:
        for at, connection in enumerate(idle):
            with contextlib.suppress(OSError):  # the last ones are closed at once
                connection.sendall(b"GET / HTTP/1.1\r\nX-%d: " % at)
        wait_until(lambda: sum(is_closed(connection) for connection in idle) >= 2 * MAX_REQUESTS)
        assert threading.active_count() <= before + MAX_REQUESTS + 1
        wait_until(lambda: all(trickle(connection) for connection in idle))
        wait_until(lambda: not server._server.slots._num_taken)
    finally:
        for connection in idle:
            connection.close()
        server.close()


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def trickle(connection: socket.socket) -> bool:
    """Send another byte, like a client that wants to stay; return True if the server has closed the connection."""
    with contextlib.suppress(OSError):
        connection.send(b"x")
    return is_closed(connection)


def test_a_metrics_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--metrics-port", "0") as served:
        port = url_of(served).rpartition(":")[2]
        message = refused("--metrics-port", port)
        assert f"--metrics-port {port}" in message and message.count("\n") == 1


def test_quantiles_stay_within_a_bucket_of_the_truth() -> None:
    meter = Meter()
    times = np.random.default_rng(0).lognormal(-7, 1.5, 5000)
    for seconds in times:
        meter.count_call("x", float(seconds))
    counts = meter.verbs()["x"]
    for share in (0.01, 0.5, 0.99):
        truth = float(np.quantile(times, share))
        assert truth / 1.8 < counts.quantile_s(share) < truth * 1.8
    meter.count_call("slow", 2 * BOUNDS_S[-1])
    assert meter.verbs()["slow"].quantile_s(0.5) >= BOUNDS_S[-1]
    assert meter.stat()["verbs"]["slow"]["num_calls"] == 1
