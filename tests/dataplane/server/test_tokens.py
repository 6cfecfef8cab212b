"""Tests of tokens and rights against real nodes."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.cli.main import main
from dataplane.client.client import Client
from dataplane.client.connect import Credentials, connect
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError, DataPlaneError, ForbiddenError, UnauthenticatedError
from dataplane.core.flight_errors import from_flight
from dataplane.core.json_body import dump
from dataplane.core.rights import Right
from dataplane.core.token_file import read_tokens
from dataplane.server.actions import ACTIONS
from dataplane.server.do_exchange import EXCHANGES
from dataplane.server.flight_server import VERB_RIGHTS, FlightServer
from tests.dataplane.serving import Served, refused, serving
from tests.dataplane.shards import wait_until

ADMIN, WRITE, READ, OLD = (
    "admin-0123456789abcdef",
    "write-0123456789abcdef",
    "read-0123456789abcdef",
    "old-0123456789abc",
)


def token_file(path: Path, *lines: str) -> Path:
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A node with one token of each right, and one token that has expired."""
    directory = tmp_path_factory.mktemp("tokens")
    lines = [
        "# who: what",
        ADMIN,
        f"{WRITE} write 2100-01-01",
        f"{READ} read # for dashboards",
        f"{OLD} read 2020-01-01",
    ]
    path = token_file(directory / "tokens", *lines)
    with serving(directory / "log", "--token-file", str(path)) as served:
        yield served
        assert not any(token in served.log() for token in (ADMIN, WRITE, READ, OLD))


def as_(token: str) -> Credentials:
    return Credentials(token=token)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "this node wants a token: set DATAPLANE_TOKEN_FILE"),
        ("wrong-0123456789abcdef", "does not know the token;"),
        (ADMIN[:-1], "does not know the token;"),
        (OLD, "the token expired at 2020-01-01T00:00:00"),
    ],
)
def test_a_caller_without_a_good_token_gets_no_verb(guarded: Served, token: str, message: str) -> None:
    with Client(guarded.uri, timeout_s=20, credentials=as_(token)) as client:
        for call in (client.stat, lambda: client.put_source(b"x"), lambda: client.put_source(bytes(1 << 20))):
            with pytest.raises(UnauthenticatedError, match=message):
                call()
    with pytest.raises(UnauthenticatedError, match=message):
        Reader(guarded.uri, timeout_s=20, credentials=as_(token))


def test_each_right_includes_those_before_it(guarded: Served) -> None:
    with Client(guarded.uri, timeout_s=20, credentials=as_(WRITE)) as writer:
        ref = writer.put_source(b"some bytes")
        big = writer.put(np.arange(1 << 18, dtype=np.uint32), name="big", dtype="uint32")
    with Client(guarded.uri, timeout_s=20, credentials=as_(READ)) as client:
        assert client.get(ref) == b"some bytes"
        assert client.stat()["num_objects"] >= 2
        for call in (
            lambda: client.put_source(b"other"),
            lambda: client.put_source(bytes(1 << 20)),
            lambda: client.release([ref]),
        ):
            with pytest.raises(ForbiddenError, match="needs the right 'write', this token has 'read'"):
                call()
    with Reader(guarded.uri, timeout_s=20, credentials=as_(READ)) as reader:
        assert reader.resolve([big])[0].sum() == sum(range(1 << 18))
    with Client(guarded.uri, timeout_s=20, credentials=as_(ADMIN)) as admin:
        assert admin.release([big]) == 1


def call_every_verb(flight: fl.FlightClient) -> Iterator[tuple[str, Right, Exception | None]]:
    """Call every verb with a body that makes no sense. Return the right that each needs and the error that it
    raised."""
    for name, action in ACTIONS.items():
        yield name, action.right, raised_by(lambda name=name: list(flight.do_action(fl.Action(name, b"no json"))))
    for name, exchange in EXCHANGES.items():
        yield name, exchange.right, raised_by(lambda name=name: open_exchange(flight, name))
    by_verb = {
        "list_actions": lambda: flight.list_actions(),
        "list_flights": lambda: list(flight.list_flights()),
        "get_flight_info": lambda: flight.get_flight_info(fl.FlightDescriptor.for_command(b"no json")),
        "get_schema": lambda: flight.get_schema(fl.FlightDescriptor.for_command(b"no json")),
        "do_get": lambda: flight.do_get(fl.Ticket(b"no json")).read_all(),
        "do_put": lambda: put_nonsense(flight),
    }
    assert by_verb.keys() == VERB_RIGHTS.keys()
    for name, right in VERB_RIGHTS.items():
        yield name, right, raised_by(by_verb[name])


