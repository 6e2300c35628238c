"""A secret in each place where a user may put one: no file, no screen and no list of processes has it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.runs import provenance
from launcher.runs.provenance import checkout_of
from tests.launching.fake_slurm import install, overrides

# In two parts: where this file is not committed, a launch keeps it in its git.diff.
VALUE = "S3CRET" + "value9"
HF = f"hf_{VALUE}AbCdEfGhIjKlMnOpQ"
HEX = "0123456789abcdef0123456789abcdef01234567"
PEM = "-----BEGIN RSA PRIVATE KEY-----"
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{VALUE}"
NUMBER, SHORT = f"{918273645}546", f"q7{'Zk'}"
KEY_ID = f"AKIA{VALUE.upper()}9999"
REFUSED, MASKED = 2, 0


@dataclass(frozen=True)
class Place:
    """A place of a secret: overrides, variables, a line of the user's tree; and the launch's exit code."""

    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tree: str = ""
    template: str = ""
    secret: str = VALUE
    code: int = REFUSED


def typed(*words: str, secret: str = VALUE, code: int = REFUSED, **environment: str) -> Place:
    return Place(words, environment, secret=secret, code=code)


PLACES = {
    # --- the review's ---
    "comment": typed(f"cluster.comment='HF_TOKEN={VALUE}'"),
    "proxy": typed(f"env_vars.https_proxy=http://me:{VALUE}@proxy:3128"),
    "token in an address": typed(f"env_vars.GIT_MIRROR=https://{VALUE}@host/x.git"),
    "token and dummy password in an address": typed(f"env_vars.GIT_MIRROR=https://{VALUE}:x@host/x.git"),
    "account key": typed(f"env_vars.STORAGE='DefaultEndpointsProtocol=https;AccountKey={VALUE}=='"),
    "bearer": typed(f"env_vars.HEADERS='Authorization: Bearer {VALUE}'"),
    "shared access signature": typed(f"env_vars.BLOB='https://x.blob.example/c?sv=2022&sig={VALUE}'"),
    "signed address": typed(f"env_vars.BLOB='https://x.s3.example/c?X-Amz-Signature={VALUE}&a=b'"),
    "id of a key": typed(f"env_vars.AWS_ACCESS_KEY_ID={VALUE}"),
    "webhook": typed(f"env_vars.HOOK=https://hooks.slack.com/services/T0/B0/{VALUE}"),
    "srun export": typed(f"cluster.srun_args=['--export=ALL,FOO={VALUE}']"),
    "sbatch export": typed(f"cluster.sbatch.export='HF={VALUE}'"),
    "comment by reference": typed("cluster.comment='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "variable by reference": typed("env_vars.MY_STUFF='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "unknown key by reference": typed("+training.model.foo='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "pass-through key": typed(f"+training.exp_manager.wandb_logger_kwargs.api_key={VALUE}"),
    "env_vars": typed(f"env_vars.HF_TOKEN={VALUE}"),
    "cluster.env_vars": typed(f"cluster.env_vars.DB_PWD={VALUE}"),
    "env_files": typed(f"env_files.HF_TOKEN={VALUE}"),
    "export with a known name": typed(f"cluster.sbatch.export='ALL,HF_TOKEN={VALUE}'"),
    "wandb_api_key_file": typed(f"wandb_api_key_file={VALUE}"),
    # --- further keys ---
    "comment by value": typed(f"cluster.comment='see {VALUE}!'", MY_API_KEY=VALUE),
    "part of a value": typed("env_vars.X='a-${oc.env:MY_PASSWORD}-b'", MY_PASSWORD=VALUE),
    "short by reference": typed("env_vars.X='${oc.env:MY_PASSWORD}'", secret=SHORT, MY_PASSWORD=SHORT),
    "default of a reference": typed(f"env_vars.X='${{oc.env:MISSING_TOKEN,{VALUE}}}'"),
    "reference to a reference": typed(
        "+training.model.foo='${oc.env:HF_TOKEN}'", "cluster.comment='${training.model.foo}'", HF_TOKEN=VALUE
    ),
    "name by reference": typed("training.run.name='a_${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "directory by reference": typed("base_results_dir='/proc/nowhere/${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "mount": typed("container_mounts=['/x:/${oc.env:HF_TOKEN}']", HF_TOKEN=VALUE),
    "escaped in an address": typed(
        f"env_vars.X=%40{VALUE}%2F", secret=f"%40{VALUE}%2F", DB_PASSWORD=f"@{VALUE}/"
    ),
    "list of a pass-through node": typed(f"+training.model.hub={{a: [{{hf_token: {VALUE}}}]}}"),
    "number": typed(f"+training.model.access_token={NUMBER}", secret=NUMBER),
    "job name's prefix": typed("cluster.job_name_prefix='${oc.env:HF_TOKEN}-'", HF_TOKEN=VALUE),
    "mail address": typed("cluster.mail_user='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "flag of sbatch": typed(f"cluster.sbatch.wckey='token={VALUE}'"),
    "key of a mapping": typed(f"+env_vars={{{HF}: x}}", secret=HF),
    "stage_cluster": typed(f"stage_cluster.training.comment='password: {VALUE}'"),
    "image": typed(f"container='https://me:{VALUE}@host/image.sqsh'"),
    "dead override": typed(f"cluster.comment='HF_TOKEN={VALUE}'", "cluster.comment=x", code=MASKED),
    "malformed override": typed(f"env_vars.HF_TOKEN='{VALUE}"),
    "option": typed(f"--hf-token={VALUE}"),
    "no verb": typed(f"HF_TOKEN={VALUE}", code=REFUSED),
    # --- known forms ---
    "form of Hugging Face": typed(f"env_vars.X={HF}", secret=HF),
    "form of GitHub": typed(f"cluster.comment=ghp_{VALUE}0123456789", secret=f"ghp_{VALUE}"),
    "form of GitHub, new": typed(f"cluster.comment=github_pat_{VALUE}_012345"),
    "form of GitLab": typed(f"env_vars.X=glpat-{VALUE}-0123"),
    "form of an API": typed(f"env_vars.X=sk-proj-{VALUE}01234"),
    "form of Slack": typed(f"env_vars.X=xoxb-123-{VALUE}"),
    "form of AWS": typed(f"env_vars.X={KEY_ID}", secret=KEY_ID),
    "form of NVIDIA": typed(f"env_vars.X=nvapi-{VALUE}0123456789"),
    "form of Weights & Biases": typed(f"cluster.comment='WANDB is {HEX}'", secret=HEX),
    "login of Weights & Biases": typed(f"env_vars.SETUP='wandb login {VALUE}'"),
    "private key": typed(f"env_vars.X='{PEM}{VALUE}'"),
    "JSON web token": typed(f"env_vars.X={JWT}", secret=JWT),
    "login of a registry": typed(f"env_vars.X='docker login -u me -p {VALUE} nvcr.io'"),
    "option of a command": typed(f"env_vars.X='hf auth login --token {VALUE}'"),
    "curl": typed(f"env_vars.X='curl -u me:{VALUE} https://host'"),
    "netrc": typed(f"env_vars.X='machine h login me password {VALUE}'"),
    # --- files of the user's ---
    "tree": Place(tree=f"env_vars: {{HF_TOKEN: {VALUE}}}"),
    "tree, by reference": Place(tree="comment: ${oc.env:HF_TOKEN}", environment={"HF_TOKEN": VALUE}),
    "template": Place(template=f"export HF_TOKEN={VALUE}"),
    "template, by value": Place(template=f"echo {VALUE}", environment={"A_TOKEN": VALUE}),
    # --- what the launch is made of besides: never asked for, and never on record ---
    "shell": typed(code=MASKED, HF_TOKEN=VALUE, https_proxy=f"http://me:{VALUE}@proxy"),
    "variable of sbatch": typed(code=MASKED, SBATCH_COMMENT=f"HF_TOKEN={VALUE}", A_TOKEN=VALUE),
}


def grep(directory: Path, secret: str) -> list[str]:
    return [
        str(path)
        for path in directory.rglob("*")
        if secret in str(path) or (path.is_file() and secret.encode() in path.read_bytes())
    ]


def watch(tmp_path: Path) -> Path:
    """Let the sbatch of the test keep the command lines of all processes, and those that began it."""
    sbatch = tmp_path / "bin" / "sbatch"
    text = sbatch.read_text()
    see = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' >>{tmp_path}/processes || true\n"
    sbatch.write_text(text.replace("\n", f"\n{see}", 1))
    return tmp_path / "processes"


@pytest.mark.parametrize("name", PLACES)
def test_a_secret_is_nowhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place, verb = PLACES[name], "launch"
    install(tmp_path, monkeypatch)
    watch(tmp_path)
    for variable, value in place.environment.items():
        monkeypatch.setenv(variable, value)
    own, here = tmp_path / "own", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TMPDIR", str(here))
    words = [*overrides(tmp_path), *place.words]
    if place.tree:
        (own / "cluster").mkdir(parents=True)
        (own / "cluster" / "ours.yaml").write_text(f"defaults: [sandbox, _self_]\n{place.tree}\n")
        words = [f"--config-dir={own}", *words, "cluster=ours"]
    if place.template:
        own.mkdir()
        template = '{% extends "slipway/sbatch.sh.j2" %}\n{% block environment %}\n' + place.template
        (own / "sbatch.sh.j2").write_text(template + "\n{% endblock %}\n")
        words = [f"--template-dir={own}", *words]
    monkeypatch.setattr("sys.argv", ["slipway", verb, *words])
    if name == "no verb":
        words, verb = [], place.words[0]
    try:
        code = main([verb, *words])
    except SystemExit as error:
        code = int(str(error.code))
    printed = "".join(capfd.readouterr())
    assert place.secret not in printed
    assert code == place.code, printed
    found = [path for path in grep(tmp_path, place.secret) if not path.startswith(str(own))]
    assert found == []
    if code == REFUSED:
        assert not (tmp_path / "results").exists(), "nothing is written"
        assert (tmp_path / "slurm" / "calls").read_text() == "", "nothing is submitted"
    else:
        assert "Submitted" in printed
        assert (tmp_path / "processes").read_text()


def test_there_are_forty_places() -> None:
    assert len(PLACES) >= 40


def test_a_refusal_names_the_key_and_the_reference_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch)
    for override, told in {
        f"cluster.comment='HF_TOKEN={VALUE}'": (
            "cluster.comment: ",
            "Slurm shows it",
            "env_files={HF_TOKEN: ",
        ),
        f"env_vars.https_proxy=http://me:{VALUE}@p": ("a password in an address", "env_files={https_proxy: "),
        f"cluster.sbatch.export='HF={VALUE}'": ("a value for HF", "env_vars.HF=..."),
    }.items():
        assert main(["launch", *overrides(tmp_path, override)]) == 2
        printed = capsys.readouterr().err
        assert all(words in printed for words in (*told, "from the command line: ", "***")), printed


# What stands in a file that is not committed, by the file.
CHANGES = {
    "Makefile": f"train:\n\texport HF_TOKEN={VALUE}\n\twandb login {VALUE}\nMY_PASSWORD ?= {VALUE}\n",
    "README.md": f'{{"hf_token": "{VALUE}"}}\n',
    "Dockerfile": f"ENV HF_TOKEN {VALUE}\nRUN curl -u me:{VALUE} https://host\n",
    "notes": f"--token {VALUE} https://me:{VALUE}@host Authorization: Bearer {VALUE}\n",
    "train.py": f'hf_token: str = "{VALUE}"\n'
    f'os.environ["HF_TOKEN"] = "{VALUE}"\nsetenv("A_KEY", "{VALUE}")\n',
    "key.pem": f"{PEM}\n{VALUE}abcd\nefgh{VALUE}\n-----END RSA PRIVATE KEY-----\n",
    "conf.yaml": f"api_key: {VALUE}\nx: ghp_{VALUE}0123456\n",
    "known.c": f"int x; // {VALUE}\n",
    "run.csh": f"setenv WANDB_API_KEY {VALUE}\n",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_secret_in_a_file_that_is_not_committed_is_masked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(tmp_path)]
    (tmp_path / name).write_text("first\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    if name == "known.c":
        monkeypatch.setenv("MY_TOKEN", VALUE)
    (tmp_path / name).write_text(f"first\n{CHANGES[name]}")
    checkout = checkout_of(tmp_path)
    assert checkout is not None and checkout.diff is not None
    assert VALUE not in checkout.diff
    assert checkout.diff.count("\n+") - 1 == CHANGES[name].count("\n"), "each line stays a line"
    origin = provenance.gather(tmp_path, None, None)
    assert VALUE not in str(origin)


def test_a_program_is_kept_as_it_is(tmp_path: Path) -> None:
    lines = "token = tokens[i]\nkey = read(key)\nif hf_token == other:\n    f(token=token, api_key=None)\n"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(tmp_path)]
    (tmp_path / "a.py").write_text("\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "a.py").write_text(lines)
    checkout = checkout_of(tmp_path)
    assert checkout is not None and checkout.diff is not None
    assert re.findall(r"^\+(?!\+)(.*\n)", checkout.diff, re.MULTILINE) == lines.splitlines(keepends=True)


def test_attach_shows_no_variable_of_the_rank(tmp_path: Path, repository: Path) -> None:
    """The rank's environment is handed over as an environment, not as arguments, which everybody can read."""
    environment = {"PATH": os.environ["PATH"], "RANK": "0", "SLIPWAY_TAG": "of-this-test", "A_TOKEN": VALUE}
    lines = {**environment, "X": "a b\nc", "lower_case": "1", "BASH_FUNC_f%%": "() { echo function; }"}
    look = 'echo "$A_TOKEN|$X|$lower_case|$(f)|${SHELL_ONLY-none}|$PWD" | tr a-z A-Z'
    # `env` is gone before anybody can look: one that stays a while, and says what it was called with.
    (tmp_path / "env").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/arguments\nexec /usr/bin/env "$@"\n'
    )
    (tmp_path / "env").chmod(0o755)
    script = repository / "templates" / "attach.sh"
    with subprocess.Popen(["sleep", "60"], env=lines, cwd=tmp_path) as rank:
        try:
            done = subprocess.run(
                ["bash", script, "of-this-test", "0", "bash", "-c", look],
                env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL_ONLY": "x"}
                | {"SHELLOPTS": "xtrace"},
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            rank.kill()
    assert done.stdout.startswith(f"{VALUE.upper()}|A B\nC|1|FUNCTION|NONE|{str(tmp_path).upper()}\n"), (
        done.stderr
    )
    assert VALUE not in (tmp_path / "arguments").read_text()
    assert VALUE not in done.stdout + done.stderr
