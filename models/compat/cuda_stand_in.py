"""A replacement for `torch.cuda` inside megatron.core, on a machine without CUDA.

Streams and events do nothing, because the CPU runs in order. Memory sizes are zero. Random state is torch's own. Only
what megatron-core 0.16.1 uses for training is here; any other name raises AttributeError.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch


class Event:
    """A CUDA event. All work before it is always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Do nothing: on the CPU there is nothing to mark."""

    def wait(self, *args: Any) -> None:
        """Do nothing: all work before the event is finished."""

    def query(self) -> bool:
        """Return True, because the work before the event is always finished."""
        return True

    def synchronize(self) -> None:
        """Do nothing: all work before the event is finished."""


class Stream(Event):
    """A CUDA stream. Its work is finished as soon as it is issued."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: the other stream's work is finished."""

    def wait_event(self, event: Event) -> None:
        """Do nothing: the work before the event is finished."""

    def record_event(self, *args: Any) -> Event:
        """Return an event that has already happened."""
        return Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


CUDA = SimpleNamespace(
    BFloat16Tensor=torch.BFloat16Tensor,
    CUDAGraph=type("CUDAGraph", (), {}),
    Event=Event,
    FloatTensor=torch.FloatTensor,
    HalfTensor=torch.HalfTensor,
    OutOfMemoryError=torch.OutOfMemoryError,
    Stream=Stream,
    amp=torch.cuda.amp,
    current_device=lambda: torch.device("cpu"),
    current_stream=lambda *args: Stream(),
    default_generators=(torch.default_generator,),
    default_stream=lambda *args: Stream(),
    device=_no_context,
    device_count=lambda: 1,
    empty_cache=_nothing,
    get_device_capability=lambda *args: (0, 0),
    get_rng_state=_get_rng_state,
    ipc_collect=_nothing,
    is_available=lambda: False,
    is_current_stream_capturing=lambda: False,
    is_initialized=lambda: True,
    manual_seed=torch.manual_seed,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    memory_allocated=_zero,
    memory_reserved=_zero,
    memory_stats=lambda *args: {},
    nvtx=SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context),
    random=SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state),
    reset_peak_memory_stats=_nothing,
    set_device=_nothing,
    set_rng_state=_set_rng_state,
    stream=_no_context,
    synchronize=_nothing,
)
