"""The report's lines: each known problem has a line and a fix."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.findings import Severity, error
from launcher.doctor.container_rules import (
    enroot_lines,
    pyxis_line,
    pyxis_node_lines,
    slurm_lines,
    stage_lines,
)
from launcher.doctor.facts import Credentials, Enroot, Gpus, Image, Requirements
from launcher.doctor.report import PYTHON, SLURM
from launcher.doctor.tool_rules import (
    apptainer_line,
    credential_line,
    engine_line,
    file_lines,
    gpu_lines,
    image_line,
    mount_line,
    python_lines,
    tool_lines,
)
from launcher.releases import contents_of
from launcher.slurm.cluster import ClusterFacts
from slipway.common.extras import install_command
from tests.doctor.machines import (
    BARE,
    DOWN,
    FILE,
    GIB,
    NEMO,
    ON_PYXIS,
    gpus,
    line_about,
    machine,
    place,
    plugstack,
    slurm,
    statuses_of,
)


def test_complete_slurm_is_ok() -> None:
    lines = list(slurm_lines(slurm(), ON_PYXIS))
    assert statuses_of(lines) == {
        "slurm": "ok!",
        "slurm.accounting": "ok",
        "slurm.select": "ok",
        "slurm.cgroups": "ok",
        "slurm.nodes": "ok!",
    }
    assert line_about(lines, "slurm").message == "24.11.5, cluster big: the controller answers"
    assert line_about(lines, "slurm.nodes").message == "nodes that take jobs: gpu: 3 of 4; GPUs: a100"
    assert all(line.fix is None for line in lines)


def test_missing_slurm_is_reported_with_its_reason() -> None:
    lines = list(slurm_lines(ClusterFacts(missing={"settings": "no Slurm found on this machine"}), ON_PYXIS))
    assert statuses_of(lines) == {"slurm": "missing!"}
    assert "slipway sandbox up" in (lines[0].fix or "")
    assert statuses_of(
        slurm_lines(ClusterFacts(missing={"settings": "none"}), Requirements(scheduler="local"))
    ) == {"slurm": "missing"}


@pytest.mark.parametrize(
    ("what", "settings", "message"),
    [
        ("slurm.accounting", {"AccountingStorageType": "accounting_storage/none"}, "sacct has no records"),
        ("slurm.accounting", {"AccountingStorageType": "(null)"}, "none: sacct"),
        ("slurm.select", {"SelectType": "select/linear"}, "whole nodes"),
        ("slurm.select", {"SelectType": "select/cons_res"}, "--gpus-per-node"),
        ("slurm.cgroups", {"ProctrackType": "proctrack/pgid"}, "outlives its job"),
        ("slurm.cgroups", {"TaskPlugin": "task/affinity"}, "cores and GPUs of others"),
    ],
)
def test_missing_plugins_of_slurm_are_warnings(what: str, settings: dict[str, str], message: str) -> None:
    lines = list(slurm_lines(slurm(**settings), ON_PYXIS))
    line = line_about(lines, what)
    assert line.severity is Severity.WARNING
    assert message in line.message
    assert line.fix
    assert [other.severity for other in lines if other.id != what] == [Severity.OK] * 4


def test_partition_without_usable_nodes_is_missing() -> None:
    down = replace(slurm(), nodes={"gpu": (DOWN,) * 4})
    assert statuses_of(slurm_lines(down, ON_PYXIS))["slurm.nodes"] == "missing!"
    assert statuses_of(slurm_lines(replace(slurm(), nodes={}), ON_PYXIS))["slurm.nodes"] == "warning"


def test_pyxis_of_srun_is_reported() -> None:
    configured = machine(plugstack=plugstack(runtime_path="/run/pyxis"))
    line = pyxis_line(slurm(), ON_PYXIS, configured)
    assert (line.severity, line.needed) == (Severity.OK, True)
    assert line.message.endswith("plugstack.conf:3: /usr/lib/slurm/spank_pyxis.so runtime_path=/run/pyxis")
    line = pyxis_line(replace(slurm(), pyxis=False), ON_PYXIS, machine())
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "container_options.runtime=apptainer" in (line.fix or "")
    line = pyxis_line(replace(slurm(), pyxis=False), BARE, machine())
    assert (line.severity, line.needed) == (Severity.MISSING, False)
    line = pyxis_line(replace(slurm(), pyxis=None), ON_PYXIS, machine())
    assert (line.severity, line.needed) == (Severity.UNKNOWN, True)


def test_pyxis_that_is_configured_and_not_loaded_is_missing() -> None:
    line = pyxis_line(replace(slurm(), pyxis=False), ON_PYXIS, machine(plugstack=plugstack()))
    assert line.severity is Severity.MISSING
    assert "although plugstack.conf has Pyxis" in line.message
    absent = replace(plugstack(), there=False)
    line = pyxis_line(replace(slurm(), pyxis=False), ON_PYXIS, machine(plugstack=absent))
    assert "spank_pyxis.so is missing" in (line.fix or "")


def test_plugin_of_pyxis_is_reported_for_each_node() -> None:
    assert statuses_of(pyxis_node_lines(machine(plugstack=plugstack()), ON_PYXIS, FILE)) == {
        "pyxis.plugin": "ok!"
    }
    absent = machine(plugstack=replace(plugstack(), there=False))
    assert statuses_of(pyxis_node_lines(absent, ON_PYXIS, FILE)) == {"pyxis.plugin": "missing!"}
    assert statuses_of(pyxis_node_lines(absent, BARE, None)) == {}


def test_image_of_a_registry_in_memory_is_a_warning() -> None:
    run = place("/run/pyxis", kind="tmpfs", point="/run", free=3 * GIB)
    node = machine(places={"pyxis runtime": run})
    (line,) = pyxis_node_lines(node, ON_PYXIS, NEMO)
    assert (line.id, line.severity, line.free) == ("pyxis.runtime", Severity.WARNING, 3 * GIB)
    assert line.fix == "once for all: slipway image import 'nvcr.io#nvidia/nemo:24.07'"
    assert not list(pyxis_node_lines(node, ON_PYXIS, FILE))  # a file is started from where it lies


def test_complete_enroot_is_ok() -> None:
    lines = list(enroot_lines(machine(), ON_PYXIS, FILE, is_node=True))
    assert {line.severity for line in lines} == {Severity.OK}
    assert line_about(lines, "enroot.data").free == 500 * GIB
    assert "no 50-slurm-pytorch.sh" in line_about(lines, "enroot.hooks").message


def test_only_nodes_need_enroot() -> None:
    bare = machine(enroot=None)
    assert statuses_of(enroot_lines(bare, ON_PYXIS, FILE, is_node=True)) == {"enroot": "missing!"}
    assert statuses_of(enroot_lines(bare, ON_PYXIS, FILE, is_node=False)) == {"enroot": "missing"}
    assert statuses_of(
        enroot_lines(bare, Requirements(image=True, runtime="apptainer"), FILE, is_node=True)
    ) == {"enroot": "missing"}


def test_missing_programs_of_enroot_are_reported() -> None:
    incomplete = machine(without=("jq", "parallel"))
    line = line_about(enroot_lines(incomplete, ON_PYXIS, FILE, is_node=False), "enroot")
    assert line.severity is Severity.WARNING
    assert "jq and parallel missing: images cannot be imported" in line.message
    assert (
        line_about(enroot_lines(incomplete, ON_PYXIS, FILE, is_node=True), "enroot").severity is Severity.OK
    )
    line = line_about(enroot_lines(machine(without=["unsquashfs"]), ON_PYXIS, FILE, is_node=True), "enroot")
    assert (line.severity, line.needed) == (Severity.MISSING, True)


@pytest.mark.parametrize(
    ("name", "changes", "status", "message"),
    [
        ("runtime", {"writable": False, "there": "/run"}, "missing", "you may not write to /run"),
        ("runtime", {"free": 0, "kind": "tmpfs"}, "missing", "full"),
        ("runtime", {"kind": "nfs4"}, "warning", "shared"),
        ("runtime", {"kind": "tmpfs", "free": 2 * GIB}, "ok", ""),
        ("data", {"writable": False}, "missing", "no image can be unpacked"),
        ("data", {"kind": "lustre"}, "warning", "every node unpacks"),
        ("data", {"free": 20 * GIB}, "warning", "the image takes about 25.0 GiB"),
        ("data", {"kind": "tmpfs"}, "warning", "memory"),
        ("cache", {"free": 5 * GIB}, "warning", "layers"),
        ("cache", {"writable": False}, "warning", "may not write"),
        ("temp", {"kind": "tmpfs"}, "warning", "memory"),
        ("temp", {"free": 5 * GIB}, "warning", "60.0 GiB"),
        ("temp", {"kind": "nfs"}, "warning", "shared"),
        ("temp", {"writable": False}, "warning", "may not write"),
    ],
)
def test_directories_of_enroot_are_reported(
    name: str, changes: dict[str, object], status: str, message: str
) -> None:
    node = machine(places={f"enroot {name}": place("/there/enroot", **changes)})
    imports = name in ("cache", "temp")
    image = replace(FILE, path=None) if imports else FILE
    lines = list(enroot_lines(node, ON_PYXIS, image, is_node=True))
    line = line_about(lines, f"enroot.{name}")
    if imports:
        lines_of_file = enroot_lines(node, ON_PYXIS, FILE, is_node=True)
        assert not any(item.id == line.id for item in lines_of_file), "nothing is imported there"
    assert line.severity == status
    assert message in line.message
    assert "/there/enroot" in line.message
    assert (line.fix is None) == (status == "ok")
    assert all(other.severity is Severity.OK for other in lines if other is not line)


def test_image_with_gpus_needs_nvidia_container_cli() -> None:
    image = replace(FILE, devices="all")
    enroot = Enroot(hooks=("10-home.sh", "98-nvidia.sh"))
    node = machine(enroot=enroot, without=("nvidia-container-cli",), gpus=None)
    line = line_about(enroot_lines(node, ON_PYXIS, image, is_node=True), "enroot.hooks")
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "NVIDIA_VISIBLE_DEVICES=all" in line.message and "98-nvidia.sh" in line.message
    assert "env_vars.NVIDIA_VISIBLE_DEVICES=void" in (line.fix or "")
    for devices in ("void", None):
        harmless = replace(FILE, devices=devices)
        assert (
            line_about(enroot_lines(node, ON_PYXIS, harmless, is_node=True), "enroot.hooks").severity
            is Severity.OK
        )
    assert (
        line_about(enroot_lines(node, ON_PYXIS, image, is_node=False), "enroot.hooks").severity is Severity.OK
    )


def test_mqueue_matters_only_where_enroot_binds_it() -> None:
    lines = list(enroot_lines(machine(mqueue=False), ON_PYXIS, FILE, is_node=True))
    assert line_about(lines, "enroot.mqueue").severity is Severity.OK
    for enroot in (Enroot(binds_mqueue=True), Enroot(settings={"ENROOT_RESTRICT_DEV": "y"})):
        lines = list(enroot_lines(machine(mqueue=False, enroot=enroot), ON_PYXIS, FILE, is_node=True))
        line = line_about(lines, "enroot.mqueue")
        assert (line.severity, line.needed) == (Severity.MISSING, True)
        assert "mount -t mqueue" in (line.fix or "")


def test_gpus_need_the_hook_of_nvidia() -> None:
    with_gpus = machine(gpus=gpus())
    line = line_about(enroot_lines(with_gpus, ON_PYXIS, FILE, is_node=True), "enroot.hooks")
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "nvidia-container-cli, which is missing" in line.message
    line = line_about(
        enroot_lines(replace(with_gpus, enroot=Enroot()), ON_PYXIS, FILE, is_node=True), "enroot.hooks"
    )
    assert "do not see the GPUs" in line.message


@pytest.mark.parametrize(
    ("sysctls", "status", "fix"),
    [
        ({"unprivileged_userns_clone": 0}, "missing", "kernel.unprivileged_userns_clone=1"),
        ({"max_user_namespaces": 0}, "missing", "user.max_user_namespaces=65536"),
        ({"apparmor_restrict_unprivileged_userns": 1}, "warning", "AppArmor profile"),
    ],
)
def test_sysctls_that_forbid_namespaces_are_reported(sysctls: dict[str, int], status: str, fix: str) -> None:
    node = machine(sysctls=sysctls)
    line = line_about(enroot_lines(node, ON_PYXIS, FILE, is_node=True), "user namespaces")
    assert line.severity == status
    assert fix in (line.fix or "")
    as_root = line_about(enroot_lines(replace(node, uid=0), ON_PYXIS, FILE, is_node=True), "user namespaces")
    assert as_root.severity is Severity.OK
    assert "others may not" in as_root.message


def test_refused_namespaces_are_reported_with_the_error() -> None:
    node = machine(no_namespaces="unshare failed: Operation not permitted")
    line = line_about(enroot_lines(node, ON_PYXIS, FILE, is_node=True), "user namespaces")
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "Operation not permitted" in line.message


def test_programs_that_build_images_are_reported() -> None:
    assert set(statuses_of(tool_lines(machine())).values()) == {"ok"}
    lines = list(tool_lines(replace(machine(), tools={}, file_systems=())))
    assert statuses_of(lines) == {
        "images.build": "missing",
        "images.copy": "missing",
        "images.unpack": "missing",
        "squashfs.make": "missing",
        "squashfs.mount": "warning",
    }
    assert "apt-get install buildah" in (line_about(lines, "images.build").fix or "")
    old = line_about(tool_lines(machine(compressors=("gzip", "xz"))), "squashfs.make")
    assert "without lz4 and zstd" in old.message


def test_docker_without_a_daemon_is_a_warning() -> None:
    tools = {"docker": machine().tools["buildah"]}
    docker_only = replace(machine(), tools=tools, docker_daemon="!cannot connect")
    line = line_about(tool_lines(docker_only), "images.build")
    assert (line.severity, line.message) == (Severity.WARNING, "docker 1.2 without a daemon that answers")
    answering = replace(docker_only, docker_daemon="28.2.2")
    assert line_about(tool_lines(answering), "images.build").severity is Severity.OK
    line = line_about(tool_lines(machine(subordinate_ids=False)), "images.build")
    assert line.severity is Severity.WARNING
    assert "/etc/subuid" in line.message


def test_squashfs_without_a_way_to_mount_it_is_reported() -> None:
    node = machine(file_systems=("ext4",), fuse=False)
    assert mount_line(node, is_node=True).severity is Severity.WARNING
    fuse_node = replace(node, plugstack=plugstack(use_squashfuse="1"))
    line = mount_line(fuse_node, is_node=True)
    assert (line.severity, line.needed) == (Severity.MISSING, True)


def test_both_ways_to_mount_a_squashfs_are_named() -> None:
    assert mount_line(machine()).message == "mounted by the kernel or squashfuse 1.2"


def test_apptainer_is_needed_where_it_starts_the_tasks() -> None:
    requirements = Requirements(image=True, runtime="apptainer")
    missing = apptainer_line(machine(), requirements, is_node=True)
    assert missing is not None
    assert (missing.severity, missing.needed) == (Severity.MISSING, True)
    assert apptainer_line(machine(), ON_PYXIS, is_node=True) is None
    tools = {"apptainer": machine().tools["buildah"]}
    present = apptainer_line(replace(machine(), tools=tools), requirements, is_node=True)
    assert present is not None
    assert present.severity is Severity.OK
    other = replace(requirements, runtime="singularity")
    absent = apptainer_line(replace(machine(), tools=tools), other, is_node=True)
    assert absent is not None
    assert (absent.severity, absent.fix) == (Severity.MISSING, "container_options.runtime=apptainer")


def test_credentials_are_reported_by_registry() -> None:
    login = Credentials("/home/me/.docker/config.json", ("ghcr.io", "nvcr.io/nvidia"))
    assert credential_line([login], NEMO).severity is Severity.OK
    line = credential_line([], NEMO)
    assert line.severity is Severity.WARNING
    assert "none for nvcr.io" in line.message
    assert "$oauthtoken" in (line.fix or "")
    line = credential_line([replace(login, registries=("nvcr.io",))], replace(NEMO, registry="nvcr.io:443"))
    assert line.severity is Severity.OK
    line = credential_line([], None)
    assert line.severity is Severity.OK
    line = credential_line([replace(login, is_private=False)], NEMO)
    assert (line.severity, line.fix and line.fix[:30]) == (Severity.WARNING, "chmod 600 /home/me/.docker/con")


def test_driver_that_runs_the_cuda_of_the_image_is_ok() -> None:
    node = machine(gpus=gpus("560.35.03", "12.6"))
    lines = list(gpu_lines(node, NEMO, is_node=True))
    assert statuses_of(lines) == {"gpu": "ok", "gpu.image": "ok"}
    assert line_about(lines, "gpu").message == "driver 560.35.03, CUDA 12.6: 8 × NVIDIA A100-SXM4-80GB"
    older = line_about(gpu_lines(machine(gpus=gpus("535.104.05", "12.2")), NEMO, is_node=True), "gpu.image")
    assert older.severity is Severity.OK
    assert "minor version compatibility" in older.message


def test_driver_that_is_too_old_for_the_image_is_missing() -> None:
    node = machine(gpus=gpus("470.82.01", "11.4"))
    line_with_compat = line_about(gpu_lines(node, NEMO, is_node=True), "gpu.image")
    assert (line_with_compat.severity, line_with_compat.needed) == (Severity.WARNING, False)
    assert "needs driver 525.60.13 or newer; here is 470.82.01" in line_with_compat.message
    assert "libraries of 555.42.02" in (line_with_compat.fix or "")
    line = line_about(gpu_lines(node, replace(NEMO, compat_driver=None), is_node=True), "gpu.image")
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "cuda-compat" in (line.fix or "")
    strict_image = replace(NEMO, requires="cuda>=12.5 brand=tesla,driver>=535,driver<536")
    line = line_about(gpu_lines(node, strict_image, is_node=True), "gpu.image")
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "NVIDIA_DISABLE_REQUIRE" in (line.fix or "")


def test_unknown_cuda_is_unknown() -> None:
    node = machine(gpus=gpus())
    unanswered = line_about(
        gpu_lines(node, Image("x", why="the registry did not answer"), is_node=True), "gpu.image"
    )
    assert (unanswered.severity, unanswered.needed) == (Severity.UNKNOWN, False)
    assert "the registry did not answer" in unanswered.message
    ancient = line_about(gpu_lines(node, replace(NEMO, cuda="9.2"), is_node=True), "gpu.image")
    assert ancient.severity is Severity.UNKNOWN


def test_node_without_gpus_is_a_warning() -> None:
    assert statuses_of(gpu_lines(machine(), NEMO, is_node=True)) == {"gpu": "warning"}
    assert statuses_of(gpu_lines(machine(), NEMO, is_node=False)) == {}  # a login node has none, as a rule
    broken = machine(gpus=Gpus(trouble="Driver/library version mismatch"))
    line = line_about(gpu_lines(broken, NEMO, is_node=True), "gpu")
    assert (line.severity, "version mismatch" in line.message) == (Severity.WARNING, True)


def test_missing_files_on_a_node_are_reported() -> None:
    node = machine(files={"/images/nemo.sqsh": 10 * GIB, "/venv/bin/python": None})
    assert statuses_of(file_lines(node, FILE, "/venv/bin/python")) == {"image": "ok!", "trainer": "missing!"}
    assert statuses_of(file_lines(machine(), FILE, None)) == {"image": "missing!"}
    shorter = machine(files={"/images/nemo.sqsh": 3})
    assert statuses_of(file_lines(shorter, FILE, None)) == {"image": "warning!"}


def test_image_is_reported_as_this_machine_sees_it() -> None:
    assert image_line(FILE).message == "/images/nemo.sqsh: 10.0 GiB, no CUDA_VERSION in its environment"
    assert image_line(NEMO).message == "nvcr.io#nvidia/nemo:24.07: CUDA 12.5.0.023"
    elsewhere = image_line(replace(FILE, why="no such file or directory"))
    assert (elsewhere.severity, elsewhere.needed) == (Severity.UNKNOWN, False)
    torn = image_line(replace(FILE, why="not a squashfs image", is_broken=True))
    assert (torn.severity, torn.needed) == (Severity.MISSING, True)
    assert "slipway image verify /images/nemo.sqsh" in (torn.fix or "")


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({}, "ok", "/local/images (xfs, mounted at /scratch)"),
        ({"writable": False}, "warning", "may not write to /scratch"),
        ({"kind": "lustre"}, "warning", "shared"),
        ({"free": 5 * GIB}, "warning", "no room for the image's 10.0 GiB"),
        ({"free": None}, "ok", ""),
    ],
)
def test_directory_of_the_copied_image_is_reported(
    changes: dict[str, object], status: str, message: str
) -> None:
    node = machine(places={"stage": place("/local/images", **changes)})
    (line,) = stage_lines(node, FILE)
    assert (line.severity, message in line.message) == (status, True)
    assert not list(stage_lines(node, NEMO))  # an image of a registry is not copied
    assert not list(stage_lines(machine(), FILE))


@pytest.mark.parametrize(
    ("version", "status", "is_noted"),
    [
        ("22.05.8", "ok!", False),
        ("24.11.5", "ok!", False),
        ("26.05.5", "ok!", False),
        ("23.11.10", "ok!", True),
        ("21.08.8-2", "warning!", True),
        ("26.11.0rc1", "warning!", True),
        ("of unknown version", "warning!", True),
    ],
)
def test_untested_slurm_is_noted(version: str, status: str, is_noted: bool) -> None:
    line = line_about(list(slurm_lines(slurm(SLURM_VERSION=version), ON_PYXIS)), "slurm")
    assert statuses_of([line]) == {"slurm": status}
    assert ("; the tests were run on 22.05, 24.11, 26.05" in line.message) == is_noted


def test_untested_python_is_a_warning() -> None:
    (line, *_) = python_lines("3.19.0, /bin/python", {}, None)
    assert line.severity is Severity.WARNING
    assert "the tests were run on 3.11, 3.12, 3.13, 3.14" in line.message


def test_page_of_versions_names_each_tested_release(repository: Path) -> None:
    page = (repository / "docs" / "versions.md").read_text()
    for release in (*SLURM, *PYTHON):
        assert f"| {release}" in page


def test_python_and_extras_are_reported() -> None:
    versions = {"enroot-py": None, "matplotlib": "3.9", "plotext": "6.0"}
    fault = error("cluster.python", None, "cannot import torch", "install it\nor an image")
    lines = list(python_lines("3.11.7, /bin/python", versions, [fault]))
    assert statuses_of(lines) == {
        "python": "ok!",
        "trainer": "missing!",
        "extra containers": "missing",
        "extra plot": "ok",
    }
    assert line_about(lines, "trainer").fix == "install it; or an image"
    assert statuses_of(python_lines("3.11.7", versions, []))["trainer"] == "ok!"
    assert (
        statuses_of(python_lines("3.11.7", versions, [replace(fault, severity=Severity.WARNING, fix=None)]))[
            "trainer"
        ]
        == "warning!"
    )
    assert "trainer" not in statuses_of(python_lines("3.11.7", versions, None))


def test_extras_of_an_environment_of_others_are_theirs_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writable(path: str, mode: int) -> bool:
        return mode == os.W_OK and path == str(tmp_path)

    monkeypatch.setattr("slipway.common.extras.os.access", writable)
    assert install_command("train").startswith(f"ask whoever installed it: {sys.executable} -m pip install ")
    python = f"{tmp_path}/bin/python"
    assert install_command("train", python).startswith(f"{python} -m pip install ")
    line = line_about(list(python_lines("3.11.7", {}, None)), "extra plot")
    assert (line.fix or "").startswith("ask whoever installed it: ")


@pytest.mark.parametrize(
    ("tag", "engine", "status"),
    [
        ("25.07", "nemo", Severity.OK),
        ("26.04", "nemo", Severity.MISSING),
        ("27.01", "nemo", Severity.WARNING),
        ("26.02", "megatron", Severity.OK),
        ("25.07", "megatron", Severity.MISSING),
    ],
)
def test_engine_of_an_image_is_reported(tag: str, engine: str, status: Severity) -> None:
    contents = contents_of("nvcr.io", "nvidia/nemo", tag)
    assert contents is not None
    line = engine_line(contents, engine)
    assert (line.id, line.severity) == ("image.engine", status)
    assert (line.fix is None) is (status is Severity.OK)
    assert engine_line(contents._replace(is_certain=False), engine).severity in (
        Severity.OK,
        Severity.WARNING,
    )


def test_a_driver_is_compared_with_the_cuda_of_the_table() -> None:
    image = Image("x", why="skopeo is not here", contents=contents_of("nvcr.io", "nvidia/nemo", "26.04"))
    old, new = (machine(gpus=gpus(driver=driver)) for driver in ("550.54.15", "580.65.06"))
    line = line_about(gpu_lines(old, image, is_node=True), "gpu.image")
    assert (line.severity, line.needed) == (Severity.MISSING, True)
    assert "CUDA 13.1.1, as nvcr.io/nvidia/nemo:26.04 has it needs driver 580 or newer" in line.message
    assert line_about(gpu_lines(new, image, is_node=True), "gpu.image").severity is Severity.OK
    # The image's own version takes precedence over the table's.
    assert (
        line_about(gpu_lines(old, replace(image, cuda="12.4.1"), is_node=True), "gpu.image").severity
        is Severity.OK
    )