def open_exchange(flight: fl.FlightClient, verb: str) -> None:
    writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(dump({"verb": verb})))
    try:
        writer.done_writing()
        while True:
            reader.read_chunk()
    except StopIteration:
        writer.close()


def put_nonsense(flight: fl.FlightClient) -> None:
    writer, answers = flight.do_put(fl.FlightDescriptor.for_command(b"no json"), pa.schema([("data", pa.uint8())]))
    with writer:
        writer.done_writing()
        answers.read()


def raised_by(call) -> Exception | None:  # type: ignore[no-untyped-def]
    try:
        call()
    except pa.ArrowException as error:
        return from_flight(error, "node", "call", 20)
    except OSError as error:  # what pyarrow makes of any error of GetSchema
        return UnauthenticatedError(str(error)) if "Unauthenticated" in str(error) else BadRequestError(str(error))
    return None


def test_every_verb_of_the_node_refuses_callers_without_its_right(guarded: Served) -> None:
    overridden = {name for name, value in vars(FlightServer).items() if callable(value) and not name.startswith("_")}
    assert overridden == VERB_RIGHTS.keys() | {"do_action", "do_exchange"}, "a Flight verb without a right"
    for token, right in ((READ, Right.READ), (WRITE, Right.WRITE), (ADMIN, Right.ADMIN), ("", None)):
        flight = connect(guarded.uri, as_(token))
        for name, wanted, error in call_every_verb(flight):
            if right is None:
                assert isinstance(error, UnauthenticatedError), (name, error)
            else:
                assert isinstance(error, ForbiddenError) == (right < wanted), (name, token, error)
        flight.close()


def test_the_rights_of_the_verbs_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "dataplane-security.md").read_text()
    rows = re.findall(r"^\| `(read|write)` \| (?:the verbs of `read`, and )?(.*) \|$", text, re.MULTILINE)
    documented = {verb: right for right, verbs in rows for verb in re.findall(r"\w+", verbs)}
    rights = {"".join(map(str.capitalize, name.split("_"))): right for name, right in VERB_RIGHTS.items()}
    rights |= {name: verb.right for table in (ACTIONS, EXCHANGES) for name, verb in table.items()}
    assert {name: right.name.lower() for name, right in rights.items()} == documented


