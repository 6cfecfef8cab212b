"""Malformed Flight requests, one for each (seed, index): good requests of every verb, damaged in one way or another.

The actions and the keys of their bodies come from the node's own ListActions, so that a new action is fuzzed from its
first day. A request is a pure function of the seed, its index and `Known`, so it can be sent again.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from benchmarks.fuzzing.mutations import mutate_bytes, mutate_json, structures, with_other_numbers
from benchmarks.fuzzing.wire import (
    SERVICE,
    Ending,
    Request,
    action,
    command,
    fields_of,
    flight_data,
    http2_call,
    ipc_parts,
    message,
    path,
    ticket,
)
from dataplane.core.digests import content_digest, source_name

NUM_STRUCTURES = 300
MAX_BODY_BYTES = 256 << 10
KEPT = "fuzz/kept"
"""The name of a good object that no cleaning up removes."""
SESSION = "@SESSION".ljust(32, "@")
"""A placeholder for the token of a session that is open when the request is sent. It is as long as a token."""

OWNER = "fuzz-owner-0123456789abcdef"
"""The name of a client that opens scopes."""

MANY_PLACES: Sequence[Mapping[str, Any]] = (
    {"allocate": [64, 0, 1000], "timeout_s": 0.5},
    {"written": 500},
    {"seal": [{"name": "fuzz/one"}, {"name": "fuzz/two"}, {"name": "fuzz/three", "dtype": "float32"}]},
    {"abort": True},
)

STREAMS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "session": ({},),
    "resolve": ({"names": [KEPT, "nope"]}, {"refs": "refs", "timeout_s": 0.5}, {"end": [1, 2, 3]}),
    "put": (
        {"allocate": 64, "timeout_s": 0.5},
        {"written": 32},
        {"seal": {"name": "fuzz/place", "dtype": "uint8", "shape": [8, 8]}},
        *MANY_PLACES,
    ),
    "scopes": ({"end": False}, {"end": True}),
}
"""Good messages of the DoExchange verbs."""

_NAME = re.compile(rb'"(?:name|scope)"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The objects that good requests name. They are read from the node before the fuzzing begins. JSON-safe."""

    actions: Mapping[str, str]
    """The line of ListActions for each verb."""
    refs: Sequence[Mapping[str, Any]]
    """Two derived objects, a source, and perhaps an object of another node, as JSON."""
    recipe: Mapping[str, Any]
    dataset: str


