"""Scripted services over real gRPC, in this process or each in its own (`python -m tests.scripted`)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specwire.errors import AbortedError, InvalidArgumentError, SpecwireError
from specwire.messages import DraftResult, VerifyResult, Welcome
from specwire.rpc import Server
from specwire.tls import ServerTls
from specwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specwire.wire import describe, draft, verify
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import pause
from tests.scripted.verifier import ScriptedVerifier


class ScriptedService:
    """A scripted verifier or drafter on an address. `kill` ends it as SIGKILL would, as far as clients can tell."""

    def __init__(self, service: ScriptedVerifier | ScriptedDrafter, address: str = "127.0.0.1:0", tls: ServerTls | None = None) -> None:
        self.service = service
        if isinstance(service, ScriptedVerifier):
            verifier = _VerifierServicer(service)
            names, register = "specwire.v1.VerifierService", lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
        else:
            drafter = _DrafterServicer(service)
            names, register = "specwire.v1.DrafterService", lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, server)
        self._server = Server([address], [names], register, tls=tls)

    @property
    def address(self) -> str:
        return self._server.bound_addresses[0]

    async def start(self) -> str:
        await self._server.start()
        await self._server.set_serving(True)
        return self.address

    async def kill(self) -> None:
        await self._server.stop(0)


class _VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    def __init__(self, verifier: ScriptedVerifier) -> None:
        self._verifier = verifier

    async def Describe(self, request: Any, context: Any) -> Any:
        return verifier_pb2.VerifierServiceDescribeResponse(description=describe.pack_description(self._verifier.describe()))

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        return verifier_pb2.VerifierServiceGetTokenizerResponse(tokenizer=describe.pack_tokenizer(self._verifier.tokenizer()))

    async def Verify(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        verifier = self._verifier
        first = verify.unpack_round(await anext(requests))
        if first.hello is None:
            raise InvalidArgumentError("the first message of a Verify stream has no hello")
        session, welcome = verifier.open_session(first.hello)
        yield verify.pack_result(VerifyResult(first.session, first.lane, 0, welcome=welcome))
        rounds: asyncio.Queue[Any] = asyncio.Queue()
        session.on_taken_over = lambda: rounds.put_nowait(AbortedError("taken over by another stream of this coordinator"))

        async def receive() -> None:
            try:
                message = first
                while True:
                    if message.round:
                        verifier.receive(session, message)
                        rounds.put_nowait(message)
                    message = verify.unpack_round(await anext(requests))
            except StopAsyncIteration:
                rounds.put_nowait(None)
            except SpecwireError as error:
                rounds.put_nowait(error)

        reader = asyncio.create_task(receive())
        try:
            while (message := await rounds.get()) is not None:
                if isinstance(message, SpecwireError):
                    raise message
                if session.is_over:
                    continue  # what it was taken over with comes next
                result = verifier.launch(session)
                await pause(verifier.script.delay_s, message)
                verifier.answered(session)
                yield verify.pack_result(result)
        finally:
            reader.cancel()
            if not session.is_over:
                verifier.end_session(session)


class _DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    def __init__(self, drafter: ScriptedDrafter) -> None:
        self._drafter = drafter

    async def Describe(self, request: Any, context: Any) -> Any:
        return drafter_pb2.DrafterServiceDescribeResponse(description=describe.pack_description(self._drafter.describe()))

    async def Draft(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        drafter = self._drafter
        first = draft.unpack_round(await anext(requests))
        if first.hello is None:
            raise InvalidArgumentError("the first message of a Draft stream has no hello")
        session = drafter.open_session()
        try:
            yield draft.pack_result(DraftResult(first.session, first.lane, 0, welcome=Welcome(drafter.instance_id, 8)))
            async for request in requests:
                message = draft.unpack_round(request)
                await pause(drafter.script.delay_s, message)
                result = drafter.answer(session, message)
                if result is not None:
                    yield draft.pack_result(result)
        finally:
            drafter.end_session(session)