def test_a_token_file_is_read_again_when_it_changes_and_mistakes_change_nothing(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens", ADMIN)

    def is_let_in(token: str) -> bool:
        try:
            with Client(served.uri, timeout_s=20, credentials=as_(token)) as client:
                client.stat()
        except UnauthenticatedError:
            return False
        return True

    with serving(tmp_path / "log", "--token-file", str(path)) as served:
        assert is_let_in(ADMIN) and not is_let_in(READ)
        token_file(tmp_path / "new", f"{READ} read").rename(path)
        wait_until(lambda: is_let_in(READ))
        assert not is_let_in(ADMIN)
        path.write_text("short\n")
        assert is_let_in(READ)
        assert "wanted at least 16" in served.log() and "keeps the tokens that it had before" in served.log()
        path.unlink()
        assert is_let_in(READ)


def test_an_open_stream_ends_when_its_token_is_taken_back_and_views_stay_valid(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens", ADMIN, f"{READ} read")
    with serving(tmp_path / "log", "--token-file", str(path)) as served:
        with Client(served.uri, timeout_s=20, credentials=as_(ADMIN)) as client:
            ref = client.put(b"some bytes", name="some")
            with Reader(served.uri, timeout_s=20, credentials=as_(READ)) as reader:
                view = reader.resolve([ref])[0]
                token_file(tmp_path / "new", ADMIN).rename(path)
                with pytest.raises(UnauthenticatedError, match="does not know the token"):
                    reader.resolve([ref])
                assert view.tobytes() == b"some bytes" and client.stat()["num_leases"] == 1


def test_no_key_of_a_message_gets_it_past_a_token_that_was_taken_back(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens", ADMIN, f"{READ} read")
    with serving(tmp_path / "log", "--token-file", str(path)) as served, connect(served.uri, as_(READ)) as flight:
        writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(b'{"verb": "resolve"}'))
        reader.read_chunk()
        token_file(tmp_path / "new", ADMIN).rename(path)
        writer.write_metadata(pa.py_buffer(b'{"": 0, "written": 0, "names": ["some"]}'))
        with pytest.raises(fl.FlightError, match="does not know the token"):
            reader.read_chunk()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("short read", "line 1: a token of 5 characters; wanted at least 16"),
        (f"{READ} raed", "line 1: a word after the token is neither read, write or admin nor an expiry"),
        (f"{READ} read 2030-01-01 more", "line 1: 4 words"),
        ("# nothing", "has no token"),
        ("töken-0123456789abcdef", "printable ASCII"),
    ],
)
def test_a_token_file_with_a_mistake_says_where_and_never_what(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as raised:
        read_tokens(token_file(tmp_path / "tokens", line))
    assert READ not in str(raised.value)


def test_a_token_file_that_others_may_read_is_refused_by_both_sides(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens", ADMIN)
    path.chmod(0o640)
    assert f"chmod 600 {path}" in refused("--token-file", str(path))
    with pytest.raises(BadRequestError, match="chmod 600"):
        Client("grpc://127.0.0.1:1", credentials=Credentials(token_file=path))


def test_credentials_come_from_the_environment_and_never_print_a_token(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens", f"{READ} read", ADMIN)
    found = Credentials.from_environment({"DATAPLANE_TOKEN_FILE": str(path), "DATAPLANE_TLS_CA": "ca.pem"})
    assert (found.shown_token(), found.tls_ca) == (READ, Path("ca.pem"))
    assert READ not in repr(found) and ADMIN not in repr(as_(ADMIN))
    assert Credentials.from_environment({}) == Credentials()


def test_the_command_line_shows_tokens_and_explains_what_they_lack(
    guarded: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = token_file(tmp_path / "tokens", f"{READ} read")
    assert main(["stat", "--uri", guarded.uri]) == 1
    assert "dataplane stat: this node wants a token: set DATAPLANE_TOKEN_FILE" in capsys.readouterr().err
    assert main(["stat", "--uri", guarded.uri, "--token-file", str(path)]) == 0
    monkeypatch.setenv("DATAPLANE_TOKEN_FILE", str(path))
    assert main(["put", "--uri", guarded.uri, __file__]) == 1
    assert "needs the right 'write', this token has 'read'" in capsys.readouterr().err


def test_a_sessions_token_is_a_secret_and_anothers_leases_cannot_be_ended(guarded: Served) -> None:
    with Client(guarded.uri, timeout_s=20, credentials=as_(ADMIN)) as client:
        ref = client.put(b"kept", name="kept")
        with Reader(guarded.uri, timeout_s=20, credentials=as_(READ)) as reader:
            view = reader.resolve([ref])[0]
            assert client.stat()["num_leases"] == 1
            flight = connect(guarded.uri, as_(READ))
            for session in ("", "node", "0" * 32):
                body = dump({"session": session, "leases": list(range(1000))})
                assert [r.body.to_pybytes() for r in flight.do_action(fl.Action("end_leases", body))] == [b"{}"]
            assert client.stat()["num_leases"] == 1
            assert reader._current.last.node.token not in str(client.stat())
            descriptor = fl.FlightDescriptor.for_command(dump({"verb": "resolve", "session": "0" * 32}))
            writer, answers = flight.do_exchange(descriptor)
            writer.write_metadata(pa.py_buffer(dump({"names": ["kept"]})))
            assert b"is not open" in answers.read_chunk().app_metadata.to_pybytes()
            writer.close()
            flight.close()
            assert view.tobytes() == b"kept"
            del view
        client.release([ref])


def test_errors_of_access_are_python_permission_errors() -> None:
    for kind in (UnauthenticatedError, ForbiddenError):
        assert issubclass(kind, PermissionError) and issubclass(kind, DataPlaneError)


def test_a_big_message_without_a_token_leaves_no_memory_behind(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("0123456789abcdef read\n")
    with serving(tmp_path / "log", "--token-file", str(tokens)) as served, fl.FlightClient(served.uri) as flight:
        process = psutil.Process(served.process.pid)
        with pytest.raises(fl.FlightUnauthenticatedError):
            list(flight.do_action(fl.Action("stat", b"")))
        before = process.memory_info().rss
        with pytest.raises(fl.FlightUnauthenticatedError):
            list(flight.do_action(fl.Action("stat", bytes(200 << 20))))
        wait_until(lambda: process.memory_info().rss < before + (128 << 20))


def test_a_token_in_the_clear_to_another_machine_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    own_network = Credentials.from_environment({"DATAPLANE_TOKEN": "0123456789abcdef", "DATAPLANE_INSECURE": "1"})
    connect("grpc://192.0.2.1:1", own_network).close()
    for uri in ("grpc://127.0.0.1:1", "grpc://localhost:1", "grpc://[::1]:1", "grpc+tls://192.0.2.1:1"):
        connect(uri, Credentials(token="0123456789abcdef")).close()
    assert not [
        record for record in caplog.records if record.name == "dataplane.client.connect"
    ]  # others may have spoken
    connect("grpc://192.0.2.1:1", Credentials(token="0123456789abcdef")).close()
    assert "192.0.2.1:1 crosses the network in the clear" in caplog.text
