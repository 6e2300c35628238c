"""Parts of an import: its scratch directory, its files in a root file system, and its messages."""

from __future__ import annotations

import fcntl
import io
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from launcher.errors import UserError
from launcher.images import backends, scratch, tools
from launcher.images.importing import import_image
from launcher.images.progress import LineProgress, show_bars
from launcher.images.references import Reference
from launcher.images.registry import RemoteImage
from launcher.images.rootfs import configure, make_readable, resolve_inside
from launcher.images.scratch import (
    SCRATCH_PREFIX,
    ScratchPlace,
    SpaceNeeds,
    choose_scratch,
    scratch_directory,
)
from launcher.images.squashfs import default_compression
from launcher.images.store import ImageConfig
from launcher.images.tools import explain_failure

GB = 10**9


def places(**free: tuple[int, str]) -> dict[Path, ScratchPlace]:
    """Return directories with their free gigabytes and kinds, each on a file system of its own."""
    by_path = {}
    for device, (name, (size, kind)) in enumerate(free.items()):
        path = Path("/", *name.split("_"))
        by_path[path] = ScratchPlace(path, size * GB, kind == "memory", kind == "shared", device)
    return by_path


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ({"tmp": (50, "disk"), "var_tmp": (90, "disk")}, "/var/tmp"),
        # A disk of this machine is quicker than the network's, and memory is for programs.
        ({"tmp": (900, "memory"), "var_tmp": (60, "disk")}, "/var/tmp"),
        ({"tmp": (50, "disk"), "images": (900, "shared")}, "/tmp"),
        ({"tmp": (10, "disk"), "images": (900, "shared")}, "/images"),
        ({"tmp": (90, "memory"), "var_tmp": (10, "disk")}, "/tmp"),
        ({"tmp": (10, "disk"), "scratch": (50, "disk")}, "/scratch"),
        # The image needs room beside the unpacked files.
        ({"tmp": (40, "disk"), "images": (45, "disk")}, "/tmp"),
    ],
)
def test_scratch_goes_where_there_is_room(free: dict[str, tuple[int, str]], expected: str) -> None:
    candidates = places(**{"images": (20, "disk"), **free})
    directory = choose_scratch(
        SpaceNeeds(40 * GB, 10 * GB),
        Path("/images/x.sqsh"),
        None,
        {"ENROOT_TEMP_PATH": "/scratch"},
        candidates.get,
    )
    assert directory == Path(expected)


def test_too_little_room_is_refused_with_numbers() -> None:
    candidates = places(tmp=(30, "disk"), images=(20, "disk"))
    with pytest.raises(UserError) as raised:
        choose_scratch(SpaceNeeds(40 * GB, 10 * GB), Path("/images/x.sqsh"), None, {}, candidates.get)
    assert "needs about 40.0 GB, and there are 30.0 GB in /tmp, 20.0 GB in /images" in raised.value.message
    assert "--temp-dir DIR" in str(raised.value)
    with pytest.raises(
        UserError, match=r"/images: the image needs about 30\.0 GB there, and 20\.0 GB are free"
    ):
        choose_scratch(SpaceNeeds(1 * GB, 30 * GB), Path("/images/x.sqsh"), None, {}, candidates.get)


def test_temp_dir_is_the_only_candidate(tmp_path: Path) -> None:
    candidates = places(tmp=(900, "disk"), mine=(30, "disk"), images=(900, "disk"))
    directory = choose_scratch(
        SpaceNeeds(20 * GB, GB), Path("/images/x.sqsh"), Path("/mine"), {}, candidates.get
    )
    assert directory == Path("/mine")
    with pytest.raises(UserError, match=r"needs about 40\.0 GB, and there are 30\.0 GB in /mine"):
        choose_scratch(SpaceNeeds(40 * GB, GB), Path("/images/x.sqsh"), Path("/mine"), {}, candidates.get)
    with pytest.raises(UserError, match="not a writable directory"):
        choose_scratch(SpaceNeeds(1, 1), tmp_path / "x.sqsh", tmp_path / "none")


