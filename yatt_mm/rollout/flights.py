"""Groups on their way through vLLM's core: sent sample by sample, waited for, ended together.

Left out: when requests may enter the core, and how long answers may take, which is `engine`'s.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from yatt_mm.rollout.requests import GenerateRequest, MediaDroppedError, Sampled

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


class Flight:
    """One group."""

    def __init__(self, prefix: str, request: GenerateRequest) -> None:
        self.prefix = prefix
        self.digests = tuple(medium.digest for medium in request.media)
        self.scored_token_ids = request.scored_token_ids
        self.queues: list[RequestOutputCollector] = []


class Flights:
    """All groups of one engine.

    Consumes: requests.  Produces: samples.  Waits for: the core, without a bound of its own.
    """

    def __init__(self, name: str, llm: "AsyncLLM", backend: Any, inputs: Any, *, is_usable: Callable[[], bool]) -> None:
        """`inputs` is the backend's InputBuilder; `is_usable` tells whether the core still listens."""
        self.num_samples = 0
        """Sent and not yet waited for to the end."""
        self._name = name
        self._llm = llm
        self._backend = backend
        self._inputs = inputs
        self._is_usable = is_usable
        self._request_ids = itertools.count()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[list[Flight]]:
        """Where groups are noted as they are sent; whatever ends the block early ends them too."""
        flights: list[Flight] = []
        try:
            yield flights
        except BaseException:
            if self._is_usable():
                await self._llm.abort([q.request_id for flight in flights for q in flight.queues], internal=True)
            raise
        finally:
            self.num_samples -= sum(len(flight.queues) for flight in flights)

    async def send(self, request: GenerateRequest, flights: list[Flight]) -> None:
        """Hand the group's samples to the core, in order."""
        prefix = f"{self._name}-{next(self._request_ids)}"
        flight = Flight(prefix, request)
        flights.append(flight)
        try:
            for index, seed in enumerate(request.seeds):
                params = self._backend.sampling_params(request, seed)
                sample = self._inputs.build(request)
                flight.queues.append(await self._llm.add_request(f"{prefix}-{index}", sample, params))
                self.num_samples += 1
        except BaseException:
            self._inputs.forget(flight.digests)  # whether they were sent is not known
            raise

    async def collect(self, flight: Flight, on_progress: Callable[[], None]) -> list[Sampled]:
        """Wait for the group's samples; `on_progress` is called as each is finished."""

        async def one(queue: "RequestOutputCollector") -> Sampled:
            output = queue.get_nowait() or await queue.get()
            on_progress()
            return self._to_sampled(flight, output)  # type: ignore[arg-type]

        return await asyncio.gather(*map(one, flight.queues))

    def _to_sampled(self, flight: Flight, output: "RequestOutput") -> Sampled:
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            self._inputs.forget(flight.digests)
            raise MediaDroppedError(
                f"engine {self._name} failed request {flight.prefix}: its process no longer held the media "
                f"{', '.join(flight.digests) or 'none'}; send the request once more"
            )
        return Sampled(
            token_ids=tuple(completion.token_ids),
            logprobs=self._backend.logprobs_of(completion),
            text=self._llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True),
            finish_reason=str(completion.finish_reason),
            policy_versions=self._backend.versions_of(completion),
            scored_logprobs=self._backend.scored_logprobs_of(completion, flight.scored_token_ids),
        )
