"""`slipway doctor` as a user runs it: with nothing on PATH, with secrets, and on a real Slurm."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.doctor import nodes
from launcher.doctor.examination import credentials, resolve_image
from launcher.doctor.facts import Credentials
from launcher.doctor.tool_rules import image_line
from launcher.sandbox.lifecycle import Sandbox


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine with an empty PATH and an empty home directory; return the directory of both."""
    for name in ("bin", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    variables = ("SLURM_CONF", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE")
    for name in (*variables, "ENROOT_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def by_name(out: str) -> dict[str, dict[str, Any]]:
    """Return the lines about this machine from the output of ``--json``, by their subject."""
    return {line["what"]: line for line in json.loads(out)["lines"] if "here" in line["where"]}


def test_bare_machine_lacks_what_the_launch_needs(
    bare_machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "cluster=bcm"]) == 1
    lines = capsys.readouterr().out.splitlines()
    statuses = {line.split("  ")[0]: line.split()[1:] for line in lines if not line.startswith(" ")}
    assert statuses["slurm"][0] == "missing!"
    for name in ("enroot", "images.build", "images.copy", "images.unpack", "squashfs.make"):
        assert statuses[name][0] == "missing"
    assert lines[-1].startswith("missing for this launch: slurm")
    assert sum(line.strip().startswith("-> ") for line in lines) >= 6  # each has its fix


def test_local_launch_needs_python_alone(bare_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "cluster=local", "--json"])
    out = capsys.readouterr().out
    lines = by_name(out)
    assert "slurm" not in lines
    assert lines["trainer"]["status"] in ("ok", "missing")
    assert code == (0 if lines["trainer"]["status"] == "ok" else 1)
    assert json.loads(out)["ok"] is (code == 0)


def test_interpreter_without_libraries_is_missing(
    bare_machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "cluster=local", "cluster.python=/nowhere/python3", "--json"]) in (0, 1)
    assert by_name(capsys.readouterr().out)["trainer"]["status"] == "warning"  # nodes may have it
    fake = bare_machine / "python3"
    fake.write_text("#!/bin/sh\necho missing: torch\n")
    fake.chmod(0o755)
    assert main(["doctor", "cluster=local", f"cluster.python={fake}", "--json"]) == 1
    line = by_name(capsys.readouterr().out)["trainer"]
    assert "cannot import torch" in line["found"]
    assert "-m pip install" in line["fix"]


