"""Secrets: known by their names, refused where they would be written, and never printed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import secrecy, secret_forms
from launcher.cli.app import main
from launcher.config.compose import CONF_DIR, compose, list_options
from launcher.config.secrets import check_secrets
from launcher.errors import UserError
from launcher.secrecy import is_secret_name, printable, redacted, without_secrets
from launcher.stages.planning import plan_launch

VALUE = "s3cr3tvalue"

SECRETS = """
WANDB_API_KEY OPENAI_KEY WANDB_KEY PGPASSWORD MYSQL_PWD DB_PWD DB_PASS SSH_PASSPHRASE PRIVATE_KEY ACCESS_KEY
APIKEY GITHUB_PAT MY_CREDENTIALS HF_TOKEN HF_TOKENS HF_TOKEN_2 HF_AUTH HUGGING_FACE_HUB_TOKEN
AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN CLIENT_SECRET SECRET SECRETS NGC_CLI_API_KEY
api_key apiKey accessToken AccountKey account_key hf_token password secret_key wandb_api_bcp_secret_key
access_token
"""

# Names of networks, libraries and models.
HARMLESS = """
TOKENIZERS_PARALLELISM MY_TOKENIZER TOKENIZER_PATH MONKEY SECRETARY KEYBOARD PATH PWD OLDPWD COMPASS
SSH_AUTH_SOCK GOOGLE_APPLICATION_CREDENTIALS AWS_WEB_IDENTITY_TOKEN_FILE HF_TOKEN_PATH
HF_HOME HF_HUB_OFFLINE HF_HUB_CACHE HF_HUB_DISABLE_IMPLICIT_TOKEN HF_HUB_ENABLE_HF_TRANSFER
HF_DATASETS_CACHE HF_ENDPOINT GIT_ASKPASS NCCL_DEBUG NCCL_IB_PKEY NCCL_IB_HCA NCCL_SOCKET_IFNAME
NCCL_P2P_LEVEL NCCL_TOPO_FILE NCCL_NET_PLUGIN NCCL_NVLS_ENABLE FI_PROVIDER FI_EFA_USE_DEVICE_RDMA
FI_EFA_FORK_SAFE FI_OPX_KEY FI_MR_CACHE_MONITOR UCX_TLS UCX_NET_DEVICES UCX_IB_PKEY UCX_RNDV_THRESH
PMIX_MCA_psec PMIX_MCA_gds OMPI_MCA_btl MAX_TOKENS EOS_TOKEN SSH_PUBLIC_KEY CUDA_DEVICE_MAX_CONNECTIONS
tokenizer max_tokens end_of_token eos_token pad_token additional_special_tokens num_sentinel_tokens
label_key sort_key apply_query_key_layer_scaling key_value_channels num_query_groups share_token_embeddings
author passes key keys tokens
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret_name(name)


def test_nothing_else_is_a_secret() -> None:
    assert [name for name in HARMLESS.split() if is_secret_name(name)] == []


def test_no_key_of_the_shipped_tree_is_a_secret() -> None:
    texts = [path.read_text(encoding="utf-8") for path in CONF_DIR.rglob("*.yaml")]
    names = {name for text in texts for name in re.findall(r"([A-Za-z_]\w*):", text)}
    reference = Path(__file__).with_name("reference").glob("*.csv")
    names |= set(
        re.findall(r"[A-Za-z_]\w*", " ".join(path.read_text(encoding="utf-8") for path in reference))
    )
    assert len(names) > 300
    # The first in a comment on `env_files`, the other with null as its only value.
    assert {name for name in names if is_secret_name(name)} == {"HF_TOKEN", "wandb_api_bcp_secret_key"}


@pytest.mark.parametrize("size", list_options("training")[::7])
def test_nothing_of_shipped_size_is_taken_for_secret(size: str) -> None:
    job = plan_launch(compose([f"training={size}"]).config, number=1, tag="x").job
    text = json.dumps(job.config, indent=1)
    assert redacted(text) == text


