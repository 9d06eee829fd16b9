"""One server over hours: up, down, or refused; watched, and asked when it is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from vllm_redrafter.data.endpoints.client import EndpointClient, EndpointDown
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
LOOK_EVERY_SECONDS = 5.0
MISSED_LOOKS = 3
"""In a row: then the server is taken for dead, and what it was asked is asked elsewhere."""


class Endpoint:
    """A server that is checked before it is asked, and again when it failed.

    Args:
        client: asks it.
        check: is it the target that it serves? Gives the name to ask for.
        say: prints a line.
        on_change: called when it is up, or has room again.

    Attributes:
        is_up: it was right when it was last looked at.
        trouble: why it is not up; None where it is, or has not been looked at.
        refusal: what it serves instead of the target; None where that is not known.
        is_seen: it has been looked at.
        running: answers that are being written there.
    """

    def __init__(
        self,
        client: EndpointClient,
        check: Callable[[EndpointClient], Awaitable[str]],
        say: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.is_up = False
        self.trouble: str | None = None
        self.refusal: ConfigError | None = None
        self.is_seen = False
        self._client, self._check, self._say, self._on_change = client, check, say, on_change
        self._model = ""
        self._was_up = False
        self._delay = FIRST_DELAY_SECONDS
        self._down = asyncio.Event()
        self._requests: set[asyncio.Future[TurnAnswer]] = set()
        self._given_up: set[asyncio.Future[TurnAnswer]] = set()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def running(self) -> int:
        return len(self._requests)

    async def answer(self, turn: OpenTurn) -> TurnAnswer:
        """Have a turn answered.

        Raises:
            EndpointDown: the server failed.
            ConfigError: it refuses the request.
        """
        request = asyncio.ensure_future(self._client.answer(self._model, turn))
        self._requests.add(request)
        try:
            answer = await request
        except EndpointDown as error:
            self._fail(str(error))
            raise
        except asyncio.CancelledError:
            if request in self._given_up:
                raise EndpointDown(str(self.trouble)) from None
            raise
        finally:
            self._requests.discard(request)
            self._given_up.discard(request)
            self._on_change()
        self._delay = FIRST_DELAY_SECONDS
        return answer

    def retire(self) -> None:
        """Ask it nothing more; what it is answering may come to its end."""
        self.is_up = False
        self._watcher.cancel()

    def raise_what_broke(self) -> None:
        """An error of this program that ended the watch would otherwise never be heard of."""
        if self._watcher.done() and not self._watcher.cancelled():
            self._watcher.result()

    async def close(self) -> None:
        """Stop watching it, and close its connections."""
        self._watcher.cancel()
        await self._client.close()

    async def _watch(self) -> None:
        while True:
            await self._look()
            self.is_seen = True
            if self.is_up:
                await self._until_down()
            await asyncio.sleep(self._delay)
            self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)

    async def _look(self) -> None:
        try:
            self._model = await self._check(self._client)
        except EndpointDown as error:
            self._note(f"does not answer: {error}")
        except ConfigError as error:
            self.refusal = error
            self._note(f"is left out: {error}")
        else:
            again = " again" if self._was_up else ""
            self._say(f"endpoint {self.address} serves the target{again}, as {self._model!r}")
            self.is_up, self._was_up, self.trouble, self.refusal = True, True, None, None
            self._down.clear()
            self._on_change()

    async def _until_down(self) -> None:
        missed = 0
        while self.is_up:
            try:
                async with asyncio.timeout(LOOK_EVERY_SECONDS):
                    await self._down.wait()
            except TimeoutError:
                pass
            else:
                return
            try:
                await self._client.models()
                missed = 0
            except (EndpointDown, ConfigError) as error:
                missed += 1
                if missed == MISSED_LOOKS:
                    self._fail(f"{missed} looks in a row failed: {error}")
                    self._given_up |= self._requests
                    for request in self._requests:
                        request.cancel()

    def _fail(self, reason: str) -> None:
        """It is not asked again before it has been checked."""
        if self.is_up:
            self.is_up = False
            self._note(f"failed: {reason}")
            self._down.set()

    def _note(self, trouble: str) -> None:
        """Say why it is down, once."""
        if trouble != self.trouble:
            self.trouble = trouble
            self._say(f"endpoint {self.address} {trouble}")
