"""Tests of TLS and mutual TLS with real certificates, and of the addresses at which a node may listen."""

from pathlib import Path

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.connect import Credentials
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError, NodeUnavailableError
from tests.dataplane.certificates import Issued, issue
from tests.dataplane.serving import refused, serving


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("ca"), "authority")


def tls_flags(server: Issued) -> list[str]:
    return ["--tls-cert", str(server.cert_file), "--tls-key", str(server.key_file)]


def test_a_node_with_a_certificate_speaks_tls_only(authority: Issued, tmp_path: Path) -> None:
    server, outsider = issue(tmp_path, "server", authority), issue(tmp_path, "outsider")
    with serving(tmp_path / "log", *tls_flags(server)) as served:
        assert served.uri.startswith("grpc+tls://127.0.0.1:")
        known = Credentials(tls_ca=authority.cert_file)
        with Client(served.uri, timeout_s=20, credentials=known) as client:
            refs = [client.put_source(b"a"), client.put(np.arange(1 << 18, dtype=np.uint32), name="b", dtype="uint32")]
            assert client.get(refs[0]) == b"a"
            with Reader(served.uri, timeout_s=20, credentials=known) as reader:
                assert reader.resolve(refs)[1][7] == 7
        for credentials, message in (
            (Credentials(), "not signed by a CA that this client knows.*DATAPLANE_TLS_CA"),
            (Credentials(tls_ca=outsider.cert_file), "not signed by a CA that this client knows"),
        ):
            with Client(served.uri, timeout_s=20, credentials=credentials) as client:
                with pytest.raises(NodeUnavailableError, match=message):
                    client.stat()
        with Client(served.uri.replace("grpc+tls", "grpc"), timeout_s=20) as client:
            with pytest.raises(NodeUnavailableError, match=r"it speaks TLS; use grpc\+tls://"):
                client.stat()


def test_a_node_with_a_client_authority_wants_certificates_that_it_signed(authority: Issued, tmp_path: Path) -> None:
    server, friend = issue(tmp_path, "server", authority), issue(tmp_path, "friend", authority)
    outsider = issue(tmp_path, "outsider", issue(tmp_path, "other-authority"))
    with serving(tmp_path / "log", *tls_flags(server), "--tls-ca", str(authority.cert_file)) as served:
        shown = Credentials(tls_ca=authority.cert_file, tls_cert=friend.cert_file, tls_key=friend.key_file)
        with Client(served.uri, timeout_s=20, credentials=shown) as client:
            assert client.stat()["num_objects"] == 0
        for credentials in (
            Credentials(tls_ca=authority.cert_file),
            Credentials(tls_ca=authority.cert_file, tls_cert=outsider.cert_file, tls_key=outsider.key_file),
        ):
            with Client(served.uri, timeout_s=20, credentials=credentials) as client:
                with pytest.raises(NodeUnavailableError, match="wants a client certificate that its --tls-ca signed"):
                    client.stat()


def test_a_client_that_speaks_tls_to_a_node_that_does_not_is_told_so(authority: Issued, tmp_path: Path) -> None:
    with serving(tmp_path / "log") as served:
        uri = served.uri.replace("grpc://", "grpc+tls://")
        with Client(uri, timeout_s=20, credentials=Credentials(tls_ca=authority.cert_file)) as client:
            with pytest.raises(NodeUnavailableError, match="does not speak TLS: use grpc://"):
                client.stat()


def test_a_node_listens_beyond_loopback_only_when_guarded_or_told_to(authority: Issued, tmp_path: Path) -> None:
    message = refused("--host", "0.0.0.0")
    assert "--token-file" in message and "--tls-cert" in message and "--insecure" in message
    assert message.count("\n") == 1
    server = issue(tmp_path, "server", authority)
    message = refused("--host", "0.0.0.0", *tls_flags(server))
    assert "--tls-cert proves this node, but no caller" in message
    assert "add --token-file FILE, or --tls-ca CA" in message and "--insecure" in message
    with serving(tmp_path / "log", "--host", "0.0.0.0", "--insecure") as served:
        assert "may do everything" in served.log() and "in the clear" in served.log()
        with Client(served.uri.replace("0.0.0.0", "127.0.0.1"), timeout_s=20) as client:
            client.stat()
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("0123456789abcdef\n")
    with serving(tmp_path / "log", "--host", "0.0.0.0", "--token-file", str(tokens)) as served:
        assert "in the clear" in served.log() and "may do everything" not in served.log()
    for known in (["--token-file", str(tokens)], ["--tls-ca", str(authority.cert_file)]):
        with serving(tmp_path / "log", "--host", "0.0.0.0", *tls_flags(server), *known) as served:
            assert not served.log()
    with serving(tmp_path / "log", "--host", "0.0.0.0", *tls_flags(server), "--insecure") as served:
        assert "may do everything" in served.log() and "in the clear" not in served.log()


def test_a_certificate_alone_lets_every_caller_in_and_a_node_on_loopback_warns_of_it(
    authority: Issued, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", *tls_flags(issue(tmp_path, "server", authority))) as served:
        assert "every client that reaches 127.0.0.1 may do everything" in served.log()


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.2"])
def test_every_loopback_address_is_served(host: str, tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--host", host) as served:
        with Client(served.uri, timeout_s=20) as client, Reader(served.uri, timeout_s=20) as reader:
            assert reader.resolve([client.put_source(b"abc")])[0].tobytes() == b"abc"


def test_certificates_that_do_not_fit_are_refused_before_anything_is_served(authority: Issued, tmp_path: Path) -> None:
    server = issue(tmp_path, "server", authority)
    cert, key, other_key = str(server.cert_file), str(server.key_file), str(authority.key_file)
    assert "--tls-cert needs its private key: add --tls-key" in refused("--tls-cert", cert)
    assert "--tls-key without --tls-cert" in refused("--tls-key", key)
    assert "make no TLS server" in refused("--tls-cert", cert, "--tls-key", other_key)
    assert "make no TLS server" in refused("--tls-cert", str(tmp_path / "none"), "--tls-key", key)
    assert "holds no certificates" in refused("--tls-cert", cert, "--tls-key", key, "--tls-ca", key)
    for credentials in (
        Credentials(tls_ca=tmp_path / "none"),
        Credentials(tls_cert=server.cert_file),
        Credentials(tls_cert=server.cert_file, tls_key=authority.key_file),
    ):
        with pytest.raises(BadRequestError, match=r"PEM|go together"):
            Client("grpc+tls://127.0.0.1:1", credentials=credentials)
