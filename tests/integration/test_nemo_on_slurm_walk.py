"""AWS' "Nemo Megatron on Slurm", from its first command to its last, as its reader types them.

The document is awsome-distributed-training's 2.nemo-launcher of 23.07, section by section. Its launcher is
Slipway here, its test case `benchmarks/` and `conf/`. What cannot be run in a test is named as skipped, with
the reason and what takes its place.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY

# Each step goes on from those before it: none is left out.
pytestmark = [pytest.mark.slurm, pytest.mark.trainer]

# Overrides that make 126m small enough for a test machine; everything else is as the wrapper has it.
SHRUNK = " ".join(
    [
        "engine=megatron",  # the document's is NeMo, in a container that the sandbox has not
        "training.trainer.accelerator=cpu",
        "training.trainer.devices=2",
        "training.trainer.precision=32",
        "training.model.megatron_amp_O2=False",
        "training.model.num_layers=2",
        "training.model.hidden_size=32",
        "training.model.num_attention_heads=4",
        "training.model.encoder_seq_length=32",
        "training.model.data.seq_length=32",
        "training.model.max_position_embeddings=32",
        "training.model.micro_batch_size=2",
    ]
)

# The document's table of `conf.template/cluster/bcm.yaml`, with the partition of the sandbox.
BCM = """\
partition: gpu
account: null
exclusive: True
gpus_per_task: null
gpus_per_node: 8
mem: 0
job_name_prefix: "nemo-megatron-"
gres: "gpu:8"
srun_args: "--no-container-mount-home"
stderr_to_stdout: True
"""


class Reader:
    """A reader's shell: exports and the directory stay from one command to the next.

    Attributes
    ----------
    skipped
        The commands of the document that were not typed, and why.
    """

    def __init__(self, home: Path) -> None:
        self._cwd = home
        self._environment = {
            name: os.environ[name]
            for name in ("PATH", "HOME", "SLIPWAY_CACHE_DIR", "TMPDIR")
            if name in os.environ
        }
        self.skipped: dict[str, str] = {}

    def types(self, commands: str, check: int = 0) -> str:
        """Run commands, and return what they print."""
        script = f'set -e\n{commands}\n{{ pwd; env -0; }} >"$SHELL_STATE"'
        state = self._cwd / ".shell-state"
        environment = {**self._environment, "SHELL_STATE": str(state)}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == check, f"{commands}\n{done.stdout}\n{done.stderr}"
        if check == 0:
            cwd, _, variables = state.read_text().partition("\n")
            state.unlink()
            self._cwd = Path(cwd)
            self._environment = dict(line.split("=", 1) for line in variables.split("\0") if line)
        return done.stdout + done.stderr

    def skips(self, command: str, because: str) -> None:
        """Leave a command of the document out, for a reason."""
        self.skipped[command] = because

    def __getitem__(self, name: str) -> str:
        return self._environment[name]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Reader:
    """Return a reader who has copied the test case, and knows nothing else."""
    root = tmp_path_factory.mktemp("cluster")
    case = root / "home/ec2-user/2.nemo-launcher"
    (root / "apps").mkdir()
    (root / "fsx").mkdir()
    case.mkdir(parents=True)
    reader = Reader(root)
    reader.types(f"cp {repository}/benchmarks/*.sh {case}; cp -r {repository}/conf {case}/conf.template")
    return reader


def header(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE))


def test_1_prerequisites(reader: Reader) -> None:
    root = Path(reader.types("pwd").strip())
    reader.types(f"""
export NEMO_VERSION=23.07
export REPO=aws-nemo-megatron
export TAG=$NEMO_VERSION-py3
export TARGET_PATH={root}/fsx/nemo-launcher-$NEMO_VERSION   # must be a shared filesystem
export TEST_CASE_PATH={root}/home/ec2-user/2.nemo-launcher  # where you copy the test case
export ENROOT_IMAGE={root}/apps/${{REPO}}_${{TAG}}.sqsh

