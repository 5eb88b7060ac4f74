"""The compose stack as a benchmark handles it: docker's command line, run in threads so that clients go on meanwhile."""

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOOK_S = 0.25
"""Between two looks at something that does not announce itself."""
SERVICES = ("coordinator", "http", "verifier", "drafter")


class ComposeStack:
    """One project of docker-compose.yml.

    Args:
        project: its name, so that other stacks of the machine are left alone.
        environment: variables of docker-compose.yml.
    """

    def __init__(self, project: str, environment: dict[str, str]) -> None:
        self._project = project
        self._environment = os.environ | {"COMPOSE_PROFILES": "cpu"} | environment

    async def compose(self, *arguments: str, timeout_s: float = 1800) -> str:
        """`docker compose ARGUMENTS`; what it prints. Raises RuntimeError with its messages if it fails."""
        return await self._run(["docker", "compose", "--project-name", self._project, *arguments], timeout_s)

    async def scale(self, verifiers: int, drafters: int, *options: str) -> None:
        """Brings up what is missing, and returns once all of it is healthy."""
        numbers = ("--scale", f"verifier={verifiers}", "--scale", f"drafter={drafters}")
        await self.compose("up", "--detach", "--wait", "--no-recreate", *numbers, *options)

    async def containers(self, service: str) -> list[str]:
        """Names of a service's running containers."""
        filters = [f"label=com.docker.compose.project={self._project}", f"label=com.docker.compose.service={service}"]
        return sorted((await self._docker("ps", "--format", "{{.Names}}", *(f"--filter={text}" for text in filters))).split())

    async def execute(self, container: str, *command: str) -> str:
        """Runs a command inside, as the service's user."""
        return await self._docker("exec", container, *command)

    async def kill_process(self, container: str) -> None:
        """SIGKILL to the service inside: unlike `docker kill`, which counts as stopped by hand, the restart policy sees a crash."""
        await self._docker("exec", container, "sh", "-c", "kill -9 -1")

    async def num_restarts(self, container: str) -> int:
        return int(await self._docker("inspect", "--format", "{{.RestartCount}}", container))

    async def wait_restarted(self, container: str, num_restarts: int) -> None:
        """Returns once the restart policy has started it more than num_restarts times."""
        async with asyncio.timeout(60.0):
            while await self.num_restarts(container) <= num_restarts:  # noqa: ASYNC110 - another process counts
                await asyncio.sleep(LOOK_S)

    async def image_sizes_mb(self) -> dict[str, float]:
        """Size of each service's image."""
        sizes = {}
        for service in SERVICES:
            image = await self._docker("inspect", "--format", "{{.Image}}", (await self.containers(service))[0])
            sizes[service] = round(int(await self._docker("image", "inspect", "--format", "{{.Size}}", image.strip())) / 1e6)
        return sizes

    async def exit_statuses(self) -> dict[str, int]:
        """Of the containers that are stopped now."""
        lines = (await self.compose("ps", "--all", "--format", "json")).splitlines()
        states = [json.loads(line) for line in lines if line.startswith("{")]
        return {state["Name"]: state["ExitCode"] for state in states if state["State"] == "exited"}

    async def _docker(self, *arguments: str) -> str:
        return await self._run(["docker", *arguments], 120)

    async def _run(self, command: Sequence[str], timeout_s: float) -> str:
        result = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stdout[-4000:]}{result.stderr[-4000:]}")
        return result.stdout
