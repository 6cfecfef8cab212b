"""One vLLM engine: generate, sleep, wake up, update weights. Its frontend is in this process, its core in another.

It adds to vLLM: inputs whose media are sent to the core once, batches that give the same bits when they are repeated,
weight updates that leave no stale cache, a timeout on every wait, and a shutdown that leaves no process and no file.
Left out: prompt templates, tokenising and refs (`worker`), and the arguments of vLLM (`vllm_backend`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.published import Published
from yatt_mm.rollout import child_processes
from yatt_mm.rollout.engine_health import EngineHealth
from yatt_mm.rollout.engine_process import EngineProcess
from yatt_mm.rollout.engine_types import (
    Cut,
    EngineAsleepError,
    EngineConfig,
    EngineError,
    EngineTimeoutError,
    GenerateRequest,
    MediaTokens,
    Medium,
    Sampled,
)
from yatt_mm.rollout.in_flight import InFlightGroups

__all__ = ["EngineConfig", "EngineError", "GenerateRequest", "Medium", "Sampled", "VllmEngine"]

logger = logging.getLogger(__name__)


class VllmEngine:
    """A running vLLM engine. `start` makes it; call its methods only in the event loop that started it.

    Consumes: requests with views of media.  Produces: sampled responses.
    Waits for: vLLM's core process, never longer than the config allows.  Unblocked by: its outputs, or its death.
    """

    def __init__(self, config: EngineConfig, launched: EngineProcess) -> None:
        self.config = config
        self._launched = launched
        self._llm = launched.llm
        self._backend = launched.backend
        self._inputs = launched.backend.InputBuilder(launched.llm, config)
        self._health = EngineHealth(config.name, config.answer_timeout_s, self._describe)
        self._sending = asyncio.Lock()  # held while requests enter the core, and while its caches or weights change
        self._flights = InFlightGroups(
            config.name, launched.llm, self._backend, self._inputs, is_usable=lambda: self._health.failure is None
        )
        self._state = State.AWAKE
        self._source = Published(version=config.policy_version, path=config.model_dir)
        self._must_reload = False
        self._is_shut_down = False
        self._has_said_resident = False
        self._stop_watching = child_processes.watch(launched.processes, self._on_death)
        self.policy_version = config.policy_version

    @classmethod
    async def start(cls, config: EngineConfig) -> "VllmEngine":
        """Start vLLM and return the engine, awake.

        If the start fails or takes longer than the config allows, everything that was started is ended again.

        Raises:
            EngineTimeoutError: the start took too long.
            EngineError: the start failed.
        """
        launched = EngineProcess()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await asyncio.to_thread(launched.launch, config)
                await launched.llm.update_weight_version(str(config.policy_version))
            return cls(config, launched)
        except BaseException as error:
            await asyncio.to_thread(launched.end, config.shutdown_timeout_s)
            if isinstance(error, TimeoutError):
                message = f"engine {config.name} did not start within {config.start_timeout_s:g} s"
                raise EngineTimeoutError(f"{message}; its log shows how far the start came") from error
            if isinstance(error, Exception):
                raise EngineError(f"engine {config.name} did not start from {config.model_dir}: {error}") from error
            raise

    @property
    def num_ipc_bytes(self) -> int:
        """The number of bytes of media that were sent to the core process since the start."""
        return self._inputs.num_ipc_bytes

    @property
    def num_in_flight(self) -> int:
        """The number of samples (single responses, not groups) that the engine computes now or that wait in it."""
        return self._flights.num_samples

    @property
    def normalizes_on_device(self) -> bool:
        """True if the engine takes uint8 patches; else the frontend rescales and normalises them."""
        return self._inputs.normalizes_on_device

    @property
    def media_tokens(self) -> MediaTokens:
        """The tokens with which the model writes media into its prompts."""
        tokens: MediaTokens = self._inputs.tokens
        return tokens

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model folder."""
        return self._llm.get_tokenizer()

    async def generate(self, request: GenerateRequest, cut: Cut | None = None) -> list[Sampled]:
        """Return the group's samples, in the order of its seeds. Other requests may be computed at the same time.

        If the `cut` is made or the engine falls asleep, samples under way end with the tokens that they have and finish
        reason "abort". The engine drops the request's views of media as soon as they are sent.

        Raises:
            EngineAsleepError: the engine is asleep, or fell asleep before the request was sent.
            MediaDroppedError: the core had dropped media that were sent to it earlier. Make the same request once more;
                it sends them again.
        """
        self._check_usable()
        async with self._flights.together() as flights, self._health.progress(f"a group of {len(request.seeds)}"):
            async with self._sending:
                self._check_usable()  # it may have fallen asleep in the meantime
                await self._flights.send(request, flights, cut)
            del request
            return await self._flights.collect(flights[0], self._health.note_progress)

    async def abort(self, cuts: Iterable[Cut]) -> None:
        """Make the cuts: their groups end now, and `generate` returns them with the tokens that they have.

        Samples that were not sent yet come back without a token.
        """
        self._check_usable(asleep_is_fine=True)
        for cut in cuts:
            cut.is_made = True
        await self._flights.abort_cut()

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[list[Sampled]]:
        """Return the groups of all requests, computed as one batch: the same list always gives the same bits.

        The core is paused while the requests enter it in order, and it starts with empty prefix and encoder caches. So
        neither arrival times nor earlier requests decide what is computed together.

        Raises:
            EngineError: the engine has other samples in flight.
            EngineAsleepError, MediaDroppedError: see `generate`.
        """
        self._check_usable()
        if self.num_in_flight:
            raise EngineError(
                f"engine {self.config.name} has {self.num_in_flight} samples in flight; a deterministic batch needs "
                "an idle engine: wait for the other samples first"
            )
        async with self._flights.together() as flights, self._health.progress(f"a batch of {len(requests)} groups"):
            async with self._sending:
                self._check_usable()  # it may have fallen asleep in the meantime
                async with self._paused():
                    await self._forget_computed()
                    for request in requests:
                        await self._flights.send(request, flights)
            del request, requests
            return [await self._flights.collect(flight, self._health.note_progress) for flight in flights]

    async def update_weights(self, published: Published) -> None:
        """Load a published policy. Every token that is sampled from now on gets its version.

        Samples in flight are paused and continue with the new weights. Before anything is computed, three caches are
        emptied: prefix (keys and values), encoder (vision embeddings) and media. An engine that was asleep holds its
        weights afterwards, until it is put to sleep again, and still refuses requests.

        Raises EngineError if the update fails; the engine is unusable then.
        """
        self._check_usable(asleep_is_fine=True)
        async with self._health.only_whole(f"its update to version {published.version}"), self._sending:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            if self._state is State.ASLEEP:
                await self._wake_weights()
            await self._load(published)
            await self._forget_computed()
            await self._llm.reset_mm_cache()
            if self._state is State.AWAKE:
                await self._llm.resume_generation()
        self._source = published
        self.policy_version = published.version
        self._health.note_progress()  # samples that were paused get their whole time again

    async def reset_caches(self) -> None:
        """Empty the prefix, encoder and media caches, so that no earlier result and no earlier medium is used again."""
        self._check_usable()
        async with self._health.deadline("a reset of the caches"), self._sending:
            await self._forget_computed()
            await self._llm.reset_mm_cache()

    async def sleep(self) -> None:
        """Put the engine to sleep: it frees the device and refuses requests.

        Samples in flight end with finish reason "abort". Weights that can be read again are dropped, others go to host
        memory. On the CPU vLLM cannot free its memory: the engine stays in memory, logs this once, and still refuses
        requests.
        """
        if self._state is State.ASLEEP:
            return
        self._check_usable(asleep_is_fine=True)
        level = self._backend.sleep_level(self._llm, can_reload=self._source.is_lasting)
        if not level and not self._has_said_resident:
            logger.info("engine %s stays in memory while it is asleep: vLLM frees nothing on the CPU", self.config.name)
            self._has_said_resident = True
        async with self._health.only_whole("its falling asleep"), self._sending:
            if self.config.num_labels is not None:
                await self._flights.abort_all()  # vLLM 0.32's frontend fails if its core aborts classifier requests
            await self._llm.sleep(level=level, mode="abort")
            self._state = State.ASLEEP
            self._must_reload = level == 2 or (self.config.reload_on_wake and self._source.is_lasting)

    async def settle(self) -> None:
        """Put the engine to sleep, whatever it is doing. Raises EngineError if it has failed, even in its sleep."""
        self._health.check()
        async with self._sending:  # it may be waking up, and is asleep until it has
            pass
        await self.sleep()

    async def wake_up(self) -> None:
        """Wake the engine up: it takes the device and accepts requests.

        Weights that were dropped are read again from the source of the last update.
        """
        if self._state is State.AWAKE:
            return
        self._check_usable(asleep_is_fine=True)
        async with self._health.only_whole("its wake-up"), self._sending:
            if self._must_reload:
                await self._wake_weights()
                await self._load(self._source)
            await self._llm.wake_up(tags=["scheduling"] if self._backend.is_cpu() else None)
            self._state = State.AWAKE

    async def shutdown(self) -> None:
        """End every process that the engine started and remove its files, within `shutdown_timeout_s`."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._stop_watching()
        self._health.give_up("it was shut down")
        if (handler := self._llm.output_handler) is not None:
            handler.cancel()  # else it would log the end of the core as a failure
        del self._llm, self._flights
        await asyncio.to_thread(self._launched.end, self.config.shutdown_timeout_s)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the core for a block, unless it dies in it: a dead one would never reply."""
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            yield
        finally:
            if self._health.failure is None:
                async with self._health.deadline("its going on"):
                    await self._llm.resume_generation()

    async def _wake_weights(self) -> None:
        """Take the memory of the weights again, but not that of the KV cache."""
        if not self._backend.is_cpu():
            await self._llm.wake_up(tags=["weights"])
        self._state = State.WEIGHTS_ONLY

    async def _load(self, published: Published) -> None:
        """Load other weights into the model. Call it only while nothing is computed."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=published.update_info()))
        await self._llm.finish_weight_update(weight_version=str(published.version))
        self._must_reload = False

    async def _forget_computed(self) -> None:
        """Drop keys, values and vision embeddings. They are computed again for samples that are paused."""
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(f"engine {self.config.name} could not empty its prefix cache")
        await self._llm.reset_encoder_cache()

    def _check_usable(self, *, asleep_is_fine: bool = False) -> None:
        """Check that the engine has not failed and, unless `asleep_is_fine`, that it is awake."""
        self._health.check()
        if self._state is not State.AWAKE and not asleep_is_fine:
            raise EngineAsleepError(f"engine {self.config.name} is asleep; call wake_up before sending it requests")

    def _on_death(self, pid: int) -> None:
        """Make the engine unusable because one of its processes died."""
        self._health.give_up(f"its process {pid} died")

    def _describe(self) -> str:
        """Return what the engine is working on, for the text of a timeout error."""
        return f"{self.num_in_flight} samples in flight, policy version {self.policy_version}"
