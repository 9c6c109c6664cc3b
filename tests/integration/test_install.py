"""`pip install .`, and what the source distribution makes with each extra, in empty environments.

The extras `test` and `dev` are what the suite itself runs in: `make test` installs them.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.children import Children, free_ports
from tests.unit.deploy.files import ROOT, pyproject

pytestmark = pytest.mark.image

FILE = """
version: 1
state: {{url: "{state}"}}
models:
  - name: m
    boundary: {{b_short: 4096}}
    compression: {{enabled: true{more}}}
    pools:
      short: {{max_model_len: 8192, max_num_seqs: 8, workers: ["http://127.0.0.1:1"]}}
      long: {{max_model_len: 65536, max_num_seqs: 8, workers: ["http://127.0.0.1:2"]}}
"""
EXTRAS = (
    *("", "redis", "batches", "s3", "exact", "jwt", "k8s", "kv-events", "otel", "plan", "train"),
    "bench",
)


class Environment:
    """A virtual environment, and an empty folder in which commands run."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.folder = folder
        self.bin = venv / "bin"

    def sluice(self, *words: str, code: int = 0) -> str:
        """What the command prints."""
        return run(str(self.bin / "sluice"), *words, cwd=self.folder, code=code)

    def python(self, program: str) -> str:
        return run(str(self.bin / "python"), "-c", program, cwd=self.folder)


def run(*command: str, cwd: Path = ROOT, code: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pip(*words: str) -> None:
    """The suite's own, in the repository."""
    run(sys.executable, "-m", "pip", "--quiet", *words)


def empty(folder: Path) -> Path:
    """A virtual environment in a folder."""
    base = getattr(sys, "_base_executable", sys.executable)
    run(base, "-m", "venv", "--without-pip", str(folder / "venv"))
    return folder / "venv"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Of the tree, of the source distribution that the tree makes, and a folder of all needed."""
    folder = tmp_path_factory.mktemp("wheels")
    (folder / "tree").mkdir()
    build = (
        "from hatchling.build import build_sdist, build_wheel\n"
        f"build_sdist({str(folder)!r}); build_wheel({str(folder / 'tree')!r})"
    )
    run(sys.executable, "-c", build)
    (source,) = folder.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (of_tree,) = folder.glob("tree/*.whl")
    (of_source,) = folder.glob("*.whl")
    every = f"{of_source}[{','.join(EXTRAS[1:])}]"
    pip("wheel", "--wheel-dir", str(folder / "needed"), every)
    return of_tree, of_source, folder / "needed"


def test_the_source_distribution_makes_the_wheel_of_the_tree(
    wheels: tuple[Path, Path, Path],
) -> None:
    contents = []
    for wheel in wheels[:2]:
        with zipfile.ZipFile(wheel) as archive:
            contents.append({entry.filename: entry.CRC for entry in archive.infolist()})
    assert contents[0] == contents[1]
    assert len(contents[0]) > 300


@pytest.fixture(scope="module")
def exact(
    wheels: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Make one environment hold the wheel with an extra and nothing else.

    By uv, which only exchanges what differs: what stays has its bytecode, which takes longer than
    all else where each extra has an environment of its own.
    """
    _, wheel, needed = wheels
    folder = tmp_path_factory.mktemp("extras")
    venv = empty(folder)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--exact", "--no-config"]
    uv += ["--offline", "--no-index", "--find-links", str(needed)]
    uv += ["--cache-dir", str(folder / "uv"), "--python", str(venv / "bin/python")]

    def hold(extra: str) -> Path:
        run(*uv, f"sluice-gateway[{extra}] @ {wheel.as_uri()}")
        return venv

    return hold


@pytest.fixture(scope="module", params=EXTRAS)
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Environment]:
    extra: str = request.param
    folder = tmp_path_factory.mktemp(extra or "core")
    if extra:
        return extra, Environment(request.getfixturevalue("exact")(extra), folder)
    venv = empty(folder)
    pip("--python", str(venv / "bin/python"), "install", "--no-compile", ".")
    return extra, Environment(venv, folder)


def test_every_extra_for_users_is_tried() -> None:
    extras = pyproject()["project"]["optional-dependencies"].keys()
    assert {*EXTRAS[1:], "test", "dev"} == extras


def test_what_is_installed_checks_serves_and_does_what_its_extra_is_for(
    installed: tuple[str, Environment],
) -> None:
    extra, environment = installed
    version = pyproject()["project"]["version"]
    assert environment.sluice("--version") == f"sluice {version}\n"
    USES[extra](environment)


def configuration(environment: Environment, state: str = "memory://", more: str = "") -> str:
    file = environment.folder / "sluice.yaml"
    file.write_text(FILE.format(state=state, more=more), encoding="utf-8")
    return str(file)


