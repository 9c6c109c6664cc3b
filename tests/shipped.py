"""The configuration files that the project ships or writes, for tests."""

import re
from pathlib import Path
from typing import Final

from planner.gateway_file import gateway_file
from planner.goals import Goals
from planner.plan import make_plan
from planner.records import Question
from planner.workload.library import SHIPPED
from sluice.demo.config import managed
from sluice.hash_key import hashed_key

ROOT: Final = Path(__file__).parents[1]
ENVIRONMENT: Final = {
    "SLUICE_ADMIN_KEY": "sk-admin",
    "SLUICE_KEY_HASH": hashed_key("sk-everybody"),
}
"""What the files take from the environment."""
NAMES: Final = ("README", "compose", "demo", "plan")


def shipped(name: str) -> str:
    """The text of one of NAMES."""
    if name == "README":
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"```yaml\n(version: 1\n.*?)```", text, re.DOTALL)
        return str(block)
    if name == "compose":
        return (ROOT / "deploy/compose/sluice.yaml").read_text(encoding="utf-8")
    if name == "demo":
        short = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        apart = {"prefill": "http://127.0.0.1:4", "decode": "http://127.0.0.1:5"}
        return managed(8080, short, "http://127.0.0.1:3", apart, Path("/tmp"))
    question = Question(
        workload=SHIPPED["azure"].workload,
        goals=Goals(rate_per_s=50.0, ttft_s=2.0),
        b_short=(4096,),
        gamma=1.5,
        compressible=0.8,
    )
    return gateway_file(make_plan(question))
