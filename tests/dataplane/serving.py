"""Starts `python -m dataplane serve` as a user does, with any flags."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 60.0

_REAPING = re.compile(r"^dataplane WARNING removed \d+ segment\(s\) that dead nodes left in .*\n", re.MULTILINE)


class Served:
    """A node that runs as a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", uri: str, greeting: str, log: Path) -> None:
        self.process = process
        self.uri = uri
        self.greeting = greeting
        self._log = log

    def log(self) -> str:
        """The text that the node wrote to standard error so far."""
        return about_itself(self._log.read_text())


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Served]:
    """Run a node on a free port during a `with` block, and stop it with Ctrl-C at the end."""
    command = [sys.executable, "-m", "dataplane", "serve", "--port", "0", "--memory", "16MiB", *flags]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DATAPLANE_")}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving at " in line, log.read_text()
        greeting = line + process.stdout.readline()
        yield Served(process, line.split("serving at ")[1].split()[0], greeting, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def refused(*flags: str) -> str:
    """Return the message of a node that refuses to start with these flags."""
    command = [sys.executable, "-m", "dataplane", "serve", "--port", "0", "--memory", "1MiB", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode in (1, 2), (done.returncode, done.stderr)
    return about_itself(done.stderr)


def about_itself(errors: str) -> str:
    """Return the errors without messages about nodes that another test has just killed, because tests run beside each
    other."""
    return _REAPING.sub("", errors)
