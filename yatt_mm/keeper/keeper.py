"""The keeper: it writes what the model said into a file per step.

Consumes: the kept groups of all controllers, as refs. Produces: `rollouts/step_<n>.parquet` (`table.py`).
Waits for: the data plane, within its deadline. Pixels stay in the node, whose workers make the small pictures.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.writing import writing
from yatt_mm.keeper.table import Row, table_path, write_rows
from yatt_mm.protocol import group_record
from yatt_mm.protocol.kept import KeptGroup, Split

THUMBNAILS = {
    "image": {"kernel": "thumbnail", "version": 1},
    "video": {"kernel": "video_thumbnail", "version": 1},
}
"""The recipes of the small pictures, by the kind of the medium: at most 8 KiB each."""
MAX_AT_ONCE = 64
"""The most groups or media of one call to the data plane."""

logger = logging.getLogger(__name__)


class Keeper:
    """Writes the kept groups of a run. It handles one call at a time."""

    def __init__(self, *, run_dir: Path, num_controllers: int, dataplane_uri: str, timeout_s: float) -> None:
        """`timeout_s` is for calls to the data plane."""
        self._run_dir = run_dir
        self._num_controllers = num_controllers
        self._client = Client(dataplane_uri, timeout_s=timeout_s)
        self._reader = Reader(dataplane_uri, timeout_s=timeout_s)
        self._shares: dict[tuple[int, Split], list[list[Row]]] = defaultdict(list)
        """[step, split] the rows of each controller that has sent its groups."""
        self._step = -1
        self._rows: list[Row] = []
        """The rows of the present step, so far."""

    def keep(self, step: int, split: Split, groups: Sequence[KeptGroup]) -> None:
        """Read one controller's kept groups, which may be released afterwards. The file is written with the last
        controller's.

        Raises:
            DataPlaneError: the data plane failed.
            DiskError: the file cannot be written.
        """
        shares = self._shares[step, split]
        chunks = (groups[at : at + MAX_AT_ONCE] for at in range(0, len(groups), MAX_AT_ONCE))
        shares.append([row for chunk in chunks for row in self._read(chunk)])
        if len(shares) < self._num_controllers:
            return
        del self._shares[step, split]
        rows = sorted((row for share in shares for row in share), key=lambda row: (row["position"], row["place"]))
        earlier = self._rows if step == self._step else []
        self._rows, self._step = earlier + [{"step": step, "split": split, **row} for row in rows], step
        path = table_path(self._run_dir, step)
        with writing(path):
            write_rows(path, self._rows)

    def _read(self, groups: Sequence[KeptGroup]) -> list[Row]:
        """Return a row for each response of the groups."""
        views = self._reader.resolve([kept.scored.group.ref for kept in groups])
        records = [group_record.decode(view) for view in views]
        pictures = self._pictures([ref for kept in groups for ref in kept.scored.prompt.media])
        return [row for kept, record in zip(groups, records) for row in self._rows_of(kept, record, pictures)]

    def _rows_of(self, kept: KeptGroup, record: group_record.GroupRecord, pictures: dict[str, bytes]) -> list[Row]:
        scored, prompt = kept.scored, kept.scored.prompt
        words = [self._words(scores.words, len(record.samples)) for scores in scored.scores]
        media = [
            {"kind": kind_of(ref), "source": _source(ref), "thumbnail": pictures.get(_source(ref))}
            for ref in prompt.media
        ]
        return [
            {
                "position": prompt.slot.position,
                "epoch": prompt.slot.epoch,
                "index": prompt.slot.index,
                "place": place,
                "is_trained": kept.advantages is not None,
                "question": prompt.question,
                "answer": prompt.answer,
                "response": sample.text,
                "reward": scored.rewards[place],
                "advantage": kept.advantages[place] if kept.advantages is not None else None,
                "scores": [
                    {"source": scores.source, "score": scores.values[place], "words": said[place]}
                    for scores, said in zip(scored.scores, words)
                ],
                "finish_reason": sample.finish_reason,
                "token_ids": sample.token_ids,
                **_summary(sample),
                "media": media,
            }
            for place, sample in enumerate(record.samples)
        ]

    def _words(self, ref: Ref | None, num_responses: int) -> list[str | None]:
        """Return what a judge said about each response of a group."""
        if ref is None:
            return [None] * num_responses
        said: list[str] = json.loads(self._reader.resolve([ref])[0].tobytes())
        self._client.release([ref])
        return list(said)

    def _pictures(self, refs: Sequence[Ref]) -> dict[str, bytes]:
        """Return a small picture of each distinct medium, by its source. A medium of which none can be made is left
        out."""
        distinct = {_source(ref): ref for ref in refs}
        pictures: dict[str, bytes] = {}
        for kind, recipe in THUMBNAILS.items():
            of_kind = [ref for ref in distinct.values() if kind_of(ref) == kind]
            for at in range(0, len(of_kind), MAX_AT_ONCE):
                some = of_kind[at : at + MAX_AT_ONCE]
                made = [ref for ref in self._client.derive(some, recipe) if isinstance(ref, Ref)]
                for ref, view in zip(made, self._reader.resolve(made) if made else ()):
                    pictures[_source(ref)] = view.tobytes()
        return pictures


def _source(ref: Ref) -> str:
    """Return the digest of the encoded medium from which an object was made."""
    assert ref.lineage is not None
    return ref.lineage.source


def _summary(sample: group_record.SampleRecord) -> Row:
    """Return what the numbers of a response's tokens come to."""
    logprobs, versions = sample.logprobs, sample.policy_versions
    has_any = len(logprobs) > 0
    return {
        "logprob_mean": float(np.mean(logprobs, dtype=np.float64)) if has_any else None,
        "logprob_min": float(logprobs.min()) if has_any else None,
        "policy_version_min": int(versions.min()) if has_any else None,
        "policy_version_max": int(versions.max()) if has_any else None,
    }
