"""Recipes: their Dockerfiles and labels, their hashes, and the messages about mistakes in them."""

from __future__ import annotations

import configparser
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from launcher.drafting import Request, draft
from launcher.errors import UserError
from launcher.images import recipes
from launcher.images.recipes import Recipe, build_labels, read_recipe, recipe_names

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "0123456789abcdef" * 4
SHIPPED = [(name, flavor) for name in ("megatron", "nemo", "nemo-aws") for flavor in ("run", "dev")]


@pytest.fixture
def user_tree(tmp_path: Path) -> Path:
    """A tree of the user's own, with a recipe that builds on one of ours."""
    (tmp_path / "tree" / "image").mkdir(parents=True)
    write(tmp_path / "tree", "mine", "base: example.org/team/nemo:1")
    return tmp_path / "tree"


def write(tree: Path, name: str, *lines: str, on: str = "nemo") -> None:
    text = "\n".join(["defaults:", f"  - {on}", "  - _self_", *lines, ""])
    (tree / "image" / f"{name}.yaml").write_text(text)


def test_recipes_are_listed(user_tree: Path) -> None:
    assert recipe_names() == ["megatron", "nemo", "nemo-aws"]
    assert recipe_names((user_tree,)) == ["megatron", "mine", "nemo", "nemo-aws"]


@pytest.mark.parametrize(("name", "flavor"), SHIPPED)
def test_the_user_is_only_in_the_name_of_the_image(
    name: str, flavor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "user", lambda: "Jane.Doe@corp")
    monkeypatch.setenv("HOME", "/home/Jane.Doe")
    recipe = read_recipe(name, flavor)
    assert re.fullmatch(rf"{name}-{flavor}-[0-9a-f]{{12}}\.sqsh", recipe.file_name)
    assert recipe.image_name == f"localhost/jane-doe-corp/{name}:{flavor}-{recipe.short_hash}"
    words = set(re.split(r"[\s\"':=]", recipe.dockerfile))
    assert not {str(ROOT), str(Path.cwd()), socket.gethostname()} & words
    assert not re.search(r"jane\W?doe", recipe.dockerfile, re.IGNORECASE)


def test_registry_owner_and_tag_name_the_image() -> None:
    recipe = read_recipe(
        "nemo", "run", ["image.registry=reg.org:5000", "image.owner=ml/team", "image.tag=1.10"]
    )
    assert recipe.image_name == "reg.org:5000/ml/team/nemo:1.10"
    assert recipe.name_in("a.b") == "a.b/ml/team/nemo:1.10"


def test_a_dev_image_has_editors_on_top() -> None:
    run, dev = read_recipe("nemo", "run"), read_recipe("nemo", "dev")
    for tool in ("vim", "nano", "tmux", "git"):
        assert re.search(rf"^ +{tool} \\$", dev.dockerfile, re.MULTILINE)
        assert tool not in run.dockerfile


CHANGES = [
    "image.flavor=dev",
    "image.platform=linux/arm64",
    f"image.digest={DIGEST}",
    "image.base=nvcr.io#nvidia/nemo:24.07",
    "image.versions.nccl=2.20.5-1",
    "image.cuda_archs=[90]",
    "image.env.NCCL_DEBUG=INFO",
    "image.packages=[numactl]",
    "image.python_packages=[einops]",
    "image.workdir=/work",
    "image.labels.org.team=us",
]
NAMES = ["image.owner=me", "image.tag=x", "image.registries=[a.b]", "image.builder=podman"]


def test_the_hash_covers_what_is_in_the_image() -> None:
    hashes = [read_recipe("nemo-aws", None, [change]).hash for change in CHANGES]
    assert len({read_recipe("nemo-aws").hash, *hashes}) == len(CHANGES) + 1


def test_the_hash_does_not_cover_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = read_recipe("megatron")
    monkeypatch.setenv("LOGNAME", "somebody")
    assert read_recipe("megatron", None, NAMES).hash == before.hash
    (tmp_path / "slipway").mkdir()
    (tmp_path / "slipway/changed.py").write_text("changed = True\n")
    monkeypatch.setattr(recipes, "PACKAGE", tmp_path / "slipway")
    after = read_recipe("megatron")
    assert (after.hash, after.context) == (before.hash, {"slipway/changed.py": b"changed = True\n"})