def test_secrets_are_never_shown(
    bare_machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = bare_machine / "home"
    files = {
        ".config/enroot/.credentials": "machine nvcr.io login $oauthtoken password SESAME\n",
        ".docker/config.json": json.dumps(
            {"auths": {"ghcr.io": {"auth": "SESAME"}}, "credHelpers": {"x.io": "SESAME"}}
        ),
        ".config/containers/auth.json": '{"auths": {"quay.io": {"auth": "SESAME"}}}',
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
        (home / name).chmod(0o600)
    (home / ".docker/config.json").chmod(0o644)
    monkeypatch.setenv("ENROOT_TOKEN", "SESAME")
    main(["doctor", "cluster=bcm", "--json"])
    out = capsys.readouterr().out
    assert "SESAME" not in out
    line = by_name(out)["credentials"]
    for registry in ("nvcr.io", "ghcr.io", "x.io", "quay.io"):
        assert registry in line["found"]
    assert (line["status"], line["fix"].startswith("chmod 600 ")) == ("warning", True)
    assert "config.json" in line["fix"]
    assert ".credentials" not in line["fix"]


def test_files_without_registries_are_no_credentials(bare_machine: Path) -> None:
    for name, text in ((".docker/config.json", "not json"), (".config/containers/auth.json", "[1]")):
        path = bare_machine / "home" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert credentials() == []
    path.write_text('{"auths": {"a.io\\u001b[31m": {}}}')
    assert credentials() == [Credentials(str(path), ("a.io\\x1b[31m",), is_private=False)]


def test_registries_are_named_as_in_images(bare_machine: Path) -> None:
    """Other programs write other names; a login that is a part of the name is not printed."""
    enroot, docker = (
        bare_machine / "home/.config/enroot/.credentials",
        bare_machine / "home/.docker/config.json",
    )
    for path in (enroot, docker):
        path.parent.mkdir(parents=True)
    enroot.write_text("machine auth.docker.io login me password SESAME\n")
    keys = (
        "https://index.docker.io/v1/",
        "https://me:SESAME@a.io:5000/v2/",
        "quay.io/team",
        "me:SESAME@b.io",
    )
    docker.write_text(json.dumps({"auths": {key: {} for key in keys}}))
    assert [entry.registries for entry in credentials()] == [
        ("docker.io",),
        ("docker.io", "a.io:5000", "quay.io/team", "b.io"),
    ]


def test_image_is_started_by_its_name_for_pyxis(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes have another working directory, and `docker://` would send Enroot to Docker Hub."""
    monkeypatch.chdir(bare_machine)
    assert resolve_image("./torn.sqsh", "--image").for_pyxis == str(bare_machine / "torn.sqsh")
    assert (
        resolve_image("docker://nvcr.io/nvidia/nemo:24.07", "--image").for_pyxis
        == "nvcr.io#nvidia/nemo:24.07"
    )


def test_cuda_of_an_image_comes_from_its_registry(bare_machine: Path) -> None:
    """An image without an answer of skopeo has the reason instead."""
    skopeo = bare_machine / "bin/skopeo"

    def write_skopeo(text: str) -> None:
        skopeo.write_text(f"#!/bin/sh\n{text}\n")
        skopeo.chmod(0o755)

    name = "nvcr.io#nvidia/nemo:24.07"
    assert resolve_image(name, "container").why == "no skopeo on this machine to ask the registry"
    write_skopeo("""[ "$*" = "inspect --config docker://nvcr.io/nvidia/nemo:24.07" ] || exit 1
echo '{"config": {"Env": ["PATH=/bin", "CUDA_VERSION=12.5.0.23", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"]}}'""")
    image = resolve_image(name, "container")
    assert (image.cuda, image.requires, image.registry, image.why) == (
        "12.5.0.23",
        "cuda>=9.0",
        "nvcr.io",
        None,
    )
    cause = r"requested access to: the \"resource\": permission denied\n\n"
    reference = r"\"docker://nvcr.io/nvidia/nemo:24.07\""
    write_skopeo(f"""printf '%s\\n' '
time="x" level=warning msg="mind: this"
time="x" level=fatal msg="Error parsing image name {reference}: reading: {cause}"' >&2
exit 1""")
    cause = r'reading: requested access to: the "resource": permission denied'
    assert resolve_image(name, "container").why == f"the registry's error: {cause}"
    write_skopeo("echo '[]'")
    assert resolve_image(name, "container").why == "the registry's answer cannot be read"


def test_cuda_of_an_image_comes_from_its_file(bare_machine: Path) -> None:
    assert resolve_image("/nowhere/x.sqsh", "container").why == "no such file or directory"
    torn = bare_machine / "torn.sqsh"
    torn.write_bytes(b"x" * 200)
    image = resolve_image(str(torn), "container")
    assert image.is_broken
    assert str(torn) not in (image.why or "")


def test_unreadable_image_has_an_unknown_cuda(bare_machine: Path) -> None:
    """A missing unsquashfs is not the image's fault, and says nothing about its environment."""
    path = bare_machine / "whole.sqsh"
    # A superblock: inodes, time, block size, fragments, gzip, ..., 4.0, root, bytes used.
    numbers = struct.pack("<IIIIHHHHHHQQ", 1, 0, 131072, 0, 1, 17, 0, 1, 4, 0, 0, 96)
    path.write_bytes((b"hsqs" + numbers).ljust(96, b"\0"))
    image = resolve_image(str(path), "container")
    assert not image.is_broken
    assert "unsquashfs is missing" in (image.why or "")
    assert image_line(image).severity == "unknown"
    assert image_line(image).fix is None  # this machine has it: no node need be asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "-1"], "--nodes -1"),
        (["--patience", "0"], "--patience 0"),
        (["--patience", "inf"], "--patience inf"),
        (["--patience", "nan"], "--patience nan"),
        (["cluster=bcm", "container=null", "--nodes", "1", "--start"], "no image for Pyxis to start"),
        (["cluster=bcm", "--nodes", "1", "--start", "--image", "dockerd://x:1"], "nodes cannot fetch it"),
        (["--start"], "on which nodes?"),
        (["cluster=local", "--nodes", "2"], "has no other machines"),
        (["--image", "not an image"], "--image='not an image'"),
        (["cluster=nowhere"], "nowhere"),
    ],
)
def test_wrong_options_are_refused(
    bare_machine: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["doctor", "--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n" in text
    assert "exit code:\n" in text


@pytest.mark.slurm
def test_nodes_of_a_real_slurm_are_examined(
    no_accounting_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in no_accounting_sandbox.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SBATCH_PARTITION", "nope")  # of no consequence
    monkeypatch.setenv("SLURM_NNODES", "17")
    main(["doctor", "cluster=sandbox", "--nodes", "2", "--json"])
    lines = json.loads(capsys.readouterr().out)["lines"]
    statuses = {line["what"]: line["status"] for line in lines if line["what"].startswith("slurm")}
    assert statuses == {
        "slurm": "ok",
        "slurm.accounting": "warning",
        "slurm.select": "ok",
        "slurm.cgroups": "warning",
        "slurm.nodes": "ok",
    }
    (python,) = [line for line in lines if line["what"] == "python" and "here" not in line["where"]]
    assert len(python["where"]) == 2
    assert set(python["where"]) <= {"n1", "n2", "n3", "n4"}
    assert "nodes" not in [line["what"] for line in lines]  # all of them answered
    assert main(["doctor", "cluster=sandbox", "--nodes", "99"]) == 2
    assert "--nodes 99: 4 take jobs in partition gpu" in capsys.readouterr().err


@pytest.mark.slurm
def test_pending_job_is_cancelled_when_patience_ends(
    plain_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = plain_sandbox.environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nodes, "CHOOSING_NODES", (*nodes.CHOOSING_NODES, "begin"))
    late = ["cluster=sandbox", "cluster.begin=now+1hour", "--nodes", "1"]
    assert main(["doctor", *late, "--patience", "1"]) == 3
    out = capsys.readouterr().out
    assert "1 of 1 did not answer: no answer within 1 s" in out
    assert "unknown, and needed for this launch: nodes" in out
    assert doctor_jobs(environment) == []


_WAITING_DOCTOR = """\
import sys
from launcher.cli.app import main
from launcher.doctor import nodes
nodes.CHOOSING_NODES += ("begin",)
sys.exit(main(["doctor", "cluster=sandbox", "cluster.begin=now+1hour", "--nodes", "1"]))
"""


@pytest.mark.slurm
def test_job_is_cancelled_when_the_doctor_is_terminated(plain_sandbox: Sandbox) -> None:
    """A closed terminal sends SIGHUP: nobody would see the job wait, or know what it is for."""
    environment = plain_sandbox.environment()
    devnull = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-c", _WAITING_DOCTOR],
        env=environment,
        stdin=devnull,
        stdout=devnull,
        stderr=devnull,
    ) as doctor:
        while doctor.poll() is None and not doctor_jobs(environment):
            time.sleep(0.1)
        doctor.send_signal(signal.SIGHUP)
    assert doctor.returncode == 128 + signal.SIGHUP
    assert doctor_jobs(environment) == []


def doctor_jobs(environment: dict[str, str]) -> list[str]:
    """Return the names of the doctor's jobs that wait or run."""
    command = ["squeue", "--noheader", "--format=%j", "--states=PENDING,RUNNING"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if name.startswith("slipway-doctor")]