def test_scratch_of_killed_processes_is_removed(tmp_path: Path) -> None:
    tmp_path = tmp_path / "temporary"
    (tmp_path / "slipway-other").mkdir(parents=True)
    with scratch_directory(tmp_path) as (first, _):
        locked = first / "rootfs/locked"
        locked.mkdir(parents=True)
        outside = tmp_path / "outside"
        outside.mkdir(mode=0o750)
        (locked / "link").symlink_to(outside)
        dead = tmp_path / f"{SCRATCH_PREFIX}dead"
        dead.mkdir()
        (dead / "lock").touch()
        with scratch_directory(tmp_path) as (second, _):
            # Scratch of a live process stays, and so do files that are no scratch.
            assert {path.name for path in tmp_path.iterdir()} == {
                *("slipway-other", "outside"),
                *(first.name, second.name),
            }
        locked.chmod(0)
    assert {path.name for path in tmp_path.iterdir()} == {"slipway-other", "outside"}
    assert outside.stat().st_mode & 0o777 == 0o750


def test_scratch_is_kept_by_the_programs_in_it(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as (work, descriptors):
        child = subprocess.Popen(["sleep", "1000"], pass_fds=descriptors)
        with (work / "lock").open("r+") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.kill()
    child.wait()


def test_the_compression_follows_the_file_system(tmp_path: Path) -> None:
    assert default_compression(tmp_path, lambda path: True) == "zstd"
    assert default_compression(tmp_path, lambda path: False) == "lz4"


def test_names_in_an_image_do_not_lead_out_of_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "usr/etc").mkdir(parents=True)
    outside.mkdir()
    (outside / "environment").write_text("mine\n")
    (root / "etc").symlink_to("/usr/etc")
    (root / "usr/etc/environment").symlink_to(outside / "environment")
    (root / "usr/etc/rc").symlink_to("../../../outside/rc")
    (root / "work").symlink_to(f"../../..{outside}")
    configure(root, ImageConfig(env=("A=1",), workdir="/work/here"), "oci:x:1")
    assert (outside / "environment").read_text() == "mine\n"
    assert [path.name for path in outside.iterdir()] == ["environment"]
    assert (root / "usr/etc/environment").read_text() == "A=1\n"
    assert (root / "usr/etc/rc").read_text().startswith("# enroot-provenance: oci:x:1\n")
    assert resolve_inside(root, "/work/here") == root / outside.relative_to("/") / "here"
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    with pytest.raises(UserError, match="goes in circles"):
        resolve_inside(root, "/one/x")


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        (ImageConfig(), [], None),
        (ImageConfig(cmd=("printf", "[%s]", "a b", "$HOME")), [], "[a b][$HOME]"),
        (ImageConfig(entrypoint=("printf", "[%s]"), cmd=("a",)), [], "[a]"),
        (ImageConfig(entrypoint=("printf", "[%s]", "it's"), cmd=("a",)), ["b c", "`d`"], "[it's][b c][`d`]"),
        (ImageConfig(cmd=("printf", "unused")), ["printf", "[%s]", "x"], "[x]"),
    ],
)
def test_words_reach_the_program_as_they_are(
    tmp_path: Path, config: ImageConfig, arguments: list[str], expected: str | None
) -> None:
    root = tmp_path / "it's a root"
    root.mkdir()
    # The image's start creates its working directory, which therefore lies on this machine.
    workdir = tmp_path / "a $(touch no) place"
    config = ImageConfig(entrypoint=config.entrypoint, cmd=config.cmd, workdir=str(workdir))
    configure(root, config, "x\nrm -rf /")
    done = subprocess.run(
        ["sh", root / "etc/rc", *arguments], input="pwd", capture_output=True, text=True, check=True
    )
    assert done.stdout == (f"{workdir}\n" if expected is None else expected)
    assert "\nrm -rf" not in (root / "etc/rc").read_text()