def test_the_megatron_image_has_the_trainer() -> None:
    context = read_recipe("megatron").context
    assert context["slipway/trainer/pretrain.py"] == (ROOT / "slipway/trainer/pretrain.py").read_bytes()
    assert not [name for name in context if name.endswith(".pyc")]
    assert read_recipe("nemo").context == {}


def test_a_base_without_a_digest_is_a_warning() -> None:
    (warning,) = read_recipe("nemo").warnings
    assert "image.base=nvcr.io#nvidia/nemo:25.07 is not pinned" in warning
    assert "skopeo inspect --format '{{.Digest}}' docker://nvcr.io/nvidia/nemo:25.07" in warning


@pytest.mark.parametrize("pin", [f"image.digest={DIGEST}", f"image.base=nvcr.io#nvidia/nemo:25.07@{DIGEST}"])
def test_a_pinned_base_is_no_warning(pin: str) -> None:
    recipe = read_recipe("nemo", None, [pin])
    assert recipe.warnings == ()
    assert f"\nFROM nvcr.io/nvidia/nemo@{DIGEST}\n" in recipe.dockerfile
    assert recipe.labels["org.opencontainers.image.base.digest"] == DIGEST
    assert recipe.labels["org.opencontainers.image.base.name"] == "nvcr.io/nvidia/nemo:25.07"


def labels_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for instruction in re.findall(r"^LABEL (?:.*\\\n)*.*$", recipe.dockerfile, re.MULTILINE):
        yield from re.findall(r'([\w.]+)="(.*)"', instruction)


def test_labels_are_in_the_dockerfile() -> None:
    recipe = read_recipe("nemo-aws", "dev", ["image.labels.org.team=us"])
    assert dict(labels_of(recipe)) == recipe.labels
    assert recipe.labels["slipway.recipe.name"] == "nemo-aws"
    assert recipe.labels["slipway.recipe.flavor"] == "dev"
    assert recipe.labels["slipway.recipe.hash"] == recipe.hash
    assert recipe.labels["slipway.versions.nccl"] == "2.27.7-1"
    assert recipe.labels["org.team"] == "us"


def test_labels_of_a_build_name_the_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@y")
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "a.yaml").write_text("a: 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(recipes, "TEMPLATE_DIR", tmp_path)
    commit = git("rev-parse", "HEAD")
    template_labels = build_labels()
    assert template_labels["org.opencontainers.image.revision"] == commit
    assert (template_labels["slipway.dirty"], "slipway.config.revision" in template_labels) == (
        "false",
        False,
    )
    (tmp_path / "image" / "a.yaml").write_text("a: 2\n")
    config_labels = build_labels((tmp_path,))
    assert (config_labels["slipway.config.revision"], config_labels["slipway.config.dirty"]) == (
        commit,
        "true",
    )


def test_parts_without_a_version_are_left_out() -> None:
    recipe = read_recipe(
        "nemo-aws", None, ["image.versions.aws_ofi_nccl=null", "image.versions.nccl_tests=null"]
    )
    assert "AWS_OFI_NCCL" not in recipe.dockerfile
    assert "NCCL_TESTS" not in recipe.dockerfile
    assert "NCCL_VERSION=2.27.7-1" in recipe.dockerfile
    assert not [label for label in recipe.labels if "ofi" in label or "tests" in label]


def test_the_dev_script_is_run_in_the_dev_flavor(tmp_path: Path) -> None:
    script = tmp_path / "setup.sh"
    script.write_text("echo one\n")
    key = f"image.dev_script={script}"
    dev = read_recipe("nemo", "dev", [key])
    assert dev.context == {"dev-script.sh": b"echo one\n"}
    assert "RUN bash /opt/slipway/dev-script.sh\n" in dev.dockerfile
    assert str(tmp_path) not in dev.dockerfile
    script.write_text("echo two\n")
    assert read_recipe("nemo", "dev", [key]).hash != dev.hash
    run = read_recipe("nemo", "run", [key])
    assert run.context == {}
    assert "image.dev_script is for the dev flavor" in run.warnings[-1]


def test_a_user_recipe_and_template_are_rendered(user_tree: Path, tmp_path: Path) -> None:
    assert "\nFROM example.org/team/nemo:1\n" in read_recipe("mine", None, (), (user_tree,)).dockerfile
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "ours.Dockerfile.j2").write_text(
        '{% extends "slipway/nemo.Dockerfile.j2" %}{% block body %}RUN touch /here\n{% endblock %}'
    )
    write(user_tree, "mine", "template: ours")
    text = read_recipe("mine", "dev", (), (user_tree,), templates).dockerfile
    assert "RUN touch /here\n" in text
    assert "tmux" in text
    (templates / "nemo.Dockerfile.j2").write_text("FROM scratch\nCOPY nothing /\n")
    assert read_recipe("nemo", None, (), (), templates).dockerfile.startswith("FROM scratch\n")


