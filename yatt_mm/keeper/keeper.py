"""The keeper: it writes what the model said into a file per step.

Consumes: the kept groups of all controllers, as refs. Produces: `rollouts/step_<n>.parquet` (`table.py`).
Waits for: the data plane, within its deadline. Pixels stay in the node, whose workers make the small pictures.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.errors import DataPlaneError
from dataplane.core.refs import Ref
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.writing import writing
from yatt_mm.keeper.table import Row, table_path, write_rows
from yatt_mm.protocol import group_record
from yatt_mm.protocol.control import ScoredGroup
from yatt_mm.protocol.kept import KeptGroup, Split

THUMBNAILS = {
    "image": {"kernel": "thumbnail", "version": 1},
    "video": {"kernel": "video_thumbnail", "version": 1},
}
"""The recipes of the small pictures, by the kind of the medium: at most 8 KiB each."""

logger = logging.getLogger(__name__)


class Keeper:
    """Writes the kept groups of a run. It handles one call at a time."""

    def __init__(self, client: Client, reader: Reader, *, run_dir: Path, num_controllers: int) -> None:
        """`client`, `reader`: of the node that has the records."""
        self._run_dir = run_dir
        self._num_controllers = num_controllers
        self._client = client
        self._reader = reader
        self._shares: dict[tuple[int, Split], list[Row]] = defaultdict(list)
        """[step, split] the rows so far."""
        self._num_complete: Counter[tuple[int, Split]] = Counter()
        """[step, split] the number of controllers that have sent all their groups."""
        self._restart_count = 0
        self._step = -1
        self._written: set[Split] = set()
        """The splits of the present step whose rows are complete."""
        self._rows: list[Row] = []
        """The rows of the present step, so far."""

    def keep(
        self, step: int, split: Split, groups: Sequence[KeptGroup], *, is_last: bool, restart_count: int = 0
    ) -> None:
        """Read some of a controller's kept groups, which may be released afterwards. The file is written with the last
        groups of the last controller. `restart_count`: of the controllers; what those before a restart have sent in
        part is forgotten, and what they have sent as a whole is not read again.

        Raises:
            DataPlaneError: the records cannot be read.
            DiskError: the file cannot be written.
        """
        if restart_count > self._restart_count:
            self._restart_count = restart_count
            self._shares.clear()
            self._num_complete.clear()
        if restart_count < self._restart_count or (step == self._step and split in self._written):
            return
        rows = self._shares[step, split]
        rows += self._read(groups)
        self._num_complete[step, split] += is_last
        if self._num_complete[step, split] < self._num_controllers:
            return
        del self._shares[step, split], self._num_complete[step, split]
        rows.sort(key=lambda row: (row["position"], row["place"]))
        if step != self._step:
            self._step, self._rows, self._written = step, [], set()
        self._written.add(split)
        self._rows += [{"step": step, "split": split, **row} for row in rows]
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
        media = [
            {"kind": kind_of(ref), "source": _source(ref), "thumbnail": pictures.get(_source(ref))}
            for ref in prompt.media
        ]
        conversation = _clean(json.dumps(prompt.conversation.messages(), ensure_ascii=False))
        return [
            {
                "position": prompt.slot.position,
                "epoch": prompt.slot.epoch,
                "set": prompt.slot.set_name,
                "index": prompt.slot.index,
                "place": place,
                "question": _clean(prompt.question.text),
                "conversation": conversation,
                "answer": _clean(prompt.answer),
                "response": _clean(sample.text),
                "reward": scored.rewards[place],
                "advantage": kept.advantages[place] if kept.advantages is not None else None,
                "scores": [
                    {
                        "source": scores.source,
                        "score": scores.values[place],
                        "words": None if scores.words is None else _clean(scores.words[place]),
                    }
                    for scores in scored.scores
                ],
                "parts": [
                    {"name": name, "value": values[place]}
                    for name, values in scored.parts.items()
                    if values[place] is not None
                ],
                "read_answer": _read_answer(scored, place),
                "finish_reason": sample.finish_reason,
                "num_tokens": len(sample.token_ids),
                "token_ids": sample.token_ids,
                **_summary(sample),
                "media": media,
            }
            for place, sample in enumerate(record.samples)
        ]

    def _pictures(self, refs: Sequence[Ref]) -> dict[str, bytes]:
        """Return a small picture of each distinct medium, by its source. Those that cannot be made now are left out,
        because a run does not need them."""
        distinct = {_source(ref): ref for ref in refs}
        pictures: dict[str, bytes] = {}
        for kind, recipe in THUMBNAILS.items():
            of_kind = [ref for ref in distinct.values() if kind_of(ref) == kind]
            if not of_kind:
                continue
            try:
                found = self._client.derive(of_kind, {**recipe, **_decoder(of_kind[0])})
                made = [ref for ref in found if isinstance(ref, Ref)]
                for ref, view in zip(made, self._reader.resolve(made) if made else ()):
                    pictures[_source(ref)] = view.tobytes()
            except DataPlaneError as error:
                logger.warning("no pictures of %d media of kind %s: %s", len(of_kind), kind, error)
        return pictures


def _read_answer(scored: ScoredGroup, place: int) -> str | None:
    answer = scored.answers[place] if scored.answers else None
    return None if answer is None else _clean(answer)


def _clean(text: str) -> str:
    """Return the text without what UTF-8 cannot hold: halves of characters, which JSON may escape."""
    return text.encode("utf-8", "replace").decode()


def _source(ref: Ref) -> str:
    """Return the digest of the encoded medium from which an object was made."""
    assert ref.lineage is not None
    return ref.lineage.source


def _decoder(ref: Ref) -> dict[str, str]:
    """Return the recipe's field that names the decoder of a run's videos. Images have none."""
    recipe = ref.lineage.recipe if ref.lineage is not None else None
    return {"decoder": recipe["decoder"]} if recipe is not None and "decoder" in recipe else {}


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
