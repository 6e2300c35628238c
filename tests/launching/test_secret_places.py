"""A secret in each place where a user may put one reaches no file, no screen and no list of processes."""

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

# In two parts: while this file is not committed, a launch stores it in its git.diff.
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


def make_place(*words: str, secret: str = VALUE, code: int = REFUSED, **environment: str) -> Place:
    return Place(words, environment, secret=secret, code=code)


_COMMAND = ("stages=[training,command]", "command.run.name=a")
PLACES = {
    # --- places that a review found ---
    "comment": make_place(f"cluster.comment='HF_TOKEN={VALUE}'"),
    "proxy": make_place(f"env_vars.https_proxy=http://me:{VALUE}@proxy:3128"),
    "token in an address": make_place(f"env_vars.GIT_MIRROR=https://{VALUE}@host/x.git"),
    "token and dummy password in an address": make_place(f"env_vars.GIT_MIRROR=https://{VALUE}:x@host/x.git"),
    "account key": make_place(f"env_vars.STORAGE='DefaultEndpointsProtocol=https;AccountKey={VALUE}=='"),
    "bearer": make_place(f"env_vars.HEADERS='Authorization: Bearer {VALUE}'"),
    "shared access signature": make_place(f"env_vars.BLOB='https://x.blob.example/c?sv=2022&sig={VALUE}'"),
    "signed address": make_place(f"env_vars.BLOB='https://x.s3.example/c?X-Amz-Signature={VALUE}&a=b'"),
    "id of a key": make_place(f"env_vars.AWS_ACCESS_KEY_ID={VALUE}"),
    "webhook": make_place(f"env_vars.HOOK=https://hooks.slack.com/services/T0/B0/{VALUE}"),
    "srun export": make_place(f"cluster.srun_args=['--export=ALL,FOO={VALUE}']"),
    "sbatch export": make_place(f"cluster.sbatch.export='HF={VALUE}'"),
    "comment by reference": make_place("cluster.comment='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "variable by reference": make_place("env_vars.MY_STUFF='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "unknown key by reference": make_place("+training.model.foo='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "pass-through key": make_place(f"+training.exp_manager.wandb_logger_kwargs.api_key={VALUE}"),
    "env_vars": make_place(f"env_vars.HF_TOKEN={VALUE}"),
    "cluster.env_vars": make_place(f"cluster.env_vars.DB_PWD={VALUE}"),
    "env_files": make_place(f"env_files.HF_TOKEN={VALUE}"),
    "export with a known name": make_place(f"cluster.sbatch.export='ALL,HF_TOKEN={VALUE}'"),
    "wandb_api_key_file": make_place(f"wandb_api_key_file={VALUE}"),
    # --- further keys ---
    "comment by value": make_place(f"cluster.comment='see {VALUE}!'", MY_API_KEY=VALUE),
    "part of a value": make_place("env_vars.X='a-${oc.env:MY_PASSWORD}-b'", MY_PASSWORD=VALUE),
    "short by reference": make_place("env_vars.X='${oc.env:MY_PASSWORD}'", secret=SHORT, MY_PASSWORD=SHORT),
    "default of a reference": make_place(f"env_vars.X='${{oc.env:MISSING_TOKEN,{VALUE}}}'"),
    "reference to a reference": make_place(
        "+training.model.foo='${oc.env:HF_TOKEN}'", "cluster.comment='${training.model.foo}'", HF_TOKEN=VALUE
    ),
    "name by reference": make_place("training.run.name='a_${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "directory by reference": make_place(
        "base_results_dir='/proc/nowhere/${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE
    ),
    "mount": make_place("container_mounts=['/x:/${oc.env:HF_TOKEN}']", HF_TOKEN=VALUE),
    "escaped in an address": make_place(
        f"env_vars.X=%40{VALUE}%2F", secret=f"%40{VALUE}%2F", DB_PASSWORD=f"@{VALUE}/"
    ),
    "list of a pass-through node": make_place(f"+training.model.hub={{a: [{{hf_token: {VALUE}}}]}}"),
    "number": make_place(f"+training.model.access_token={NUMBER}", secret=NUMBER),
    "job name's prefix": make_place("cluster.job_name_prefix='${oc.env:HF_TOKEN}-'", HF_TOKEN=VALUE),
    "mail address": make_place("cluster.mail_user='${oc.env:HF_TOKEN}'", HF_TOKEN=VALUE),
    "flag of sbatch": make_place(f"cluster.sbatch.wckey='token={VALUE}'"),
    "key of a mapping": make_place(f"+env_vars={{{HF}: x}}", secret=HF),
    "stage_cluster": make_place(f"stage_cluster.training.comment='password: {VALUE}'"),
    "image": make_place(f"container='https://me:{VALUE}@host/image.sqsh'"),
    "dead override": make_place(f"cluster.comment='HF_TOKEN={VALUE}'", "cluster.comment=x", code=MASKED),
    "malformed override": make_place(f"env_vars.HF_TOKEN='{VALUE}"),
    "option": make_place(f"--hf-token={VALUE}"),
    "no verb": make_place(f"HF_TOKEN={VALUE}", code=REFUSED),
    # --- known forms ---
    "form of Hugging Face": make_place(f"env_vars.X={HF}", secret=HF),
    "form of GitHub": make_place(f"cluster.comment=ghp_{VALUE}0123456789", secret=f"ghp_{VALUE}"),
    "form of GitHub, new": make_place(f"cluster.comment=github_pat_{VALUE}_012345"),
    "form of GitLab": make_place(f"env_vars.X=glpat-{VALUE}-0123"),
    "form of an API": make_place(f"env_vars.X=sk-proj-{VALUE}01234"),
    "form of Slack": make_place(f"env_vars.X=xoxb-123-{VALUE}"),
    "form of AWS": make_place(f"env_vars.X={KEY_ID}", secret=KEY_ID),
    "form of NVIDIA": make_place(f"env_vars.X=nvapi-{VALUE}0123456789"),
    "form of Weights & Biases": make_place(f"cluster.comment='WANDB is {HEX}'", secret=HEX),
    "login of Weights & Biases": make_place(f"env_vars.SETUP='wandb login {VALUE}'"),
    "private key": make_place(f"env_vars.X='{PEM}{VALUE}'"),
    "JSON web token": make_place(f"env_vars.X={JWT}", secret=JWT),
    "login of a registry": make_place(f"env_vars.X='docker login -u me -p {VALUE} nvcr.io'"),
    "option of a command": make_place(f"env_vars.X='hf auth login --token {VALUE}'"),
    "curl": make_place(f"env_vars.X='curl -u me:{VALUE} https://host'"),
    **{
        f"items of {key}: {line}": make_place(
            f"{key}=[{line.replace(' ', ',')}]", *(_COMMAND if key == "command.argv" else ())
        )
        for key in ("command.argv", "cluster.srun_args", "+training.model.arguments")
        for line in (
            *(
                f"prog {option} {VALUE}"
                for option in ("--password", "--api-key", "--token", "--oauth2-bearer")
            ),
            f"docker login -u me -p {VALUE} reg",
            f"curl -s -u me:{VALUE} https://host",
            f"sshpass -p {VALUE} ssh host",
            f"aws configure set aws_secret_access_key {VALUE}",
            f"aws configure set profile.a.aws_session_token {VALUE}",
            f"'prog' '--password' '{VALUE}'",
            f'"--token" "{VALUE}" last',
            f"java -password {VALUE}",
            f"prog --db.password {VALUE}",
            f'"docker" "login" "-p" "{VALUE}"',
            f"wandb login --relogin {VALUE}",
        )
    },
    "items with blanks": make_place(f"command.argv=[ prog , --password , '{VALUE} of mine' ]", *_COMMAND),
    "items with a number": make_place(f"+training.model.a=[1,null,--password,{VALUE}]"),
    "items with a command": make_place(f"command.argv=['sh','-c','prog --token {VALUE}']", *_COMMAND),
    "items of a mapping": make_place(f"++command={{argv: [prog, --token, {VALUE}]}}", *_COMMAND),
    "items of two lists": make_place(f"+training.model.a=[[x],[prog,--token,{VALUE}]]"),
    "items, dead": make_place(f"cluster.srun_args=[--token,{VALUE}]", "cluster.srun_args=[]", code=MASKED),
    "items of srun's export": make_place(f"cluster.srun_args=[--export,'ALL,MY_TOKEN={VALUE}']"),
    "items of the tree": Place(tree=f"srun_args: [prog, --password, {VALUE}]"),
    "image of a registry": make_place(f"container=me:{VALUE}@reg#img:1"),
    "image of a registry with a port": make_place(f"container=me:{VALUE}@reg:5000#a/img:1"),
    "image of a registry without #": make_place(f"container=me:{VALUE}@reg/img:1"),
    "image of a registry alone": make_place(f"container=me:{VALUE}@reg.io"),
    "image with a slash in its password": make_place(f"container=docker://me:a/{VALUE}@b@reg#img"),
    "image with an address for a user": make_place(f"env_vars.X=me@org.com:{VALUE}:x@reg.io/img:1"),
    "items of a program": Place(template=f'CMD ["prog", "--password", "{VALUE}"]'),
    "image of the tree": Place(tree=f"job_name_prefix: me:{VALUE}@reg#img-"),
    "netrc": make_place(f"env_vars.X='machine h login me password {VALUE}'"),
    # --- files of the user ---
    "tree": Place(tree=f"env_vars: {{HF_TOKEN: {VALUE}}}"),
    "tree, by reference": Place(tree="comment: ${oc.env:HF_TOKEN}", environment={"HF_TOKEN": VALUE}),
    "template": Place(template=f"export HF_TOKEN={VALUE}"),
    "template, by value": Place(template=f"echo {VALUE}", environment={"A_TOKEN": VALUE}),
    # --- the launching shell: no key refers to these, and no record has them ---
    "shell": make_place(code=MASKED, HF_TOKEN=VALUE, https_proxy=f"http://me:{VALUE}@proxy"),
    "variable of sbatch": make_place(code=MASKED, SBATCH_COMMENT=f"HF_TOKEN={VALUE}", A_TOKEN=VALUE),
}


def paths_with(directory: Path, secret: str) -> list[str]:
    return [
        str(path)
        for path in directory.rglob("*")
        if secret in str(path) or (path.is_file() and secret.encode() in path.read_bytes())
    ]


def record_processes(tmp_path: Path) -> Path:
    """Make the sbatch record the command lines of all processes, its parents too; return the record."""
    sbatch = tmp_path / "bin" / "sbatch"
    text = sbatch.read_text()
    snapshot = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' >>{tmp_path}/processes || true\n"
    sbatch.write_text(text.replace("\n", f"\n{snapshot}", 1))
    return tmp_path / "processes"


@pytest.mark.parametrize("name", PLACES)
def test_a_secret_reaches_no_file_and_no_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place, verb = PLACES[name], "launch"
    install(tmp_path, monkeypatch)
    record_processes(tmp_path)
    for variable, value in place.environment.items():
        monkeypatch.setenv(variable, value)
    own_tree, cwd = tmp_path / "own", tmp_path / "here"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("TMPDIR", str(cwd))
    words = [*overrides(tmp_path), *place.words]
    if place.tree:
        (own_tree / "cluster").mkdir(parents=True)
        (own_tree / "cluster" / "ours.yaml").write_text(f"defaults: [sandbox, _self_]\n{place.tree}\n")
        words = [f"--config-dir={own_tree}", *words, "cluster=ours"]
    if place.template:
        own_tree.mkdir()
        template = '{% extends "slipway/sbatch.sh.j2" %}\n{% block environment %}\n' + place.template
        (own_tree / "sbatch.sh.j2").write_text(template + "\n{% endblock %}\n")
        words = [f"--template-dir={own_tree}", *words]
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
    leaks = [path for path in paths_with(tmp_path, place.secret) if not path.startswith(str(own_tree))]
    assert leaks == []
    if name.startswith("items of "):
        assert "a secret must not be written" in printed
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
    for override, expected in {
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
        assert all(words in printed for words in (*expected, "from the command line: ", "***")), printed


# The content of a file that is not committed, by its name.
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
    origin = provenance.gather(tmp_path, (), None)
    assert VALUE not in str(origin)


def test_the_diff_of_a_program_is_not_changed(tmp_path: Path) -> None:
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
    program = 'echo "$A_TOKEN|$X|$lower_case|$(f)|${SHELL_ONLY-none}|$PWD" | tr a-z A-Z'
    # `env` is gone before anybody can look: this stand-in records its arguments.
    (tmp_path / "env").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/arguments\nexec /usr/bin/env "$@"\n'
    )
    (tmp_path / "env").chmod(0o755)
    script = repository / "templates" / "attach.sh"
    with subprocess.Popen(["sleep", "60"], env=lines, cwd=tmp_path) as rank:
        try:
            done = subprocess.run(
                ["bash", script, "of-this-test", "0", "bash", "-c", program],
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