@pytest.mark.parametrize(
    "line",
    [
        "{{ versions.get('te') }}",
        "{% for name, version in versions.items() %}{{ name }}={{ version }} {% endfor %}",
        "{% for name, version in versions|dictsort %}{{ name }}={{ version }} {% endfor %}",
        "{{ versions.values()|join(' ') }}",
        "{{ 'te' in versions }}",
    ],
)
def test_a_template_uses_versions_as_any_mapping(line: str, user_tree: Path, tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "ours.Dockerfile.j2").write_text(f"FROM scratch\nRUN echo {line}\n")
    (user_tree / "image" / "alone.yaml").write_text(
        "defaults:\n  - _base\n  - _self_\nbase: example.org/nemo:1\ntemplate: ours\nversions: {te: '2.1'}\n"
    )
    assert re.search(
        r"RUN echo .*(2\.1|True)", read_recipe("alone", None, (), (user_tree,), templates).dockerfile
    )


def test_a_version_that_a_template_only_lists_is_refused(user_tree: Path, tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "ours.Dockerfile.j2").write_text("FROM scratch\nRUN echo {{ versions|length }}\n")
    write(user_tree, "mine", "template: ours", "versions: {te: '2.1'}")
    with pytest.raises(UserError, match="the template ours builds no such thing"):
        read_recipe("mine", None, (), (user_tree,), templates)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "nemmo",
            [],
            ["nemmo: there is no such recipe", "did you mean 'nemo'? valid: megatron, nemo, nemo-aws"],
        ),
        ("_base", [], ["_base: there is no such recipe"]),
        (
            "nemo",
            ["image.flavor=dve"],
            ["image.flavor='dve': expected 'run' or 'dev'", "did you mean 'dev'?"],
        ),
        (
            "nemo",
            ["image.flavour=dev"],
            ["image.flavour=dev: there is no such key", "did you mean 'flavor'?"],
        ),
        ("nemo", ["flavor=dev"], ["did you mean 'image.flavor'?"]),
        ("nemo", ["image.digest=sha256:12"], ["image.digest='sha256:12': expected sha256: and 64 digits"]),
        ("nemo", ["training=gpt3/5b"], ["training=gpt3/5b: there is no such key"]),
        ("nemo-aws", ["image.versions.ncll=2"], ["image.versions.ncll=2", "did you mean 'nccl'?"]),
        ("nemo", ["image.template=nmeo"], ["image.template='nmeo'", "did you mean 'nemo'?", "command line"]),
        ("nemo", ["image.base=oci:/a"], ["image.base='oci:/a'", "podman load", "command line"]),
        ("nemo", ["image.base=NVCR/x"], ["image.base='NVCR/x'", "nvcr/x", "command line"]),
        ("nemo", ["image.packages=[a_b]"], ["image.packages=['a_b']: expected Debian packages"]),
        ("nemo", ["image.env={A-B: x}"], ["image.env.A-B", "a name that a variable can have"]),
        ("nemo", ["image.workdir=work"], ["image.workdir='work': expected an absolute path"]),
        ("nemo", ["image.pip_index=https://me:pw@host/simple"], ["would be in the image for all to read"]),
        ("nemo", ["image.pip_index=HTTPS://token@host/simple"], ["would be in the image for all to read"]),
        ("nemo", ["image.python_packages=[git+https://me:pw@host/x]"], ["in the image for all to read"]),
        ("nemo", ["image.env.API_KEY=sesame"], ["API_KEY would be in the image", "env_files"]),
        (
            "nemo",
            ["image.flavor=dev", "image.dev_script=~nobody-of-this-name/x"],
            ["image.dev_script='~nobody-of-this-name/x': there is no such user's home", "command line"],
        ),
        (
            "nemo",
            [f"image.digest={DIGEST}", f"image.base=nemo@sha256:{'1' * 64}"],
            ["image.base has another digest", "image.base is from the command line"],
        ),
    ],
)
def test_mistakes_in_overrides_are_named(name: str, overrides: list[str], message: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_recipe(name, None, overrides)
    for words in message:
        assert words in str(caught.value)
    assert "me:pw" not in str(caught.value)


def test_mistakes_in_files_name_their_lines(user_tree: Path) -> None:
    def mistake(*lines: str, on: str = "nemo") -> str:
        write(user_tree, "mine", *lines, on=on)
        with pytest.raises(UserError) as caught:
            read_recipe("mine", None, (), (user_tree,))
        return str(caught.value)

    source = f"from {user_tree}/image/mine.yaml:4"
    assert source in mistake("flavor: dve")
    assert "did you mean 'packages'?" in mistake("pakages: [numactl]")
    misspelt = mistake("versions: {gdrcpy: 1.0.0}", on="nemo-aws")
    assert source in misspelt
    assert "did you mean 'gdrcopy'?" in misspelt
    assert "not valid YAML" in mistake("packages: [numactl")
    assert "there is no such file to build on" in mistake(on="nmo")
    # A number is read as it was written.
    write(user_tree, "mine", "tag: 1.10")
    assert read_recipe("mine", None, (), (user_tree,)).image_name.endswith(":1.10")


def test_a_directory_of_dockerfiles_serves_a_launch(tmp_path: Path) -> None:
    (tmp_path / "nemo.Dockerfile.j2").write_text("FROM {{ base }}\n")
    request = Request(
        ["cluster=bcm", "container=nemo", f"launcher_scripts_path={tmp_path}"],
        command=["x"],
        template_dir=tmp_path,
    )
    launch = draft(request)
    assert launch.script
    (tmp_path / "nemo.Dockerfile.j2").rename(tmp_path / "nemo.Dokerfile")
    with pytest.raises(UserError, match="contains no Slipway template"):
        assert draft(request).texts


def test_mistakes_in_templates_and_scripts_are_named(user_tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--template-dir .*: no such directory"):
        read_recipe("nemo", None, (), (), tmp_path / "none")
    (tmp_path / "nemo.Dockerfile.j2").write_text("FROM {{ base }}\nENV A={{ nothing }}\n")
    with pytest.raises(UserError) as caught:
        read_recipe("nemo", None, (), (), tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/nemo.Dockerfile.j2:2: this template is not valid")
    (tmp_path / "setup.sh").touch()
    with pytest.raises(UserError) as caught:
        read_recipe("nemo", "dev", [f"image.dev_script={tmp_path}/stup.sh"])
    assert "no such file or directory" in str(caught.value)
    assert f"in {tmp_path}: setup.sh" in str(caught.value)


def test_the_megatron_image_has_the_packages_of_the_extras() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = "\n".join(setup["options.extras_require"][name] for name in ("train", "data")).splitlines()
    extra = {(need := Requirement(line)).name: need for line in lines if line.strip()}
    recipe = read_recipe("megatron")
    lines = [*recipe.config.python_packages, f"megatron-core=={recipe.config.versions['megatron_core']}"]
    packages = {(need := Requirement(line)).name: need for line in lines}
    # torch and numpy are the base's, for which its Transformer Engine and Apex were compiled.
    assert extra.keys() - packages.keys() == {"torch", "numpy"}
    assert packages.keys() < extra.keys()
    constraints = [
        Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    for name, need in packages.items():
        for pinned in need.specifier:
            if pinned.operator == "==":
                assert Version(pinned.version) in extra[name].specifier
            else:
                assert pinned in set(extra[name].specifier)
    for constraint in constraints:
        if constraint.name in packages:
            assert packages[constraint.name].specifier == constraint.specifier


def test_the_megatron_image_keeps_the_torch_of_its_base() -> None:
    recipe = read_recipe("megatron")
    assert recipe.config.base == "nvcr.io#nvidia/pytorch:25.11-py3"
    assert "torch==" not in recipe.dockerfile.replace("(torch|", "")
    before, after = recipe.dockerfile.split("ENV PIP_CONSTRAINT=/opt/slipway/base.txt\n")
    assert "pip install" not in before
    assert "pip install --no-cache-dir --no-deps megatron-core==0.16.1" in after
    assert "| diff /opt/slipway/base.txt -" in after


def test_a_launch_without_a_recipe_reads_none() -> None:
    code = (
        "import sys; from launcher.config.compose import compose; compose(['cluster=bcm']); "
        "sys.exit('launcher.images' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