cd $TEST_CASE_PATH
""")
    assert reader.types("ls").split() == [
        "1.bmk-pretrain.sh",
        "bmk-pretrain-gpt3-126m2.sh",
        "bmk-pretrain-gpt3-5b2.sh",
        "bmk-pretrain-t5-220m2.sh",
        "bmk-pretrain-t5-3b2.sh",
        "conf.template",
    ]


def test_2_build_the_image(reader: Reader) -> None:
    reader.skips(
        "docker login nvcr.io", "there is no registry here; ~/.config/enroot/.credentials holds the login"
    )
    reader.skips(
        "docker build --progress plain -t ${REPO}:${TAG} -f 0.NemoMegatron-aws-optimized.Dockerfile .",
        "its base is 20 GB of a registry; `slipway image build nemo-aws` builds the same layers",
    )
    dockerfile = reader.types(f"{SLIPWAY} image render nemo-aws")
    assert all(
        part in dockerfile for part in ("FROM nvcr.io/nvidia/nemo", "aws-efa-installer", "aws-ofi-nccl")
    )
    reader.skips(
        "[[ -e $ENROOT_IMAGE ]] && rm $ENROOT_IMAGE ; /usr/bin/time enroot import -o $ENROOT_IMAGE "
        "dockerd://${REPO}:${TAG}",
        "there is no Docker here; `slipway image import` writes the same file, whole or not at all",
    )
    script = reader.types(
        f"{SLIPWAY} image import nvcr.io#nvidia/nemo:24.07 --output $ENROOT_IMAGE "
        "--on-cluster --dry-run cluster=p4d"
    )
    assert reader["ENROOT_IMAGE"] in script
    assert "#SBATCH --nodes=1\n" in script


def test_3_set_up_the_environment(reader: Reader, repository: Path) -> None:
    reader.types("mkdir -p $TARGET_PATH")
    reader.skips(
        "enroot start --mount $TARGET_PATH:/workspace/mount_dir --env NVIDIA_VISIBLE_DEVICES=void "
        "$ENROOT_IMAGE cp -a /opt/NeMo-Megatron-Launcher/launcher_scripts ... /workspace/mount_dir/",
        "the launcher is Slipway, which pip installs; launcher_scripts/ holds the reader's configurations",
    )
    reader.types("cd $TARGET_PATH; mkdir -p launcher_scripts/conf")
    reader.skips(
        "sudo amazon-linux-extras install -y python3.8; pip3.8 install -r <(curl -fsSL https://...)",
        "nothing is downloaded in a test; the environment that the test runs in is the installed one",
    )
    reader.types(f"""
cd $TARGET_PATH
{sys.executable} -m venv --without-pip .venv
ln -s {SLIPWAY} .venv/bin/slipway
source .venv/bin/activate
""")
    assert reader.types("slipway --version").startswith("slipway ")


def test_3_1_review_the_cluster_and_copy_the_configurations(reader: Reader) -> None:
    case, target = Path(reader["TEST_CASE_PATH"]), reader["TARGET_PATH"]
    (case / "conf.template/cluster/bcm.yaml").write_text(BCM)
    # As in the document's template, the root of the tree has variables of the shell.
    config = case / "conf.template/config.yaml"
    text = config.read_text().replace("launcher_scripts_path: .", "launcher_scripts_path: ${TARGET_PATH}")
    config.write_text(text.replace("container: ${cluster.container}", "container: ${ENROOT_IMAGE}"))
    reader.types("""
