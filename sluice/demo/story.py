"""The story: its acts in order, told once or again and again."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from sluice.demo.acts import calm, engine, flood, phases, retrieval
from sluice.demo.client import Client
from sluice.demo.stage import Display, Engines, Stage

_PAUSE_S: Final = 4.0


class Act(NamedTuple):
    """One act."""

    name: str
    caption: str
    play: Callable[[Stage], Awaitable[str]]


ACTS: Final[Mapping[str, Act]] = {
    module.NAME: Act(module.NAME, module.CAPTION, module.play)
    for module in (calm, flood, retrieval, engine, phases)
}


async def tell(
    url: str,
    show: Display,
    names: Sequence[str],
    *,
    unmanaged: str | None = None,
    engines: Engines | None = None,
    pace: float = 1.0,
    once: bool = False,
) -> None:
    """Play these acts before the gateway at `url`, in a loop unless `once`."""
    async with Client(url) as gateway, Client(unmanaged or url) as plain:
        stage = Stage(
            gateway=gateway,
            show=show,
            unmanaged=None if unmanaged is None else plain,
            engines=engines,
            pace=pace,
        )
        while True:
            for name in names:
                act = ACTS[name]
                show.act(name, act.caption)
                show.result(name, await act.play(stage))
                await stage.wait(_PAUSE_S)
            if once:
                return
