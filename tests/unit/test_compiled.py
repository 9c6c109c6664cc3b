"""What is compiled where asked for (pyproject.toml, docs/adr/0007) keeps to what mypyc can do."""

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from sluice.build import compiled

ROOT = Path(__file__).parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]["hooks"]["mypyc"]
EXCLUDED = {name for name in HOOK["exclude"] if "/" in name}
COMPILED = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in HOOK["include"]
    for path in ROOT.glob(pattern)
    if path.name != "__init__.py" and path.relative_to(ROOT).as_posix() not in EXCLUDED
)
DECISIONS = """
import hashlib, numpy as np
from gateway.fleet.fleet import PoolState
from gateway.scheduling.schedulers import make_scheduler
from predictor.online import PrefillPredictor
from simulator.experiments.prefix_oracle import UnboundedPrefixes
from simulator.experiments.scheduling import WORKER, Demand, SimulatedGateway, serve
from sluice.build import compiled

random = np.random.default_rng(7)
arrival_s = np.cumsum(random.exponential(1 / 9, 600))
sizes = random.integers(2, 80, 600)
families = random.integers(0, 10, 600)
demands = [
    Demand(arrival_s=float(at), client=f"c{i % 5}", prompt_tokens=64 * int(n) + 5,
           output_tokens=int(random.integers(1, 200)), cap_tokens=512, slo_s=2.0, kind="test",
           blocks=tuple(1000 * int(f if b < 20 else 100 + i) + b for b in range(n)))
    for i, (at, n, f) in enumerate(zip(arrival_s, sizes, families))
]
print("compiled" if compiled() else "interpreted")
for name in ("quartz", "least-loaded", "sticky", "round-robin"):
    for gateways in (1, 2):
        field = []
        for _ in range(gateways):
            pool = PoolState("pool", ("w0", "w1", "w2"), 256)
            predictor = PrefillPredictor(workers=3)
            scheduler = make_scheduler(name, pool, predictor=predictor)
            field.append(SimulatedGateway(pool, scheduler, UnboundedPrefixes(3), predictor))
        served = serve(demands, field, profiles=[WORKER] * 3)
        found = [np.asarray(a).tobytes() for a in (served.worker, served.queue_s, served.ttft_s)]
        print(name, gateways, hashlib.sha256(b"".join(found)).hexdigest())
"""
"""What each scheduler decides of 600 requests, and when, to the last bit."""


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def has_records(name: str) -> bool:
    """A class with arguments, or one of msgspec's: both lose what their arguments say."""
    return any(
        isinstance(node, ast.ClassDef)
        and (
            node.keywords
            or any(ast.unparse(base).endswith(("Struct", "Record")) for base in node.bases)
        )
        for node in ast.walk(tree(name))
    )


def awaits_at_the_end(name: str) -> bool:
    """In a `finally`: there mypyc 2.4 forgets the exception that passes."""
    return any(
        isinstance(inner, ast.Await)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Try)
        for last in node.finalbody
        for inner in ast.walk(last)
    )


@pytest.mark.parametrize("name", COMPILED)
def test_it_awaits_in_no_finally(name: str) -> None:
    assert not awaits_at_the_end(name), "name the module under exclude"


@pytest.mark.parametrize("name", COMPILED)
def test_no_class_of_it_takes_arguments(name: str) -> None:
    assert not has_records(name), "a record: name the module under exclude"


@pytest.mark.parametrize("name", COMPILED)
def test_no_bound_of_a_slice_does_anything(name: str) -> None:
    """mypyc 2.4 evaluates the bounds of a memoryview's slice twice; `len` and `max` may be."""
    harmless = {"len", "max", "min"}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Slice):
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            assert {ast.unparse(call.func) for call in calls} <= harmless, ast.unparse(node)
            assert not any(isinstance(n, ast.Await | ast.NamedExpr) for n in ast.walk(node))


@pytest.mark.parametrize("name", sorted(EXCLUDED))
def test_what_is_left_out_is_there_and_has_to_be(name: str) -> None:
    assert has_records(name) or awaits_at_the_end(name), "it could be compiled"


def test_what_decides_is_compiled() -> None:
    assert {"gateway/scheduling/quartz.py", "gateway/admission/admission.py"} <= set(COMPILED)
    assert len(COMPILED) > 50


@pytest.mark.skipif(not compiled(), reason="make test-compiled")
def test_compiled_it_decides_as_interpreted() -> None:
    def decided(tree: Path) -> list[str]:
        env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tree)}
        command = [sys.executable, "-c", DECISIONS]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()

    (how, *ours), (source_how, *theirs) = decided(ROOT), decided(ROOT.parent)
    assert (how, source_how) == ("compiled", "interpreted")
    assert len(ours) == 8
    assert len({line.split()[2] for line in ours}) > 6
    assert ours == theirs


@pytest.mark.skipif(not compiled(), reason="make test-compiled")
def test_the_wheel_has_all_of_it_and_runs(tmp_path: Path) -> None:
    (wheel,) = (ROOT / "dist").glob("sluice_gateway-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    built = {name.partition(".")[0] + ".py" for name in names if name.endswith(".so")}
    assert set(COMPILED) <= built
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-m", "sluice", "--version"], env=env, capture_output=True, check=True
    )
    assert b"(compiled)" in said.stdout