def test_values_that_do_not_fit_in_a_line_are_reported(tmp_path: Path) -> None:
    config = ImageConfig(env=("A=1\n2", "B=3"), volumes=("/data",))
    assert configure(tmp_path, config, "x") == ["the variable A has a line break in it: left out"]
    assert (tmp_path / "etc/environment").read_text() == "B=3\n"
    words = "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    assert (tmp_path / "etc/fstab").read_text() == words


def test_the_owner_can_read_all_files(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "dev/null").write_text("not the device\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/shadow").write_text("12345")
    (tmp_path / "etc/shadow").chmod(0)
    (tmp_path / "program").write_text("#!")
    (tmp_path / "program").chmod(0o4555)
    (tmp_path / "etc").chmod(0o500)
    assert make_readable(tmp_path) == 7
    assert list((tmp_path / "dev").iterdir()) == []
    modes = {name: (tmp_path / name).stat().st_mode & 0o7777 for name in ("etc", "etc/shadow", "program")}
    assert modes == {"etc": 0o700, "etc/shadow": 0o400, "program": 0o4555}


def _skopeo(words: str) -> str:
    escaped = words.replace('"', '\\"')
    return f'time="2026-01-02T03:04:05Z" level=fatal msg="{escaped}"'


@pytest.mark.parametrize(
    ("output", "why", "hint"),
    [
        (
            _skopeo(
                'Error parsing image name "docker://nvcr.io/x/y:1": pinging container registry nvcr.io: Get '
                '"https://nvcr.io/v2/": dial tcp: lookup nvcr.io on 10.0.0.2:53: no such host'
            ),
            "the registry cannot be reached",
            "the login node can",
        ),
        (
            "[ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized",
            "the registry refuses access",
            "$oauthtoken",
        ),
        (
            _skopeo("reading manifest 1 in nvcr.io/x/y: unauthorized: authentication required"),
            "the registry refuses access",
            "skopeo login",
        ),
        (
            _skopeo("reading manifest 9 in localhost:5000/x: manifest unknown: manifest unknown"),
            "there is no such image",
            "list-tags",
        ),
        (
            "[ERROR] URL http://127.0.0.1:5000/v2/x/manifests/1 returned error code: 404 Not Found",
            "there is no such image",
            "list-tags",
        ),
        (
            _skopeo(
                "pinging container registry localhost:5000: http: server gave HTTP response to HTTPS client"
            ),
            "the registry speaks plain HTTP",
            "--plain-http",
        ),
        (
            _skopeo('Get "https://10.0.0.1/v2/": x509: certificate signed by unknown authority'),
            "this machine does not trust the registry's certificate",
            "--plain-http",
        ),
        ("Write failed because No space left on device", "no space is left", "--temp-dir"),
        ("tar: x: Cannot write: Disk quota exceeded", "no space is left", "--temp-dir"),
        (
            "cannot clone: Operation not permitted",
            "this machine does not let you use user namespaces",
            "subuid",
        ),
        ("what nobody has thought of", "skopeo failed with exit code 3", ""),
    ],
)
def test_a_programs_failure_is_explained(output: str, why: str, hint: str) -> None:
    error = explain_failure(
        "look up x", "/usr/bin/skopeo", 3, ["something before", output, "[===|  ] 3/9  33%"]
    )
    assert error.message.startswith(f"cannot look up x: {why}\n")
    assert hint in (error.hint or "")
    assert "level=fatal" not in error.message
    assert "[ERROR]" not in error.message


def test_only_known_packages_are_suggested() -> None:
    assert tools.explain_install("pigz") == ""
    assert tools.explain_install("pigz", "skopeo", "docker").endswith("apt-get install skopeo docker.io")


def test_hints_can_be_pasted() -> None:
    names = {"REGISTRY": "localhost:5000", "NAME": "team/x"}
    error = explain_failure("look up x", "skopeo", 1, ["unauthorized"], names)
    assert "`skopeo login localhost:5000`" in str(error)
    error = explain_failure("look up x", "skopeo", 1, ["manifest unknown"], names)
    assert "docker://localhost:5000/team/x`" in str(error)


