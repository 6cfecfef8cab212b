"""Parsers of option values of the command line, as argparse calls them.

Each function parses one kind of value, or raises ArgumentTypeError that says what was wanted.
"""

import argparse

from dataplane.core.units import parse_bytes
from dataplane.storage.numa import NumaPolicy


def parse_memory(text: str) -> int:
    """Parse a size such as `1GiB`, `512MiB`, `1.5GB` or `1048576`; return bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_numa(text: str) -> NumaPolicy:
    """Return the NUMA policy in the text: `interleave` or `bind:N`."""
    try:
        return NumaPolicy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_root(text: str) -> tuple[str, str]:
    """Parse a data set `NAME=GLOB`; return name and glob."""
    name, equals, pattern = text.partition("=")
    if not (name and equals and pattern):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name a dataset; wanted NAME=GLOB, such as train='train-*.tar'"
        )
    return name, pattern


def parse_peer(text: str) -> tuple[str, str]:
    """Parse another node `ID=URI`; return id and address."""
    node_id, equals, uri = text.partition("=")
    if not (node_id and equals and uri.startswith("grpc")):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name a node; wanted ID=URI, such as a=grpc://10.0.0.1:8815"
        )
    return node_id, uri


def parse_seconds(text: str) -> float:
    """Return the seconds in the text: a time to wait of more than 0, at most a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time to wait; wanted seconds, more than 0 and at most 86400"
        )
    return seconds


def parse_port(text: str) -> int:
    """Return the TCP port in the text; 0 means any free one."""
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; wanted 0 to 65535")
    return int(text)


def parse_workers(text: str) -> int:
    """Return the number of worker processes in the text, 1 to 1024."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers; wanted 1 to 1024")
    return int(text)


def parse_count(text: str) -> int:
    """Return the number of samples in the text, 1 to a billion."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples; wanted 1 to 1000000000")
    return int(text)