OVERRIDES = [
    f"env_vars.OPENAI_KEY={VALUE}",
    f"+env_vars.hf_token={VALUE}",
    f"cluster.env_vars.DB_PWD='{VALUE}'",
    f"stage_cluster.training.env_vars.GITHUB_PAT={VALUE}",
    f"+training.exp_manager.wandb_logger_kwargs.api_key={VALUE}",
    f"+training.model.hub={{a: [{{hf_token: {VALUE}}}]}}",
    f"+training.trainer.access_token={VALUE}",
    f"cluster.sbatch.export='ALL,HF_TOKEN={VALUE}'",
    f"stage_cluster.training.sbatch.export='HF_TOKEN={VALUE}'",
    f"cluster.srun_args=['--export=ALL,HF_TOKEN={VALUE}']",
    f"cluster.srun_args=['--export=HF_TOKEN={VALUE}']",
    f"env_files.HF_TOKEN={VALUE}",
    f"env_files={{MY_LOGIN: {VALUE}}}",
    f"wandb_api_key_file={VALUE}",
    f"wandb_api_bcp_secret_key={VALUE}",
    f"+env_vars={{HF_TOKEN: {VALUE}, 1BAD: x}}",
    f"env_vars.HF_TOKEN=[{VALUE}]",
    f"env_vars.HF_TOKEN='{VALUE}",
    f"training.exp_manager.api_key={VALUE}",
    f"+training.exp_manager.api_key={VALUE},b",
    f"env_vars.HF_TOKEN={'x' * 150}{VALUE}",
]


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("verb", ["launch", "render", "check", "show"])
def test_a_secret_is_neither_written_nor_printed(
    verb: str,
    override: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([verb, "training=gpt3/126m", *(["--dry-run"] if verb == "launch" else []), override])
    printed = "".join(capsys.readouterr())
    assert VALUE not in printed
    assert "xxxxx" not in printed
    assert code == 2 or verb == "show"
    assert list(tmp_path.iterdir()) == []
    assert main([override]) == 2
    assert VALUE not in "".join(capsys.readouterr())


def test_show_masks_what_the_users_tree_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    ours = (
        f"defaults: [bcm, _self_]\nenv_vars: {{HF_TOKEN: {VALUE}}}\nsrun_args: ['--export=A_KEY={VALUE}']\n"
    )
    (tmp_path / "cluster" / "ours.yaml").write_text(ours)
    for form in ([], ["--json"]):
        assert main(["show", "--config-dir", str(tmp_path), "cluster=ours", *form]) == 0
        printed = capsys.readouterr().out
        assert VALUE not in printed
        assert "HF_TOKEN" in printed
        assert "ours.yaml:2" in printed


def test_the_refusal_names_its_key_and_a_way_out() -> None:
    overrides = [f"+training.exp_manager.wandb_logger_kwargs.api_key={VALUE}"]
    composition = compose(overrides)
    with pytest.raises(UserError) as raised:
        plan_launch(composition.config, number=1, tag="x")
    composition.annotate(raised.value)
    message = str(raised.value)
    assert message.startswith("training.exp_manager.wandb_logger_kwargs.api_key: ")
    assert "from the command line: +training.exp_manager.wandb_logger_kwargs.api_key=***" in message
    assert "env_files={WANDB_API_KEY: " in message


@pytest.mark.parametrize(
    "override",
    [
        "+training.exp_manager.wandb_logger_kwargs.api_key=null",
        "+training.model.tokenizer.eos_token=x",
        "+training.model.use_auth_token=true",
        "cluster.sbatch.export='ALL,HF_TOKEN'",
        "cluster.srun_args=['--export=ALL,NCCL_DEBUG=INFO']",
        "env_files.HF_TOKEN=/home/me/token",
        "cluster.srun_args=['--export=ALL,NCCL_SOCKET_IFNAME=eth0,UCX_NET_DEVICES=mlx5_0:1']",
        "cluster.comment='run 3 of the tokenizer, max_tokens=4096, eos_token: 2'",
        "env_vars.PIP_INDEX_URL=https://mirror.example:8443/simple",
        "env_vars.GIT_REMOTE=https://git@host/x.git",
        "env_vars.GIT_REMOTE=ssh://git@host:22/x.git",
        "env_vars.HF_HOME=/scratch/hf_home_of_all_the_users",
        "env_vars.AWS_WEB_IDENTITY_TOKEN_FILE=/run/token",
        "env_vars.COMMIT=0123456789abcdef0123456789abcdef01234567",
        "env_vars.PASSED='$HF_TOKEN'",
        "container=docker://$oauthtoken@nvcr.io#nvidia/nemo:24.07",
        "cluster.srun_args=[--token,'$HF_TOKEN',--password,'$(cat /run/word)']",
        "cluster.task_prefix=[env,HF_TOKEN=,--kill-on-bad-exit=1,--key,a]",
        "cluster.srun_args=[--max-tokens,'4096',--eos-token,x,--user,me]",
        "cluster.srun_args=[--mount,a:b@c/d,--pwd,/x,--label,--tag,'step:10@epoch/2',--tokens,'100']",
        "env_vars.NAMES='[HF_TOKEN, WANDB_API_KEY]'",
        "training.model.data.data_prefix=['1.0',/data/api_key,'2.0',/data/token]",
        "container=nvcr.io/a/b:1@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    ],
)
def test_text_without_a_secret_stays_usable(override: str) -> None:
    assert redacted(override) == override
    plan_launch(compose([override]).config, number=1, tag="x")


def test_commands_in_a_list_are_not_one_command() -> None:
    check_secrets(compose(["cluster.srun_args=['docker login reg','mkdir -p /opt/x']"]).config)
    with pytest.raises(UserError, match="a registry's password"):
        check_secrets(compose(["cluster.srun_args=['docker login -p xyz reg','mkdir /opt/x']"]).config)


NAMES = st.text("ab=:,@/?&;'\"${}[]<>-_. \\\nHF_TOKEN", max_size=60)


@given(NAMES, NAMES)
def test_any_text_keeps_its_form_and_loses_the_secret(before: str, after: str) -> None:
    """A token is found by its form in any text, and masking again changes nothing."""
    token = "ghp_" + "0a1b2c3d4e5f6g7h8i9j"
    for mask in (without_secrets, printable, redacted):
        masked = mask(f"{before} {token} {after}")
        assert token not in masked
        assert mask(before).count("\n") <= before.count("\n")


@given(st.text(max_size=200))
def test_a_text_without_secrets_is_left_alone(text: str) -> None:
    plain = re.sub(r"[:=@?&-]", " ", text)
    assert printable(plain) == plain


LONG = "abcdefgh12345678" * 3
# The parts of texts with secrets: each form, names, and the words that give them a value.
PARTS = [
    *("-----BEGIN A PRIVATE KEY-----", f"hf_{LONG}A", f"ghp_{LONG}", f"github_pat_{LONG}", f"glsoat-{LONG}"),
    *(f"xoxb-{LONG}", f"xapp-{LONG}", f"nvapi-{LONG}", f"pypi-{LONG}", f"npm_{LONG}", f"dckr_pat_{LONG}"),
    *(f"AIza{LONG}", f"ya29.{LONG}", f"sk-{LONG}", f"rk_live_{LONG}", f"ASIA{LONG.upper()}", "wandb login "),
    *(f"eyJ{LONG}.eyJ{LONG}", "WandB", "0123456789" * 4, "https://", "://me:", "@host/", "discordapp.com"),
    *("/api/webhooks/", "hooks.slack.com/workflows/", "webhook.office.com/", "api.telegram.org/bot", "&sas="),
    *("X-Goog-Credential=", "X-Amz-Security-Token=", "sig=", "?my.passwd=", ";key=", "proxy-authorization: "),
    *("Bearer ", "docker login", " -p ", "sshpass -p ", "curl", " -u me:", "login me ", "password ", "ſİg="),
    *("HF_TOKEN", "api_key", "MY_CREDS", "GIT_PAT", "DB_PWD", "A_JWT", "passphrase", "=", ": ", "'", '"'),
    *("setenv ", "--", "oc.env:", "${", "}", ",", " ", "\n", LONG, "value"),
]


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_quick_search_misses_no_secret(text: str) -> None:
    """A text without a form's cue has none of that form."""
    secrets = secrecy.secrets_in(text)
    every = set(secret_forms._CUES)
    secrecy._secrets_in.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secret_forms, "_find_cues", lambda text: every)
        assert secrecy.secrets_in(text) == secrets


def test_login_without_a_key_is_searched_in_linear_time() -> None:
    """Each option could be read in two ways, so n options in 2^n."""
    text = "wandb login " + "--host " * 200
    assert without_secrets(text) == text
    assert VALUE not in without_secrets(f"wandb login --host x --relogin --host=y {VALUE}")


def test_values_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", 'it\'s a "S3cret" value/é')
    for written in (
        'it\'s a "S3cret" value/é',
        json.dumps('it\'s a "S3cret" value/é'),
        shlex.quote('it\'s a "S3cret" value/é'),
        repr('it\'s a "S3cret" value/é'),
        quote('it\'s a "S3cret" value/é'),
    ):
        assert "S3cret" not in printable(f"x{written}y"), written


@pytest.mark.parametrize("value", ["tiny", "required", "12345678", "/tmp", "", "True"])
def test_values_found_by_chance_are_not_searched_for(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", value)
    text = "gpt3/tiny is required in /tmp/x, 1234567890, True"
    assert printable(text) == text


def test_public_values_are_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane_doe1")
    monkeypatch.setenv("DB_PASS", "jane_doe1")
    assert printable("/home/jane_doe1/results") == "/home/jane_doe1/results"


@pytest.mark.parametrize("cluster", list_options("cluster"))
def test_no_shipped_file_is_refused(cluster: str) -> None:
    for path in CONF_DIR.rglob("*.yaml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert without_secrets(line) == line, path
    check_secrets(compose([f"cluster={cluster}"]).config)


def test_overrides_are_redacted() -> None:
    assert redacted("+env_vars={HF_TOKEN: 'a,b', X: y}") == "+env_vars={HF_TOKEN: ***, X: y}"
    assert redacted('cluster.sbatch.export="ALL,A_KEY=b,X=1"') == 'cluster.sbatch.export="ALL,A_KEY=***,X=1"'
    assert redacted("env_vars.A_KEY=a=b,c") == "env_vars.A_KEY=***"
    assert redacted("training=gpt3/126m") == "training=gpt3/126m"
    proxies = "{http_proxy: http://me:b@proxy:3128, HF_TOKEN: http://me:b@x}"
    masked = "{http_proxy: http://me:***@proxy:3128, HF_TOKEN: ***}"
    assert redacted(f"+env_vars={proxies}") == f"+env_vars={masked}"
    assert redacted("container=docker://host:5000/a@sha256:b") == "container=docker://host:5000/a@sha256:b"