@pytest.mark.parametrize(
    "output",
    [
        ["E: Unable to locate package nope", *["subprocess exited with status 100"] * 2],
        ["#7 0.512 E: Unable to locate package nope", "#7 ERROR: process did not complete successfully"],
        ["Traceback", "ModuleNotFoundError: No module named 'nope'", "exit status 1"],
        ["cc: fatal error: no input files", *["compilation goes on"] * 5, "Error: building at STEP x"],
    ],
)
def test_the_line_that_names_the_cause_is_quoted(output: list[str]) -> None:
    message = str(explain_failure("build x", "buildah", 100, ["STEP 1/2: FROM x", *output]))
    assert "nope" in message or "no input files" in message
    assert "subprocess exited" not in message


def test_a_long_message_keeps_its_end() -> None:
    output = f"Error parsing image name: {'pinging a registry: ' * 40}x509: certificate has expired"
    message = str(explain_failure("look up x", "skopeo", 1, [output]))
    assert "skopeo: ... " in message and "x509: certificate has expired" in message


def test_hints_for_a_registry_without_tls_can_be_pasted() -> None:
    names = {"REGISTRY": "localhost:5000", "NAME": "team/x"}
    error = explain_failure("look up x", "skopeo", 1, ["manifest unknown"], names, plain_http=True)
    assert "`skopeo list-tags --tls-verify=false docker://localhost:5000/team/x`" in str(error)
    error = explain_failure("look up x", "skopeo", 1, ["connection refused"], names, plain_http=True)
    assert "`curl -I http://localhost:5000/v2/`" in str(error)
    with pytest.raises(UserError, match="--tls-verify=false docker:"):
        tools.run(
            ["sh", "-c", "echo manifest unknown >&2; false", "--tls-verify=false"], doing="x", names=names
        )


def test_layers_need_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[SpaceNeeds] = []

    def refuse(needs: SpaceNeeds, *_: object) -> Path:
        calls.append(needs)
        raise UserError("no room")

    monkeypatch.setattr(scratch, "choose_scratch", refuse)
    monkeypatch.setattr(backends, "choose_backend", lambda *_: backends.ENROOT)
    monkeypatch.setattr(backends, "look_up", lambda *_: RemoteImage("sha256:a", 70, 1000, ImageConfig()))
    with pytest.raises(UserError, match="no room"):
        import_image(Reference.parse("registry.example/x:1"), tmp_path / "x.sqsh")
    assert [needs.temporary for needs in calls] == [1070]


def test_a_failure_shows_no_secret() -> None:
    message = ["Get https://user:hunter22@registry.example/v2/: EOF"]
    assert "hunter22" not in str(explain_failure("look up x", "skopeo", 1, message))


def test_in_a_pipe_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    plain = LineProgress()
    plain.step("fetching x", 21 * GB)
    plain.advance(GB)
    plain.note("by the way")
    plain.done()
    assert capsys.readouterr().err == "fetching x (21.0 GB) ...\nby the way\n"


def test_a_bar_shows_rate_and_remaining_time() -> None:
    stream, clock = io.StringIO(), iter(range(1000))
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with show_bars(console, lambda: 1.0 * next(clock)) as bars:
        bars.step("fetching [x]", 8_000_000)
        for amount in (1_000_000, 2_000_000, 3_000_000):
            bars.advance(amount)
        bars._live.refresh()
        bars.note("[by] the way")
        bars.advance(9_000_000)  # more than expected
        bars.step("looking")
    text = stream.getvalue()
    assert re.search(r"fetching \[x\] ━+ *3.0 MB of 8.0 MB +\d+\.\d [kM]B/s +0:00:\d\d", text), text
    assert "[by] the way" in text
    assert re.search(r"✓ fetching \[x\] ━+ 9.0 MB of 9.0 MB [\d.]+ [kM]B/s 0:00:\d\d", text), text
    assert re.search(r"✓ looking +━+ +0:00:\d\d", text), text
