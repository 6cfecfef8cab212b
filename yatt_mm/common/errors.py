"""The errors of the trainer: one small tree. Each is also a standard exception and survives pickling."""

from __future__ import annotations


class YattError(Exception):
    """Base of all errors that this package raises on purpose."""


class RunStopped(YattError):
    """The run was told to stop, has saved its state, and was stopped. The message says how it goes on."""


class RunLost(YattError, RuntimeError):
    """A part of the run was lost without which it has to be started again. The message says which, and why."""


class RunGrows(RunLost):
    """The run is started again on purpose, after it was saved: hosts that it lacked are there."""


class StopRequested(YattError):
    """The run was told to stop; raised in every controller at the same place of a step."""


class ConfigError(YattError, ValueError):
    """The configuration asks for something impossible. The message names the key, the value and what to change."""


class PhaseAbortedError(YattError, RuntimeError):
    """A phase that all controllers share was ended. The message names which controller failed, where and why."""


class PlacementError(YattError, RuntimeError):
    """Two roles were about to hold a device at the same time. The message names them and the device."""


class WorkerError(YattError, RuntimeError):
    """A worker process failed or did not reply in time; the message names it and what it was doing."""


class UnreachableError(WorkerError):
    """The connection to a worker broke during a call. The worker may be at work, and may have done what it was told."""


class DataError(YattError, ValueError):
    """The data cannot be used for training; the message names the shard, the key and the reason."""


class RewardError(YattError, RuntimeError):
    """The rewards cannot teach anything; the message names the function or the judge, the place and the counts."""


class TrainingError(YattError, RuntimeError):
    """Training cannot go on; the message says what was not finite or out of its range, where, and what to change."""


class DiskError(YattError, OSError):
    """A file of the run cannot be written; the message names it and what to do."""


class CheckpointError(YattError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not belong to this run."""
