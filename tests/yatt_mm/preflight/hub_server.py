"""A small server that speaks as much of the Hugging Face hub's protocol as downloads need, on real files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The server, and what it was asked for."""

    def __init__(self, repositories: Mapping[str, Path], address: str) -> None:
        self.repositories = dict(repositories)
        """[`models/owner/name` or `datasets/owner/name`] the folder with the files."""
        self.address = address
        self.downloaded: list[str] = []
        """The files that were sent."""


@contextmanager
def hub(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """Serve folders as repositories of the hub during a `with` block."""
    served: list[Hub] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/"):
                name, _, rest = path.removeprefix("api/").partition("/revision/")
                if not rest:
                    name, _, rest = path.removeprefix("api/").partition("/tree/")
                folder = served[0].repositories.get(name)
                if folder is None:
                    self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                elif "/tree/" in path:
                    self._json([_entry(folder, file) for file in _files(folder)])
                else:
                    files = [{"rfilename": str(file.relative_to(folder))} for file in _files(folder)]
                    self._json({"id": name.partition("/")[2], "sha": COMMIT, "siblings": files})
                return
            kind = "datasets" if path.startswith("datasets/") else "models"
            name, _, rest = path.removeprefix("datasets/").partition("/resolve/")
            folder = served[0].repositories.get(f"{kind}/{name}")
            file = folder / rest.partition("/")[2] if folder else Path("none")
            if not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data = file.read_bytes()
            if self.command == "GET":
                served[0].downloaded.append(file.name)
            self._send(200, data, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.append(Hub(repositories, f"http://127.0.0.1:{server.server_port}"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served[0]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {"type": "file", "path": str(file.relative_to(folder)), "oid": _digest(data), "size": len(data)}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
