"""`specwire up`: every service on this machine, from one command."""

import asyncio
import dataclasses
import functools
import logging
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import typer

from specwire import rpc
from specwire.cli.demo import run_demo
from specwire.cli.report import print_report
from specwire.config import API_KEY_VARIABLE, DEFAULT_ADDRESS, CoordinatorConfig, HttpConfig
from specwire.console import make_console
from specwire.errors import SpecwireError, UnavailableError
from specwire.extras import check_engine
from specwire.launch import Supervisor
from specwire.log import set_up_logging
from specwire.socket_folder import socket_folder
from specwire.stack.checks import check_addresses, check_models
from specwire.stack.plan import Stack, StackOptions, plan_stack

logger = logging.getLogger(__name__)

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_FILE_WIDTH = 120  # columns of tables where there is no terminal


def run_up(options: StackOptions, *, with_demo: bool) -> None:
    """Starts all services, reports, and serves until a stop signal.

    Raises:
        SpecwireError: something keeps the services from starting.
    """
    check_engine()
    check_models(options)
    listen = tuple(map(free_address, options.coordinator.listen))
    options = dataclasses.replace(options, coordinator=dataclasses.replace(options.coordinator, listen=listen))
    if options.http is not None:
        listen = tuple(free_address(address, "--http-port") for address in options.http.listen)
        options = dataclasses.replace(options, http=dataclasses.replace(options.http, listen=listen))
    check_addresses(options)
    set_up_logging("up")
    with socket_folder("specwire-") as folder:
        stack = plan_stack(options, Path(folder))
        asyncio.run(serve(stack, with_demo=with_demo, startup_timeout_s=options.up.startup_timeout_s))


async def serve(stack: Stack, *, with_demo: bool, startup_timeout_s: float) -> None:
    """Runs the services until SIGINT or SIGTERM, or until nobody reads what is printed; then stops them in order. A second signal kills them.

    Raises:
        UnavailableError: a service does not start.
        BrokenPipeError: nobody reads standard output.
    """
    abandoned = asyncio.Event()
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, abandoned.set)
    groups = stack.groups(restarts_coordinator=True)
    supervisor = Supervisor(groups, functools.partial(print_line, abandoned), startup_timeout_s=startup_timeout_s)
    serving = asyncio.create_task(_serve(supervisor, stack, with_demo))
    stopping, leaving = asyncio.create_task(rpc.wait_for_stop_signal()), asyncio.create_task(abandoned.wait())
    try:
        await asyncio.wait([serving, stopping, leaving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.kill)
        if not serving.done():
            logger.info("stopping (once more to kill)")
        for task in (serving, stopping, leaving):
            task.cancel()
        await asyncio.gather(serving, stopping, leaving, return_exceptions=True)
        await supervisor.stop()


async def _serve(supervisor: Supervisor, stack: Stack, with_demo: bool) -> None:
    await supervisor.start()
    tasks = [asyncio.create_task(supervisor.watch()), asyncio.create_task(_present(stack, with_demo))]
    try:
        # The watch never returns: this ends with the first error, or when it is cancelled.
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _present(stack: Stack, with_demo: bool) -> None:
    """Reports what runs, answers the demo prompt, and says how to call."""
    console = make_console(_FILE_WIDTH)
    verifiers, drafters = [], []
    for verifier in stack.verifiers:
        async with rpc.open_channel(verifier.listen[0]) as channel:
            verifiers.append(await rpc.describe_verifier(channel))
    for drafter in stack.drafters:
        async with rpc.open_channel(drafter.listen[0]) as channel:
            drafters.append(await rpc.describe_drafter(channel))
    print_report(console, stack, verifiers, drafters)
    if with_demo:
        try:
            await run_demo(console, stack.private_address)
        except SpecwireError as error:
            logger.error("the demo failed: %s", error)
    console.print(
        f"serving on {stack.address} until Ctrl-C; call it from another terminal or from Python:", style="bold", markup=False, soft_wrap=True
    )
    for line in how_to_call(stack.coordinator, takes_text=not stack.verifiers[0].skip_tokenizer):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if stack.http is not None:
        console.print(f"OpenAI-compatible HTTP API: {base_url(stack.http)}", style="bold", markup=False, soft_wrap=True)


def how_to_call(coordinator: CoordinatorConfig, *, takes_text: bool = True) -> list[str]:
    """First calls, ready to be pasted, but for keys that only the caller has; in Python only where the prompt must be token ids."""
    host, separator, port = coordinator.listen[0].rpartition(":")
    address = f"{_LOOPBACK.get(host, host)}{separator}{port}"
    options, arguments, imports, key = "", [], "Client", f"{API_KEY_VARIABLE}=... " if coordinator.api_keys else ""
    if address != DEFAULT_ADDRESS:
        options, arguments = f" --address {address}", [repr(address)]
    if coordinator.tls_cert:
        own = [" --tls-cert CERT --tls-key KEY", ", 'CERT', 'KEY'"] if coordinator.tls_client_auth else ["", ""]
        options += f" --tls-ca {coordinator.tls_cert}{own[0]}"
        arguments.append(f"tls=TlsOptions({coordinator.tls_cert!r}{own[1]})")
        imports = "Client, TlsOptions"
    # A virtual environment need not be active to be used.
    program = "specwire" if shutil.which("specwire") or Path(sys.argv[0]).name != "specwire" else sys.argv[0]
    client = f"from specwire import {imports}; print(Client({', '.join(arguments)}).generate"
    if not takes_text:
        return [f"{client}([1, 2, 3]).token_ids)"]
    return [f'{key}{program} generate "The capital of France is"{options}', f'{client}("The capital of France is").text)']


def base_url(config: HttpConfig) -> str:
    """What OpenAI's clients need to know."""
    host, separator, port = config.listen[0].rpartition(":")
    return f"{'https' if config.tls_cert else 'http'}://{_LOOPBACK.get(host, host)}{separator}{port}/v1"


def print_line(abandoned: asyncio.Event, name: str, line: str) -> None:
    """A service's log line on stderr, with its name in front; the event is set when nobody reads it any more."""
    if abandoned.is_set():
        return
    try:
        typer.echo(f"{typer.style(f'{name:<11} |', dim=True)} {line}", err=True)
    except OSError:
        abandoned.set()


def free_address(address: str, option: str = "--port") -> str:
    """The address, with any free port for port 0. Raises UnavailableError if its port can't be bound now: `option` gives another one."""
    if address.startswith("unix:"):
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{free_port(int(port), host, option)}"


def free_port(port: int, host: str = "127.0.0.1", option: str = "--port") -> int:
    """The port, or any free one for 0. Raises UnavailableError if it can't be bound now."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UnavailableError(f"port {port} on {host} can't be used ({reason}); stop what uses it, or choose another one with {option}") from error
