"""The demo's processes: five mock engines, the gateway, and a plain relay to compare with."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from planner.profile import NodeProfile
from simulator.engine.engine import PROFILES, EngineProfile
from sluice.children import Children, free_ports
from sluice.demo.config import (
    LONG_WINDOW,
    MODEL,
    PHASES_MODEL,
    PREFILL_SLOTS,
    RANKS,
    SHORT_SLOTS,
    SHORT_WINDOW,
    SLOTS_PER_RANK,
    managed,
    unmanaged,
)


class DemoFleet:
    """Starts engines and gateways, and ends and starts engines again."""

    def __init__(self, children: Children, folder: Path, port: int, speed: float) -> None:
        """`port` 0 takes a free one; nothing is started yet."""
        *ports, own, plain = free_ports(7)
        self.url = f"http://127.0.0.1:{port or own}"
        self.unmanaged = f"http://127.0.0.1:{plain}"
        self.short: Sequence[str] = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        self.long, *apart = (f"http://127.0.0.1:{port}" for port in ports[2:])
        phases = dict(zip(("prefill", "decode"), apart, strict=True))
        self.config = folder / "sluice.yaml"
        text = managed(port or own, self.short, self.long, phases, folder)
        self.config.write_text(text, "utf-8")
        self._plain_config = folder / "unmanaged.yaml"
        self._plain_config.write_text(unmanaged(plain, self.short), "utf-8")
        measured = {"short": "demo-replica", "apart": "demo-replica", "long": "demo-ranks"}
        for pool, name in measured.items():
            (folder / f"{pool}.json").write_bytes(_profile(PROFILES[name], speed))
        self.log = folder / "processes.log"
        """Standard error of all."""
        self._children = children
        replica = ("--profile", "demo-replica")
        self._commands = {
            url: _mock(url, SHORT_WINDOW, SHORT_SLOTS, speed, *replica) for url in self.short
        }
        for slots, url in zip((PREFILL_SLOTS, SHORT_SLOTS), apart, strict=True):
            more = (*replica, "--model", PHASES_MODEL, "--kv-transfer", "vllm")
            hold = ("--kv-hold-seconds", str(30 * speed))  # 30 s, as real engines
            self._commands[url] = _mock(url, SHORT_WINDOW, slots, speed, *more, *hold)
        ranks = ("--profile", "demo-ranks", "--dp-ranks", str(RANKS))
        self._commands[self.long] = _mock(self.long, LONG_WINDOW, SLOTS_PER_RANK, speed, *ranks)
        self._engines: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *, compare: bool) -> None:
        """Start all and wait until they serve; `compare`: the plain relay, too."""
        for url in self._commands:
            self.start(url)
        for url in self._commands:
            self._children.wait_for(f"{url}/health")
        gateways = {self.url: self.config}
        if compare:
            gateways[self.unmanaged] = self._plain_config
        for file in gateways.values():
            command = [sys.executable, "-m", "sluice", "serve", "-c", str(file)]
            self._children.start(command, quiet=True, log=self.log)
        for url in gateways:
            self._children.wait_for(f"{url}/ready")

    def start(self, url: str) -> None:
        """Start an engine, or start it again."""
        self._engines[url] = self._children.start(self._commands[url], quiet=True, log=self.log)

    def kill(self, url: str) -> None:
        """End an engine at once, as a crash does."""
        engine = self._engines.pop(url)
        self._children.forget(engine)
        engine.kill()
        engine.wait()

    def last_words(self) -> str:
        """The end of the processes' log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-10:])


def _profile(engine: EngineProfile, speed: float) -> bytes:
    """An engine as `sluice calibrate` would measure it, for `sluice prove`."""
    names = ("w_s", "h_s", "h_s_per_token", "prefill_s_per_token", "attention_s_per_pair")
    fast = replace(engine, **{name: getattr(engine, name) / speed for name in names})
    node = NodeProfile(
        name=engine.name,
        gpu="mock",
        model=MODEL,
        gpus=1,
        w_s=fast.w_s,
        h_s_per_token=fast.h_s_per_token,
        kv_tokens=fast.kv_blocks * fast.block_tokens,
    )
    return msgspec.json.encode({**msgspec.structs.asdict(node), "engine": fast})


def _mock(url: str, window: int, slots: int, speed: float, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "sluice", "mock"),
        *("--port", url.rpartition(":")[2], "--model", MODEL, "--max-model-len", str(window)),
        *("--max-num-seqs", str(slots), "--speed", str(speed), *more),
    ]
