"""The demo's table and its plain lines."""

import io

import msgspec
from rich.console import Console

from sluice.demo.client import Answer
from sluice.demo.display import Plain, Shown

SERVED = Answer(
    who="guaranteed", what="probe", request_id="r", status=200, whole=True, pool="short",
    worker="127.0.0.1:9001", ttft_s=0.0124, prompt_tokens=1234,
)  # fmt: skip
REFUSED = Answer(who="spot", what="flood", request_id="r", status=429, reason="concurrency")


def test_plain_lines_are_one_a_request_and_those_of_a_flood_share_one() -> None:
    out, now = io.StringIO(), [0.0]
    with Plain(("calm", "flood"), out, lambda: now[0]) as show:
        show.act("flood", "A flood.")
        for answer in (SERVED, SERVED, REFUSED, REFUSED, REFUSED, SERVED, REFUSED):
            show.line(answer)
        now[0] = 2.5
        show.line(REFUSED)
        show.result("flood", "12 ms")
    assert out.getvalue().splitlines() == [
        "flood: A flood. (act 2 of 2)",
        "  tenant     asked       tokens  pool  worker   first token",
        "  guaranteed probe        1,234  short 9001           12 ms",
        "  guaranteed probe        1,234  short 9001           12 ms",
        "  guaranteed probe        1,234  short 9001           12 ms",
        "  spot       flood            -                              x 4, 429 concurrency",
        "  spot       flood            -                              429 concurrency",
        "flood = 12 ms",
    ]


def screen(show: Shown, console: Console) -> list[str]:
    with console.capture() as capture:
        console.print(show.render())
    return capture.get().splitlines()


def test_the_table_fits_a_terminal_of_80_columns_and_24_lines() -> None:
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=False)
    title = "Sluice demo  page http://127.0.0.1:8080/dashboard\nkeys sk-demo-a"
    show = Shown(console, title, ("calm", "flood"))
    show.result("calm", "46 of 46 answered. " * 9)
    show.act("flood", "A flood.")
    for number in range(100):
        show.line(msgspec.structs.replace(SERVED, prompt_tokens=number + 1))
        show.line(REFUSED)
    lines = screen(show, console)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("/dashboard"), "the page's address stays, and so do the keys"
    assert lines[1].startswith("keys sk-demo-a")
    assert lines[2].startswith("flood  A flood.")
    shown = "\n".join(lines)
    assert "429 concurrency" in shown
    assert " 100 short 9001" in shown, "the last request is seen"
    assert lines[-1].startswith("flood      ...")
    show.result("flood", "12 ms")
    assert screen(show, console)[-1].startswith("flood      12 ms")


def test_a_flood_hides_no_other_tenant() -> None:
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=False)
    show = Shown(console, "Sluice demo", ("flood",))
    for number in range(8):
        for _ in range(40):
            show.line(REFUSED)
        show.line(msgspec.structs.replace(SERVED, prompt_tokens=number + 1))
    lines = screen(show, console)
    assert sum("probe" in line for line in lines) == 8
    assert any("x 200, 429 concurrency" in line for line in lines)