cp -Rv ${TEST_CASE_PATH}/conf.template/cluster ${TARGET_PATH}/launcher_scripts/conf/cluster
envsubst < ${TEST_CASE_PATH}/conf.template/config.yaml > ${TARGET_PATH}/launcher_scripts/conf/config.yaml
""")
    keys = ("data_dir", "base_results_dir", "container", "engine", "cluster.gres", "cluster.srun_args")
    values = yaml.safe_load(reader.types(f"slipway show --config-dir launcher_scripts/conf {' '.join(keys)}"))
    assert values == {
        "data_dir": f"{target}/data",
        "base_results_dir": f"{target}/results",
        "container": reader["ENROOT_IMAGE"],
        "engine": "nemo",
        "cluster": {"gres": "gpu:8", "srun_args": ["--no-container-mount-home"]},
    }


def test_3_2_placeholders_left_in_the_template_are_named(reader: Reader) -> None:
    """The reader forgot the partition, or to export a variable; or took the template of the NeMo launcher."""
    conf = Path(reader["TARGET_PATH"]) / "launcher_scripts/conf"
    bcm, config = conf / "cluster/bcm.yaml", conf / "config.yaml"
    reviewed, root = bcm.read_text(), config.read_text()
    launch = "slipway launch --dry-run --config-dir launcher_scripts/conf"
    try:
        bcm.write_text(reviewed.replace("partition: gpu", "partition: <Your partition>"))
        output = reader.types(launch, check=2)
        assert "cluster.partition='<Your partition>': a placeholder, not a value\n" in output
        assert "  from launcher_scripts/conf/cluster/bcm.yaml:1\n" in output
        bcm.write_text(reviewed)

        substitute = (
            "envsubst < $TEST_CASE_PATH/conf.template/config.yaml > launcher_scripts/conf/config.yaml"
        )
        reader.types(f"( unset TARGET_PATH; {substitute} )")
        output = reader.types(launch, check=2)
        assert (
            "launcher_scripts_path=null: a directory is needed\n  from launcher_scripts/conf/config.yaml:15"
            in output
        )

        config.write_text(root.replace("  - workspace: default", "  - export: gpt3/export_gpt3"))
        output = reader.types(launch, check=2)
        assert (
            "export=gpt3/export_gpt3: there is no such group\n  from launcher_scripts/conf/config.yaml:8\n"
            in output
        )
    finally:
        bcm.write_text(reviewed)
        config.write_text(root)


def test_4_input_data(reader: Reader, repository: Path) -> None:
    reader.types("mkdir -p $TARGET_PATH/data/bpe")
    reader.skips(
        "curl -L https://huggingface.co/gpt2/raw/main/vocab.json > $TARGET_PATH/data/bpe/vocab.json",
        "nothing is downloaded in a test; `slipway data tokenize` makes a small vocabulary",
    )
    reader.skips(
        "curl -L https://huggingface.co/gpt2/raw/main/merges.txt > $TARGET_PATH/data/bpe/merges.txt",
        "as for vocab.json",
    )
    source = f"{repository}/docs --pattern 'c*.md' --vocab-size 512"
    reader.types(f"slipway data tokenize {source} base_results_dir=$TARGET_PATH/results")
    reader.types("mkdir -p $TARGET_PATH/data")
    assert reader.types("ls $TARGET_PATH/data/bpe").split() == ["merges.txt", "vocab.json"]


def test_5_the_script_of_126m(reader: Reader) -> None:
    """The script for sbatch has the image and the table's values."""
    script = reader.types("""
source ${TARGET_PATH}/.venv/bin/activate
cd $TARGET_PATH
$TEST_CASE_PATH/bmk-pretrain-gpt3-126m2.sh --dry-run
""")
    log = f"{reader['TARGET_PATH']}/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_%j.out"
    assert {
        "--job-name=nemo-megatron-gpt3_126m",
        "--partition=gpu",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--time=00:30:00",
        f"--output={log}",
    } <= header(script)
    assert f"    --container-image={reader['ENROOT_IMAGE']} \\\n" in script
    assert "    --no-container-mount-home \\\n" in script
    assert "    /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py \\\n" in script
    assert not (Path(reader["TARGET_PATH"]) / "results/gpt3_126m").exists()