class Corpus:
    """Good requests and the ways to damage them. Deterministic: `request(index)` is the same for the same seed."""

    def __init__(self, known: Known, seed: int) -> None:
        self._known = known
        self._seed = seed
        self._actions = {verb: self._body(text) for verb, text in known.actions.items()}
        self._puts = self._put_bodies()
        self._keys = tuple(sorted({key for body in (*self._actions.values(), *self._puts) for key in body} | {"verb"}))
        self._structures = structures(seed, NUM_STRUCTURES, self._keys)
        self._batches = [ipc_parts(batch) for batch in batches()]

    def request(self, index: int) -> Request:
        """Return the request with this number."""
        rng = random.Random(f"{self._seed}/{index}")
        kinds = (self._action, self._get, self._put, self._exchange, self._other, self._tcp)
        made = rng.choices(kinds, (30, 14, 26, 20, 6, 4))[0](rng)
        if made.method and rng.random() < 0.3:
            made = _spoil_messages(rng, made)
        if made.method and rng.random() < 0.08:
            # what a call leaves behind that is cut off must have a name that we know
            is_named = not re.search("batch|messages|FlightInfo", made.how)
            endings: tuple[Ending, ...] = ("cancel", "drop") if is_named else ("drop",)
            ending = rng.choice(endings)
            made = replace(made, ending=ending, how=f"{made.how}, {ending}")
        return replace(made, index=index, leaves=tuple(sorted(_names(made))))

    @property
    def verbs(self) -> list[str]:
        """The node's actions (named requests of DoAction)."""
        return list(self._actions)

    # -- private: one of each kind ---------------------------------------------------------------------------------

    def _action(self, rng: random.Random) -> Request:
        verb = rng.choice(list(self._actions))
        good = self._actions[verb]
        body, how = self._json(rng, good | {"refs": self._refs(rng)} if "refs" in good else good)
        sent: str | bytes = verb
        if rng.random() < 0.03:
            sent = rng.choice(("", "CancelFlightInfo", "RenewFlightEndpoint", "x" * 5000, mutate_bytes(rng, b"stat")))
        return Request(index=0, method=f"{SERVICE}DoAction", messages=[action(sent, body)], how=f"{verb}: {how}")

    def _get(self, rng: random.Random) -> Request:
        refs = self._refs(rng)
        good = rng.choice(
            (
                {"name": KEPT},
                {"ref": rng.choice(refs), "timeout_s": 0.5},
                {"refs": list(refs), "timeout_s": 0.5},
                {"ref": rng.choice(refs), "start": 1, "length": 100, "timeout_s": 0.5},
                # what nodes ask each other
                {"refs": list(refs), "local": True, "make": rng.random() < 0.5, "timeout_s": 0.5},
                {"ref": rng.choice(refs), "start": 0, "length": 0, "local": True, "make": False, "timeout_s": 0.5},
            )
        )
        body, how = self._json(rng, good)
        return Request(index=0, method=f"{SERVICE}DoGet", messages=[ticket(body)], how=f"get: {how}")

    def _put(self, rng: random.Random) -> Request:
        body, how = self._json(rng, rng.choice(self._puts))
        descriptor = command(body)
        if rng.random() < 0.3:
            parts = rng.choice(([b"fuzz/path"], [b"fuzz/path"], [], [b"a", b"b"], [b""], [b"\xff"], [b"s/x"]))
            descriptor, how = path(*parts), "a path"
        schema, header, data = self._batches[0] if rng.random() < 0.5 else rng.choice(self._batches)
        if rng.random() < 0.15:
            schema, how = mutate_bytes(rng, schema, header), f"{how}, schema spoilt"
        if rng.random() < 0.25:
            header, how = mutate_bytes(rng, header, schema), f"{how}, batch header spoilt"
        if rng.random() < 0.15:
            data, how = mutate_bytes(rng, data, header), f"{how}, batch body spoilt"
        records = [flight_data(header=header, body=data)] * rng.choice((1, 1, 1, 0, 2, 5))
        messages = [flight_data(descriptor, schema), *records]
        return Request(index=0, method=f"{SERVICE}DoPut", messages=messages, how=f"put: {how}")

    def _exchange(self, rng: random.Random) -> Request:
        verb = rng.choice(list(STREAMS))
        descriptor: dict[str, Any] = {"verb": verb} | ({"owner": OWNER} if verb == "scopes" else {})
        if verb == "resolve" and rng.random() < 0.3:
            descriptor["session"] = SESSION
        body, how = self._json(rng, descriptor) if rng.random() < 0.2 else (json.dumps(descriptor).encode(), "asked")
        messages = [flight_data(command(body))]
        for _ in range(rng.choice((0, 1, 2, 3, 6))):
            good = {key: self._refs(rng) if value == "refs" else value for key, value in self._next(rng, verb)}
            said, how = self._json(rng, good) if rng.random() < 0.6 else (json.dumps(good).encode(), how)
            schema, header, data = rng.choice(self._batches)
            extra = rng.choices((b"", schema, header, mutate_bytes(rng, header, schema)), (20, 1, 1, 1))[0]
            messages.append(flight_data(header=extra, metadata=said, body=data if extra else None))
        return Request(index=0, method=f"{SERVICE}DoExchange", messages=messages, how=f"exchange {verb}: {how}")

    def _other(self, rng: random.Random) -> Request:
        good = {"ref": rng.choice(self._known.refs), "timeout_s": 0.5}
        body, how = self._json(rng, rng.choice(({"name": KEPT}, good)))
        descriptor = rng.choice((command(body), path(KEPT.encode()), path(), mutate_bytes(rng, path(KEPT.encode()))))
        method = rng.choice(
            ("Handshake", "GetFlightInfo", "GetSchema", "PollFlightInfo", "ListFlights", "ListActions", "Nothing", "")
        )
        sent = {
            "Handshake": message((1, rng.randrange(1 << 64)), (2, body)),
            "ListFlights": message((1, rng.choice((body, b"fuzz/", b"", b"\xff")))),
            "ListActions": rng.choice((b"", body)),
        }
        chosen = [sent.get(method, descriptor)] * rng.choice((1, 1, 1, 0, 3))
        return Request(index=0, method=SERVICE + method, messages=chosen, how=f"{method}: {how}")

    def _tcp(self, rng: random.Random) -> Request:
        call = self._put(rng)
        good = http2_call(call.method, call.messages[0])
        other = rng.choice((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"))
        data = rng.choice((mutate_bytes(rng, good, other), mutate_bytes(rng, good[:60]), other, rng.randbytes(200)))
        return Request(index=0, method="", messages=[data], how="bytes on the TCP port")

    def _json(self, rng: random.Random, good: Any) -> tuple[bytes, str]:
        """Return a damaged body and a description of the damage. The body is cut to a small size: after a large one the
        node would keep more memory, and a leak could not be seen."""
        body, how = self._spoilt(rng, good)
        return body[:MAX_BODY_BYTES], how

    def _spoilt(self, rng: random.Random, good: Any) -> tuple[bytes, str]:
        match rng.choices(("good", "values", "bytes", "structure"), (4, 50, 20, 26))[0]:
            case "good":
                return json.dumps(good).encode(), "good"
            case "values":
                return mutate_json(rng, good, self._keys), "values spoilt"
            case "bytes":
                other = json.dumps(rng.choice(self._puts)).encode()
                return mutate_bytes(rng, json.dumps(good).encode(), other), "bytes spoilt"
        found = rng.choice(self._structures)
        mixed = good | found if isinstance(found, dict) and rng.random() < 0.7 else found
        return json.dumps(mixed).encode("utf-8", "surrogatepass"), "a structure of hypothesis"

    def _refs(self, rng: random.Random) -> list[Mapping[str, Any]]:
        """Return the known refs, sometimes with other numbers in one of them."""
        refs = list(self._known.refs)
        if rng.random() < 0.4:
            at = rng.randrange(len(refs))
            refs[at] = with_other_numbers(rng, refs[at])
        return refs

    def _next(self, rng: random.Random, verb: str) -> Iterator[tuple[str, Any]]:
        """Yield a message of a stream: mostly one of this verb, sometimes one of another verb."""
        return iter(rng.choice(STREAMS[verb if rng.random() < 0.9 else rng.choice(list(STREAMS))]).items())

    def _body(self, text: str) -> dict[str, Any]:
        """Return a good body of an action, with the keys that its line of ListActions names."""
        good: dict[str, Any] = {
            "names": ["fuzz/victim", "fuzz/place"],
            "name": "fuzz/scope",
            "scope": "fuzz/scope",
            "dataset": self._known.dataset,
            "indices": [0, 1],
            "refs": list(self._known.refs),
            "recipe": dict(self._known.recipe),
            "session": SESSION,
            "leases": [1, 2],
            "timeout_s": 0.5,
            "quota_bytes": 1 << 20,
            "keep": False,
            "owner": OWNER,
            "source": "fuzz/scope",
        }
        keys = re.findall(r'"(\w+)"', text.split("} ->")[0])
        return {key: good.get(key, "fuzz") for key in [*keys, *(["timeout_s"] if "refs" in keys else [])]}

    def _put_bodies(self) -> list[dict[str, Any]]:
        plain = {"name": "fuzz/put", "timeout_s": 0.5}
        return [
            plain,
            plain | {"name": "fuzz/victim", "kind": "plain", "dtype": "uint8", "shape": [64], "nbytes": 64},
            plain | {"name": "fuzz/meta", "meta": {"grid_thw": [1, 8, 8], "text": "x"}, "checksum": "0" * 32},
            plain | {"name": "fuzz/scoped", "scope": "fuzz/scope", "durable": True},
            {"kind": "source", "meta": {}, "timeout_s": 0.5},
        ]


def batches() -> list[pa.RecordBatch]:
    """Return the good batch first, then one of every sort of column that a put must refuse."""
    number = pa.array(range(64), pa.uint8())
    arrays: list[pa.Array] = [
        number,
        pa.array([1, None, 3], pa.float32()),
        pa.array(["text", "x"]),
        pa.array([b"bytes"], pa.large_binary()),
        pa.array([[1, 2], []], pa.list_(pa.int64())),
        pa.array([{"a": 1}, None], pa.struct([("a", pa.int8())])),
        pa.array([True, False]),
        pa.nulls(5),
        pa.array([1.0, 2.0], pa.float64()),
        pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        pa.array([], pa.int16()),
        pa.array([1, 2], pa.timestamp("us", "UTC")),
        pa.array([("k", 1)], pa.struct([("a", pa.string()), ("b", pa.int8())])),
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 4], pa.int32()), pa.array([1, 2], pa.int8())),
        pa.array(["a", "b"], pa.string_view()),
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])),
        pa.FixedShapeTensorArray.from_numpy_ndarray(number.to_numpy().reshape(4, 16)),
        pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])]),
    ]
    found = [pa.record_batch([array], names=["data"]) for array in arrays]
    found.append(pa.record_batch([number, number], names=["a", "b"]))
    found.append(pa.record_batch([], schema=pa.schema([])))
    found.append(pa.record_batch([pa.array(["a"]).dictionary_encode()], names=["data"]))
    return found


