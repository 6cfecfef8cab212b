"""Groups in flight in vLLM's core: sends their samples, waits for results, aborts all samples of a group together.

Left out: when requests may enter the core and how long results may take; `VllmEngine` decides that.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from yatt_mm.rollout.engine_types import ABORTED, Cut, GenerateRequest, MediaDroppedError, Sampled

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


class InFlightGroup:
    """One group in flight, with the queues of its samples' results."""

    def __init__(self, prefix: str, request: GenerateRequest, cut: Cut | None) -> None:
        self.prefix = prefix
        self.cut = cut
        self.num_samples = len(request.seeds)
        self.digests = tuple(medium.digest for medium in request.media)
        self.scored_token_ids = request.scored_token_ids
        self.is_classified = request.max_tokens == 0
        self.queues: list[RequestOutputCollector] = []
        """[sample] The queue of its result; only samples that were sent have one."""

    @property
    def is_cut(self) -> bool:
        """True if the group must end with the tokens that it has."""
        return self.cut is not None and self.cut.is_made


class InFlightGroups:
    """All groups in flight of one engine.

    Consumes: requests. Produces: sampled responses. Waits for: vLLM's engine core, without a timeout.
    """

    def __init__(self, name: str, llm: "AsyncLLM", backend: Any, inputs: Any, *, is_usable: Callable[[], bool]) -> None:
        """`inputs`: the backend's InputBuilder. `is_usable`: returns True while the core still takes calls."""
        self.num_samples = 0
        """The number of samples that were sent and not yet collected."""
        self._name = name
        self._llm = llm
        self._backend = backend
        self._inputs = inputs
        self._is_usable = is_usable
        self._request_ids = itertools.count()
        self._under_way: set[InFlightGroup] = set()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[list[InFlightGroup]]:
        """Yield a list, to which the body of the `async with` block adds every group that it sends.

        If an error ends the block, all groups in the list are aborted.
        """
        flights: list[InFlightGroup] = []
        try:
            yield flights
        except BaseException:
            if self._is_usable():
                await self._abort(flights)
            raise
        finally:
            self._under_way.difference_update(flights)
            self.num_samples -= sum(len(flight.queues) for flight in flights)

    async def send(self, request: GenerateRequest, flights: list[InFlightGroup], cut: Cut | None = None) -> None:
        """Send the group's samples to vLLM, in order. Stop if `cut` ends the group meanwhile.

        Adds the group to `flights`.
        """
        prefix = f"{self._name}-{next(self._request_ids)}"
        flight = InFlightGroup(prefix, request, cut)
        flights.append(flight)
        self._under_way.add(flight)
        try:
            for index in range(flight.num_samples):
                if flight.is_cut:
                    break
                params = self._backend.params_of(request, index)
                sample = self._inputs.build(request, index)
                flight.queues.append(await self._llm.add_request(f"{prefix}-{index}", sample, params))
                self.num_samples += 1
        except BaseException:
            self._inputs.forget(flight.digests)  # it is not known whether they were sent
            raise
        if flight.is_cut:
            await self._abort([flight])  # `abort_cut` could not see the sample that was being sent

    async def abort_all(self) -> None:
        """End all groups; `collect` returns them with the tokens that they have."""
        await self._abort(self._under_way)

    async def abort_cut(self) -> None:
        """End the groups that their `Cut` says are to end; `collect` returns them with the tokens that they have."""
        await self._abort([flight for flight in self._under_way if flight.is_cut])

    async def collect(self, flight: InFlightGroup, on_progress: Callable[[], None]) -> list[Sampled]:
        """Wait for the group's samples and return them, in order. Calls `on_progress` when a sample is finished.

        Samples that were aborted have the tokens that were sampled until then.

        Raises MediaDroppedError if the engine's process no longer held the group's media.
        """

        async def one(queue: "RequestOutputCollector") -> Sampled:
            output: Any = queue.get_nowait() or await queue.get()
            on_progress()
            return self._to_classified(flight, output) if flight.is_classified else self._to_sampled(flight, output)

        sampled = await asyncio.gather(*map(one, flight.queues))
        return sampled + [ABORTED] * (flight.num_samples - len(sampled))

    async def _abort(self, flights: Collection[InFlightGroup]) -> None:
        await self._llm.abort([queue.request_id for flight in flights for queue in flight.queues], internal=True)

    def _to_sampled(self, flight: InFlightGroup, output: "RequestOutput") -> Sampled:
        """Return vLLM's output of a generating model as a Sampled."""
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            raise self._dropped(flight)
        return Sampled(
            token_ids=tuple(completion.token_ids),
            logprobs=self._backend.logprobs_of(completion),
            text=self._llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True),
            finish_reason=str(completion.finish_reason),
            policy_versions=self._backend.versions_of(completion),
            scored_logprobs=self._backend.scored_logprobs_of(completion, flight.scored_token_ids),
        )

    def _to_classified(self, flight: InFlightGroup, output: "PoolingRequestOutput") -> Sampled:
        """Return vLLM's output of a classifier as a Sampled with label logits."""
        if output.error is not None:
            raise self._dropped(flight)
        logits = self._backend.label_logits_of(output)
        return replace(ABORTED, label_logits=logits, finish_reason="stop") if logits else ABORTED

    def _dropped(self, flight: InFlightGroup) -> MediaDroppedError:
        """Return the error for a group whose media vLLM's engine core dropped, and note that they must be sent
        again."""
        self._inputs.forget(flight.digests)
        return MediaDroppedError(
            f"engine {self._name} failed request {flight.prefix}: its process no longer held the media "
            f"{', '.join(flight.digests) or 'none'}; send the request once more"
        )
