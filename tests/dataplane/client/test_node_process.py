"""Tests of what is told of a node that ends before it is ready. The tests of the embedded node have real nodes."""

import os
import sys
from pathlib import Path

import pytest

from dataplane.client.node_process import NodeProcess
from dataplane.core.errors import NodeUnavailableError


def test_a_node_that_ends_before_it_is_ready_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('the library is missing')"]
    process = NodeProcess(command, os.environ, tmp_path / "node.log")
    with pytest.raises(NodeUnavailableError, match=r"ended with code 1 before it was ready; the library is missing$"):
        process.wait_until_ready(20)
    process.remove()