def _spoil_messages(rng: random.Random, made: Request) -> Request:
    """Return the same call with the protobuf of its messages damaged, or with messages lost, doubled or swapped."""
    messages = list(made.messages)
    at = rng.randrange(len(messages)) if messages else 0
    match rng.randrange(5) if messages else 4:
        case 0 | 1:
            messages[at] = mutate_bytes(rng, messages[at], messages[0])
        case 2:
            del messages[at]
        case 3:
            messages.insert(at, messages[rng.randrange(len(messages))])
        case _:
            messages.append(rng.randbytes(rng.choice((0, 1, 50))))
    return replace(made, messages=messages, how=f"{made.how}, messages spoilt")


def _names(made: Request) -> set[str]:
    """Return every name that this request may have given to an object or a scope."""
    found = {text for sent in made.messages for text in _json_names(sent)}
    for sent in made.messages:
        for descriptor in _fields(sent, 1):
            found |= {part.decode("utf-8", "replace") for part in _fields(descriptor, 3)}
    bodies = [body for sent in made.messages for body in _fields(sent, 1000)]
    found |= {source_name(content_digest(b"".join(bodies[:count]))) for count in range(len(bodies) + 1)}
    return {name for name in found if name}


def _json_names(sent: bytes) -> Iterator[str]:
    for text in _NAME.findall(sent):
        try:
            yield str(json.loads(text))
        except ValueError:
            continue


def _fields(data: bytes, number: int) -> list[bytes]:
    try:
        return [value for found, value in fields_of(data) if found == number]
    except IndexError:
        return []