def serves_and_compresses(environment: Environment) -> None:
    """Without an extra: a fleet that answers, and the compressor."""
    (port,) = free_ports(1)
    command = [str(environment.bin / "sluice"), "demo", "--port", str(port), "--no-traffic"]
    with Children() as children:
        children.start(command, quiet=True, silent=True)
        children.wait_for(f"http://127.0.0.1:{port}/ready")
    environment.sluice("check", "-c", configuration(environment))
    (environment.folder / "prompt.txt").write_text("One sentence. Another one. " * 99)
    told = environment.sluice("compress", "prompt.txt", "--budget", "500", "--json")
    assert json.loads(told)["compressed"] is True
    for state, more, hint in (
        ("redis://h:6379/0", "", ".[redis]"),
        ("memory://", f", tokenizer: {__file__}", ".[exact]"),
    ):
        told = environment.sluice("check", "-c", configuration(environment, state, more), code=2)
        assert f"pip install '{hint}'" in told
    told = environment.sluice("controller", "--namespace", "t", "--state-url", "redis://h", code=2)
    assert "pip install '.[k8s]'" in told


def speaks_to_redis(environment: Environment) -> None:
    environment.sluice("check", "-c", configuration(environment, "redis://h:6379/0"))


def counts_tokens(environment: Environment) -> None:
    environment.python(
        "from tokenizers import Tokenizer, models;"
        "Tokenizer(models.WordLevel({'a': 0, '?': 1}, unk_token='?')).save('tokenizer.json')"
    )
    environment.sluice(
        "check", "-c", configuration(environment, more=", tokenizer: tokenizer.json")
    )


def exports_telemetry(environment: Environment) -> None:
    file = Path(configuration(environment))
    file.write_text(file.read_text() + "telemetry: { otlp: true }\n", encoding="utf-8")
    environment.sluice("check", "-c", str(file))


def keeps_files(environment: Environment) -> None:
    """In a directory: what is written is read."""
    file = Path(configuration(environment))
    file.write_text(file.read_text() + "batches: { url: file:///tmp/any }\n", encoding="utf-8")
    environment.sluice("check", "-c", str(file))
    environment.python(
        "import asyncio\nfrom gateway.batches.contents import Contents\n"
        "async def main():\n"
        "    contents = Contents(f'file://{__import__(\"os\").getcwd()}/files')\n"
        "    await contents.write('a', b'one')\n"
        "    assert await contents.read('a') == b'one'\n"
        "asyncio.run(main())"
    )


def keeps_files_in_a_bucket(environment: Environment) -> None:
    keeps_files(environment)
    file = Path(configuration(environment))
    file.write_text(file.read_text() + "batches: { url: s3://bucket }\n", encoding="utf-8")
    environment.sluice("check", "-c", str(file))
    environment.python(
        "from gateway.batches.contents import Contents; Contents('s3://bucket').close()"
    )


def trusts_tokens(environment: Environment) -> None:
    (environment.folder / "jwks.json").write_text('{"keys": []}')
    file = Path(configuration(environment))
    issuer = "{issuer: https://id.example, jwks: jwks.json, audience: [sluice]}"
    file.write_text(file.read_text() + f"auth: {{ jwt: [{issuer}] }}\n", encoding="utf-8")
    environment.sluice("check", "-c", str(file))


def reconciles_objects(environment: Environment) -> None:
    """A controller whose API server and Redis are away: it starts, and waits for them."""
    (environment.folder / "kubeconfig").write_text(
        """
apiVersion: v1
kind: Config
current-context: away
clusters: [{name: away, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: away, context: {cluster: away, user: nobody}}]
users: [{name: nobody, user: {}}]
"""
    )
    (port,) = free_ports(1)
    command = [str(environment.bin / "sluice"), "controller", "--namespace", "team"]
    command += ["--state-url", "redis://127.0.0.1:1/0", "--port", str(port)]
    env = {"KUBECONFIG": str(environment.folder / "kubeconfig")}
    with Children() as children:
        children.start(command, env=env, quiet=True, silent=True)
        children.wait_for(f"http://127.0.0.1:{port}/health")


def subscribes_to_engines(environment: Environment) -> None:
    file = configuration(environment)
    Path(file).write_text(
        Path(file)
        .read_text()
        .replace('"http://127.0.0.1:1"', '{url: "http://127.0.0.1:1", kv_events: "tcp://*:5557"}')
    )
    environment.sluice("check", "-c", file)
    environment.python("import zmq.asyncio, gateway.fleet.kv_events")


def plans(environment: Environment) -> None:
    environment.sluice("plan", "--workload", "azure", "--rate", "10", "--json")


def trains(environment: Environment) -> None:
    (environment.folder / "empty.jsonl").write_text("")
    told = environment.sluice("train", "--log", "empty.jsonl", code=2)
    assert "pip install" not in told


def plots(environment: Environment) -> None:
    """It has what planning, training and the client for Redis need, too."""
    environment.python("import redis, sklearn.ensemble")
    environment.sluice("plan", "--workload", "azure", "--rate", "10", "--plot", "plots")
    assert list((environment.folder / "plots").glob("*.png"))


USES = {
    "": serves_and_compresses,
    "redis": speaks_to_redis,
    "batches": keeps_files,
    "s3": keeps_files_in_a_bucket,
    "exact": counts_tokens,
    "jwt": trusts_tokens,
    "k8s": reconciles_objects,
    "kv-events": subscribes_to_engines,
    "otel": exports_telemetry,
    "plan": plans,
    "train": trains,
    "bench": plots,
}