def test_5_pretraining_126m_on_two_nodes(reader: Reader, sandbox: Sandbox, warm_python: Path) -> None:
    # The sandbox's nodes have no image and no GPU, and the machine two cores: the ranks are forked.
    reader.types(f"export SLURM_CONF={sandbox.environment()['SLURM_CONF']}; export ENROOT_IMAGE=null")
    forked = f"{SHRUNK} cluster.python={warm_python}"
    output = reader.types(f"""
cd $TARGET_PATH
MAX_STEPS=3 GLOBAL_BATCH_SIZE=16 $TEST_CASE_PATH/bmk-pretrain-gpt3-126m2.sh {forked} --follow
""")
    assert "COMPLETED" in output
    run = Path(reader["TARGET_PATH"]) / "results/gpt3_126m"
    job = re.findall(r"\d+", (run / "launcher.log").read_text())[-1]
    # The document's tree.
    for name in (
        "gpt3_126m_hydra.yaml",
        "launcher_cmd.log",
        "launcher.log",
        f"log-nemo-megatron-gpt3_126m_{job}.out",
        "nemo-megatron-gpt3_126m_submission.sh",
    ):
        assert (run / name).is_file(), name
    assert yaml.safe_load((run / "gpt3_126m_hydra.yaml").read_text())["trainer"]["num_nodes"] == 2
    assert "training=gpt3/126m" in (run / "launcher_cmd.log").read_text()
    assert "#SBATCH --nodes=2\n" in (run / "nemo-megatron-gpt3_126m_submission.sh").read_text()
    for pattern in (
        "cmd-args.log",
        "events.out.tfevents.*",
        "git-info.log",
        "hparams.yaml",
        "nemo_log_globalrank-*.txt",
    ):
        assert list((run / "results").glob(pattern)), pattern
    for name in ("lightning_logs.txt", "nemo_error_log.txt"):
        reader.skips(
            f"results/{name}", "NeMo writes it, with engine=nemo; the sandbox trains with engine=megatron"
        )
    metrics = (run / "results/metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("step", 0) for line in metrics) == 3


def test_5_another_launch_overwrites_nothing(reader: Reader) -> None:
    """The document's launcher would overwrite all files but the log."""
    output = reader.types(
        f"MAX_STEPS=4 GLOBAL_BATCH_SIZE=16 $TEST_CASE_PATH/bmk-pretrain-gpt3-126m2.sh {SHRUNK} --dry-run"
    )
    assert f"{reader['TARGET_PATH']}/results/gpt3_126m/launches/2/log-" in output
    assert "COMPLETED" in reader.types("slipway status gpt3_126m")


def test_5_a_directory_for_each_job(reader: Reader) -> None:
    """The reader uncomments `#export UNIQUE_OUTPUT_DIR=1`."""
    reader.types(
        "sed -i 's/^#export UNIQUE_OUTPUT_DIR=1/export UNIQUE_OUTPUT_DIR=1/' $TEST_CASE_PATH/bmk-*-126m2.sh"
    )
    launch = f"GLOBAL_BATCH_SIZE=16 $TEST_CASE_PATH/bmk-pretrain-gpt3-126m2.sh {SHRUNK} --dry-run"
    outputs = {re.findall(r"--output=(\S+)/launches/1/", reader.types(launch))[0] for _ in range(2)}
    assert len(outputs) == 2
    pattern = re.escape(f"{reader['TARGET_PATH']}/results-") + r"\d{8}-\d{6}-\d{3}/gpt3_126m"
    assert all(re.fullmatch(pattern, output) for output in outputs)


def test_6_the_5b_wrapper(reader: Reader) -> None:
    image = "ENROOT_IMAGE=/apps/nemo.sqsh"
    script = reader.types(f"cd $TARGET_PATH; {image} $TEST_CASE_PATH/bmk-pretrain-gpt3-5b2.sh --dry-run")
    assert {"--job-name=nemo-megatron-gpt3_5b", "--nodes=2", "--time=04:00:00"} <= header(script)


def test_6_a_wrapper_and_a_size_of_ones_own(reader: Reader) -> None:
    """The reader writes a `bmk-pretrain-gpt3-<SIZE><INSTANCE>.sh` and a YAML file for the size."""
    reader.types("""
sed 's/MODEL_SIZE=126m/MODEL_SIZE=ours/; s/NUM_NODES:-2/NUM_NODES:-4/; s/^export UNIQUE/#&/' \\
    $TEST_CASE_PATH/bmk-pretrain-gpt3-126m2.sh > $TEST_CASE_PATH/bmk-pretrain-gpt3-ours4.sh
chmod +x $TEST_CASE_PATH/bmk-pretrain-gpt3-ours4.sh
mkdir -p launcher_scripts/conf/training/gpt3
printf 'defaults: [/training/gpt3/126m@_here_, _self_]\nrun: {name: gpt3_ours}\nmodel: {num_layers: 6}\n' \\
    > launcher_scripts/conf/training/gpt3/ours.yaml
""")
    launch = "ENROOT_IMAGE=/apps/nemo.sqsh $TEST_CASE_PATH/bmk-pretrain-gpt3-ours4.sh"
    script = reader.types(f"{launch} --dry-run")
    assert {"--job-name=nemo-megatron-gpt3_ours", "--nodes=4"} <= header(script)
    source = reader.types(
        "slipway show --config-dir launcher_scripts/conf training=gpt3/ours training.model.num_layers"
    )
    assert "num_layers: 6" in source and "from launcher_scripts/conf/training/gpt3/ours.yaml:3" in source
    # A missing size and a misspelled key are both reported, with the nearest valid ones.
    output = reader.types(
        "MODEL_SIZE=400m ENROOT_IMAGE=null $TEST_CASE_PATH/1.bmk-pretrain.sh training.model.num_layer=4",
        check=2,
    )
    assert "training=gpt3/400m: there is no such choice" in output
    assert "did you mean 'gpt3/400m_improved'?" in output
    assert "training.model.num_layer=4: there is no such key" in output


def test_every_command_that_was_skipped_has_its_reason(reader: Reader) -> None:
    assert all(reader.skipped.values())
    assert [command.split()[0] for command in reader.skipped] == [
        "docker",
        "docker",
        "[[",
        "enroot",
        "sudo",
        "curl",
        "curl",
        *(["results/lightning_logs.txt", "results/nemo_error_log.txt"] if len(reader.skipped) > 7 else []),
    ]
