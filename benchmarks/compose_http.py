"""The compose stack for real, over HTTP: a chat and its trace across four processes, two front ends, one of them stopped while both stream, the end.

python -m benchmarks.compose_http [--no-build]

Needs a Docker engine with the compose plugin. What it asks for is checked at the end: status 1 where something is not as it should be.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai

from benchmarks.compose_stack import SERVICES, ComposeStack
from benchmarks.report import RESULTS, Bystanders, write_report
from specwire.cli.trace import Trace, group, read_spans
from specwire.tracing.spec import BY_NAME

logger = logging.getLogger(__name__)

NUM_FRONT_ENDS = 2
_TRACES = "/var/cache/specwire/traces.jsonl"
_CONFIG = f"""
speculative_config: {{method: ngram, num_speculative_tokens: 3}}
verifier: {{num_threads: 1, kv_cache_memory: 134217728, max_model_len: 512, trace_file: {_TRACES}}}
drafter: {{trace_file: {_TRACES}}}
coordinator: {{verifier_wait_s: 300, trace_file: {_TRACES}}}
http: {{trace_file: {_TRACES}, grace_s: 25}}
"""
"""The front end that is stopped may take as long as compose lets it, less a little: the answers take more than usual on a busy machine."""
_QUESTION: Any = [{"role": "user", "content": "Count: 1, 2, 3, 1, 2, 3, 1, 2,"}]
_STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 300, "seed": 7, "extra_body": {"ignore_eos": True}}
_LEFT_WAIT_S = 60.0


class HttpDrill:
    """Steps in the order of a run; each one adds its figures to `figures`, and what is not as it should be to `failures`."""

    def __init__(self, stack: ComposeStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    async def chat(self) -> None:
        """One chat, whose trace is whole: spans of every service, each below the one that it belongs to."""
        (client,) = await self._clients(1)
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.create(model=model, messages=_QUESTION, max_tokens=24, temperature=0)
        self.figures["chat"] = answer.choices[0].message.content
        coordinator = (await self._stack.containers("coordinator"))[0]
        # Spans are written once a second: the command waits for them.
        await self._stack.execute(coordinator, "specwire", "trace", _TRACES, "--request", answer.id)
        await asyncio.sleep(1.5)
        copy = self._folder / "traces.jsonl"
        copy.write_text(await self._stack.execute(coordinator, "cat", _TRACES))
        traces = [trace for trace in group(read_spans(copy)[0]) if trace.request_id == answer.id]
        self._expect(len(traces) == 1, f"the chat has {len(traces)} traces")
        for trace in traces:
            self.figures["trace"] = {name: sum(span.service == name for span in trace.spans) for name in SERVICES}
            self._expect(not (faults := faults_of(trace)), f"the chat's trace: {faults}")

    async def scale(self) -> None:
        """More front ends, which say the same."""
        await self._stack.scale(1, 1, "--scale", f"http={NUM_FRONT_ENDS}")
        clients = await self._clients(NUM_FRONT_ENDS)
        models = [(await client.models.list()).data[0].id for client in clients]
        answers = [await client.completions.create(model=model, **_STORY) for client, model in zip(clients, models, strict=True)]
        texts = {answer.choices[0].text for answer in answers}
        self._expect(len(texts) == 1, f"{NUM_FRONT_ENDS} front ends say {len(texts)} different things")
        await self._stop_one(clients, models[0], texts.pop())

    async def stop(self) -> None:
        """SIGTERM to all."""
        await self._stack.compose("stop")
        self.figures["exit_statuses"] = statuses = await self._stack.exit_statuses()
        self._expect(len(statuses) == len(SERVICES) and not any(statuses.values()), f"after SIGTERM: {statuses}")

    async def _stop_one(self, clients: list[openai.AsyncOpenAI], model: str, text: str) -> None:
        """Scales back to one front end while all stream; nobody's answer is cut."""
        streams = [await client.completions.create(model=model, stream=True, **_STORY) for client in clients]
        heard = [await anext(aiter(stream)) for stream in streams]
        stopping = asyncio.create_task(self._stack.scale(1, 1, "--scale", "http=1"))
        for first, stream in zip(heard, streams, strict=True):
            parts = [first] + [chunk async for chunk in stream]
            self._expect("".join(part.choices[0].text for part in parts) == text, "a stream was cut or changed when its front end was stopped")
        await asyncio.wait_for(stopping, _LEFT_WAIT_S)
        left = await self._stack.containers("http")
        self._expect(len(left) == 1, f"front ends after scaling back: {left}")

    async def _clients(self, number: int) -> list[openai.AsyncOpenAI]:
        ports = [(await self._stack.compose("port", "--index", str(index + 1), "http", "8000")).strip() for index in range(number)]
        return [openai.AsyncOpenAI(base_url=f"http://{port}/v1", api_key="none", max_retries=0, timeout=120.0) for port in ports]

    def _expect(self, holds: bool, failure: str) -> None:
        if not holds:
            logger.error("%s", failure)
            self.failures.append(failure)


def faults_of(trace: Trace) -> list[str]:
    """What keeps a trace of a chat from being whole."""
    by_id = {span.span_id: span for span in trace.spans}
    faults = [f"no span of {name}" for name in SERVICES if not any(span.service == name for span in trace.spans)]
    faults += [f"{span.name}: {span.error}" for span in trace.spans if span.error]
    for span in trace.spans:
        parent = by_id.get(span.parent_id)
        if span.name != "http" and (parent is None or parent.name not in BY_NAME[span.name].parents):
            faults.append(f"{span.name} is below {parent.name if parent else 'nothing'}")
    return faults


async def run(args: argparse.Namespace, folder: Path) -> HttpDrill:
    """All steps; the stack and its volumes are gone afterwards."""
    ports = f"{args.http_port}-{args.http_port + NUM_FRONT_ENDS - 1}"
    environment = {"SPECWIRE_CONFIG": str(folder / "specwire.yaml"), "SPECWIRE_PORT": str(args.port), "SPECWIRE_HTTP_PORT": ports}
    stack = ComposeStack("specwire-http-drill", environment)
    drill = HttpDrill(stack, folder)
    try:
        await stack.scale(1, 1, *(("--build",) if args.build else ()))
        await drill.chat()
        await drill.scale()
        await drill.stop()
    except Exception:
        logger.error("the services' last words:\n%s", await stack.compose("logs", "--tail", "40"))
        raise
    finally:
        await stack.compose("down", "--volumes", "--timeout", "5")
    return drill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", dest="build", action="store_false", help="take the images that are there")
    parser.add_argument("--port", type=int, default=50160, help="on 127.0.0.1, for the coordinator")
    parser.add_argument("--http-port", type=int, default=8160, help="on 127.0.0.1, for the first front end; the next one has the next")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for compose_http.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    bystanders = Bystanders()
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        (folder / "specwire.yaml").write_text(_CONFIG)
        # The services read it as another user.
        folder.chmod(0o755)
        drill = asyncio.run(run(args, folder))
    print(f"spans of the chat's trace: {drill.figures.get('trace')}")
    print(f"written to {write_report('compose_http', {**drill.figures, 'failures': drill.failures}, args.output, bystanders)}")
    sys.exit(1 if drill.failures else 0)


if __name__ == "__main__":
    main()
