"""All changes of the product that `python -m tests.mutation --named` tries."""

from __future__ import annotations

from tests.mutation.named import NAMED
from tests.mutation.named_node import NAMED_NODE
from tests.mutation.named_trouble import NAMED_TROUBLE
from tests.mutation.named_wiring import NAMED_WIRING

ALL_NAMED = (*NAMED, *NAMED_TROUBLE, *NAMED_WIRING, *NAMED_NODE)
