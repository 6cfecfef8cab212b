"""One vLLM engine: its frontend in the calling process, its core in one process of its own.

What it adds to vLLM: ready engine inputs whose media cross to the core once, batches that are the same bit for bit
when they are given again, weight updates that leave no stale cache, deadlines on every wait, and an end that leaves
nothing behind. Left out: templates, tokenising and refs (`worker`), and what vLLM itself is told (`backend`).
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from yatt_mm.rollout import processes
from yatt_mm.rollout.launched import Launched
from yatt_mm.rollout.requests import (
    EngineAsleepError,
    EngineConfig,
    EngineError,
    EngineTimeoutError,
    GenerateRequest,
    MediaDroppedError,
    Medium,
    Sampled,
)

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector

__all__ = ["Engine", "EngineConfig", "EngineError", "GenerateRequest", "Medium", "Sampled"]

logger = logging.getLogger(__name__)

OnDone = Callable[[int, Sampled], None]
"""Called with a sample's index in its group as soon as it is finished."""


class Engine:
    """Made by `start`; every method belongs to the event loop that started it.

    Consumes: requests with views of media.  Produces: sampled responses.
    Waits for: vLLM's core process, never longer than the config's deadlines.  Unblocked by: its outputs, or its death.
    """

    def __init__(self, config: EngineConfig, launched: Launched) -> None:
        self.config = config
        self._launched = launched
        self._llm = launched.llm
        self._backend = launched.backend
        self._inputs = launched.backend.InputBuilder(launched.llm, config.model_dir)
        self._sending = asyncio.Lock()  # held while requests enter the core, and while its caches or weights change
        self._request_ids = itertools.count()
        self._num_in_flight = 0
        self._is_asleep = False
        self._is_shut_down = False
        self._has_said_resident = False
        self._failure: str | None = None
        self._deadlines: set[asyncio.Timeout] = set()
        self._stop_watching = processes.watch(launched.processes, self._on_death)
        self.policy_version = config.policy_version

    @classmethod
    async def start(cls, config: EngineConfig) -> "Engine":
        """Start vLLM. What was started is ended again when that fails or takes longer than the config allows."""
        launched = Launched()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await asyncio.to_thread(launched.launch, config)
                await launched.llm.update_weight_version(str(config.policy_version))
        except BaseException as error:
            await asyncio.to_thread(launched.end, config.shutdown_timeout_s)
            if isinstance(error, TimeoutError):
                message = f"engine {config.name} did not start within {config.start_timeout_s:g} s"
                raise EngineTimeoutError(f"{message}; its log tells how far it came") from error
            if isinstance(error, Exception):
                raise EngineError(f"engine {config.name} did not start from {config.model_dir}: {error}") from error
            raise
        return cls(config, launched)

    @property
    def num_ipc_bytes(self) -> int:
        """Bytes of media that were sent to the core process so far."""
        return self._inputs.num_ipc_bytes

    @property
    def normalizes_on_device(self) -> bool:
        """Whether the engine takes uint8 patches; else the frontend rescales and normalises them."""
        return self._inputs.normalizes_on_device

    @property
    def image_token_id(self) -> int:
        """The placeholder that stands for one image token."""
        return int(self._inputs.image_token_id)

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model's folder."""
        return self._llm.get_tokenizer()

    async def generate(self, request: GenerateRequest, *, on_done: OnDone | None = None) -> list[Sampled]:
        """The group's samples, in the order of its seeds, computed together with whatever else is in flight.

        The request's media are let go as soon as they were sent. Raises MediaDroppedError when the core had dropped
        media it had been sent before: the same request, made once more, sends them again.
        """
        self._check_usable()
        async with self._flights() as flights, self._deadline(f"a group of {len(request.seeds)}"):
            async with self._sending:
                await self._send(request, flights)
            del request
            return await self._collect(flights[0], on_done)

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[list[Sampled]]:
        """All requests' groups, computed as one batch: the same list gives the same bits, whatever came before.

        The core is paused while the requests enter it in order, and starts with empty prefix and encoder caches, so
        that neither arrival times nor history decide what is computed together. Needs an engine with nothing in
        flight; raises EngineError otherwise, and MediaDroppedError as `generate` does.
        """
        self._check_usable()
        if self._num_in_flight:
            raise EngineError(
                f"engine {self.config.name} has {self._num_in_flight} samples in flight; a deterministic batch needs "
                "an idle engine: await what was started first"
            )
        async with self._flights() as flights, self._deadline(f"a batch of {len(requests)} groups"):
            async with self._sending:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                try:
                    await self._forget_computed()
                    for request in requests:
                        await self._send(request, flights)
                finally:
                    await self._llm.resume_generation()
            del request, requests
            return [await self._collect(flight, None) for flight in flights]

    async def update_weights(self, path: str, version: int) -> None:
        """Load the segment at `path` and give its `version` to every token sampled from now on.

        Samples in flight are held and go on with the new weights. All three caches that hold results of the old
        weights are emptied before anything is computed: prefix (keys and values), encoder (vision embeddings), and
        media. An engine whose update failed is unusable, and says so.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_usable(asleep_is_fine=True)
        try:
            async with self._deadline(f"the update to version {version}"), self._sending:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                if self._is_asleep and not self._backend.is_cpu():
                    await self._llm.wake_up(tags=["weights"])
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))
                await self._llm.finish_weight_update(weight_version=str(version))
                await self._forget_computed()
                await self._llm.reset_mm_cache()
                if not self._is_asleep:
                    await self._llm.resume_generation()
        except Exception as error:
            self._failure = f"its update to version {version} failed ({type(error).__name__}: {error})"
            raise EngineError(f"engine {self.config.name} failed its update to version {version}: {error}") from error
        except asyncio.CancelledError:
            self._failure = f"its update to version {version} was cancelled"
            raise
        self.policy_version = version

    async def reset_caches(self) -> None:
        """Empty the prefix, encoder and media caches: nothing that was computed or sent before is used again."""
        self._check_usable()
        async with self._deadline("a reset of the caches"), self._sending:
            await self._forget_computed()
            await self._llm.reset_mm_cache()

    async def sleep(self) -> None:
        """Give the device back and refuse work; what is in flight ends with finish reason "abort".

        On the CPU vLLM cannot free its memory: the engine stays resident, says so once, and refuses work all the same.
        """
        if self._is_asleep:
            return
        self._check_usable()
        on_cpu = self._backend.is_cpu()
        if on_cpu and not self._has_said_resident:
            logger.info("engine %s stays resident while asleep: vLLM frees nothing on the CPU", self.config.name)
            self._has_said_resident = True
        async with self._deadline("falling asleep"), self._sending:
            await self._llm.sleep(level=0 if on_cpu else 1, mode="abort")
            self._is_asleep = True

    async def wake_up(self) -> None:
        """Take the device again and accept work."""
        if not self._is_asleep:
            return
        self._check_usable(asleep_is_fine=True)
        async with self._deadline("waking up"), self._sending:
            await self._llm.wake_up(tags=["scheduling"] if self._backend.is_cpu() else None)
            self._is_asleep = False

    async def shutdown(self) -> None:
        """End every process that the engine started and remove its files, within the config's deadline."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._stop_watching()
        self._give_up("it was shut down")
        if (handler := self._llm.output_handler) is not None:
            handler.cancel()  # else it logs the end of the core as a failure
        del self._llm
        await asyncio.to_thread(self._launched.end, self.config.shutdown_timeout_s)

    @asynccontextmanager
    async def _flights(self) -> AsyncIterator[list["_Flight"]]:
        """Where groups are noted as they are sent; whatever ends the block early ends them too."""
        flights: list[_Flight] = []
        try:
            yield flights
        except BaseException:
            if self._failure is None:
                await self._llm.abort([q.request_id for flight in flights for q in flight.queues], internal=True)
            raise
        finally:
            self._num_in_flight -= sum(len(flight.queues) for flight in flights)

    async def _send(self, request: GenerateRequest, flights: list["_Flight"]) -> None:
        """Hand the group's samples to the core, in order."""
        prefix = f"{self.config.name}-{next(self._request_ids)}"
        flight = _Flight(prefix, tuple(medium.digest for medium in request.media))
        flights.append(flight)
        try:
            for index, seed in enumerate(request.seeds):
                params = self._backend.sampling_params(request, seed)
                sample = self._inputs.build(request)
                flight.queues.append(await self._llm.add_request(f"{prefix}-{index}", sample, params))
                self._num_in_flight += 1
        except BaseException:
            self._inputs.forget(flight.digests)  # whether they were sent is not known
            raise

    async def _collect(self, flight: "_Flight", on_done: OnDone | None) -> list[Sampled]:
        """Wait for the group's samples."""
        samples = (self._sampled(flight, index, queue, on_done) for index, queue in enumerate(flight.queues))
        return await asyncio.gather(*samples)

    async def _sampled(
        self, flight: "_Flight", index: int, queue: "RequestOutputCollector", on_done: OnDone | None
    ) -> Sampled:
        output = queue.get_nowait() or await queue.get()
        sampled = self._to_sampled(flight, output)  # type: ignore[arg-type]
        if on_done is not None:
            on_done(index, sampled)
        return sampled

    def _to_sampled(self, flight: "_Flight", output: "RequestOutput") -> Sampled:
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            self._inputs.forget(flight.digests)
            raise MediaDroppedError(
                f"engine {self.config.name} failed request {flight.prefix}: its process no longer held the media "
                f"{', '.join(flight.digests) or 'none'}; send the request once more"
            )
        return Sampled(
            token_ids=tuple(completion.token_ids),
            logprobs=self._backend.logprobs_of(completion),
            text=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            finish_reason=str(completion.finish_reason),
            policy_versions=self._backend.versions_of(completion),
        )

    async def _forget_computed(self) -> None:
        """Drop keys, values and vision embeddings; samples that are held while paused are computed again."""
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(f"engine {self.config.name} could not empty its prefix cache")
        await self._llm.reset_encoder_cache()

    def _check_usable(self, *, asleep_is_fine: bool = False) -> None:
        if self._failure:
            raise EngineError(f"engine {self.config.name} is unusable: {self._failure}; start another")
        if self._is_asleep and not asleep_is_fine:
            raise EngineAsleepError(f"engine {self.config.name} is asleep; call wake_up before giving it work")

    def _on_death(self, pid: int) -> None:
        self._give_up(f"its process {pid} died")

    def _give_up(self, reason: str) -> None:
        """End every wait now: vLLM itself would let them hang."""
        self._failure = self._failure or reason
        for deadline in self._deadlines:
            deadline.reschedule(0)

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        """Bounds a wait, and names the engine in what ends it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        seconds = self.config.answer_timeout_s
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                yield
        except (TimeoutError, EngineDeadError) as error:
            if self._failure is None and isinstance(error, EngineDeadError):
                self._failure = "its process died"
            if self._failure is not None:
                raise EngineError(f"engine {self.config.name} gave up {what}: {self._failure}") from error
            raise EngineTimeoutError(
                f"engine {self.config.name} did not finish {what} within {seconds:g} s "
                f"({self._num_in_flight} samples in flight, policy version {self.policy_version})"
            ) from error
        finally:
            self._deadlines.discard(deadline)


class _Flight:
    """A group on its way through the core."""

    def __init__(self, prefix: str, digests: tuple[str, ...]) -> None:
        self.prefix = prefix
        self.digests = digests
        self.queues: list[RequestOutputCollector] = []
