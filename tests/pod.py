"""A rendered pod, run by hand on this machine as a kubelet would: volumes, probes, preStop, grace.

Mounted paths become folders. What stands in the volumes and the Secret is given. There is no
container: the program is this repository's.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import httpx


class Pod:
    """One pod of one container, from its start to its end."""

    def __init__(
        self, process: asyncio.subprocess.Process, spec: Any, url: str, management: str
    ) -> None:
        self._process = process
        self._spec = spec
        self._container = spec["containers"][0]
        self.url = url
        self._ports = {"http": url, "management": management}
        self.killed = False
        """Whether the grace period was over before the process was."""

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.returncode

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        spec: Any,
        url: str,
        environment: Mapping[str, str],
        folder: Path,
        management: str = "",
    ) -> AsyncIterator[Self]:
        """Start the container of a pod's spec and wait until it serves.

        Its port `http` is at `url`, its port `management` at the other.
        """
        (container,) = spec["containers"]
        words = [_here(word, container, folder) for word in container["args"]]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice", *words),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        )
        pod = cls(process, spec, url, management)
        try:
            await pod._until_ready()
            yield pod
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def passes(self, name: str) -> bool:
        """Ask once what a probe asks."""
        probe = self._container[name]
        asked = probe["httpGet"]
        async with httpx.AsyncClient(timeout=probe.get("timeoutSeconds", 1)) as client:
            try:
                answer = await client.get(self._ports[asked["port"]] + asked["path"])
            except httpx.TransportError:
                return False
        return 200 <= answer.status_code < 400

    async def _until_ready(self) -> None:
        for name in ("startupProbe", "readinessProbe"):
            async with asyncio.timeout(60):
                while name in self._container and not await self.passes(name):  # noqa: ASYNC110
                    await asyncio.sleep(self._container[name]["periodSeconds"] / 4)

    async def end(self) -> None:
        """preStop, then SIGTERM, then SIGKILL when the grace period is over."""
        try:
            async with asyncio.timeout(self._spec["terminationGracePeriodSeconds"]):
                command = self._container["lifecycle"]["preStop"]["exec"]["command"]
                await (await asyncio.create_subprocess_exec(*command)).wait()
                self._process.terminate()
                await self._process.wait()
        except TimeoutError:
            self.killed = True
            self._process.kill()
            await self._process.wait()


def _here(word: str, container: Any, folder: Path) -> str:
    """A path below a mount as one of this machine."""
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    inside = re.compile("|".join(re.escape(mount) for mount in mounts))
    return f"{folder}{word}" if inside.match(word) else word
