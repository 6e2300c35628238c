"""A site's own checks, from the directory `checks` of its tree, and mistakes in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.checks.findings import Finding
from launcher.checks.site_rules import read_rules, site_findings
from launcher.cli.app import main
from launcher.drafting import Request, draft, drafts
from launcher.errors import UserError

Capsys = pytest.CaptureFixture[str]

BASE = ("training=gpt3/126m", "cluster=bcm", "container=/shared/images/nemo.sqsh")


def tree_of(directory: Path, *rules: str, name: str = "ours") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "checks").mkdir(exist_ok=True)
    (directory / f"checks/{name}.yaml").write_text("".join(f"{rule}\n" for rule in rules))
    return directory


def found(tree: Path, *overrides: str, stage: str | None = None) -> list[Finding]:
    request = Request([*BASE, *overrides], ["slipway"], config_dirs=(tree,), stage=stage)
    return site_findings(draft(request), [])[1]


# A rule, overrides that it lets through, overrides that it does not, and what it says of these.
CASES = [
    (
        "{key: cluster.account, required: true}",
        ["cluster.account=ml"],
        [],
        "cluster.account=null: this site requires a value",
    ),
    (
        "{key: cluster.account, matches: (ml|bio)-.*}",
        ["cluster.account=bio-1"],
        ["cluster.account=mlx"],
        "cluster.account='mlx': this site allows only values that match (ml|bio)-.*",
    ),
    (
        "{key: cluster.partition, allowed: [gpu, debug]}",
        ["cluster.partition='debug,gpu'"],
        ["cluster.partition='gpu,cpu'"],
        "cluster.partition='gpu,cpu': this site allows gpu, debug",
    ),
    (
        r"{key: job.image, matches: '(/shared/images/.*|nvcr\.io#.*)'}",
        ["container=nvcr.io#nvidia/nemo:25.07"],
        ["container=docker.io#me/nemo:1"],
        "job.image='docker.io#me/nemo:1': this site allows only values that match",
    ),
    (
        "{key: job.nodes, maximum: 2, where: {cluster.partition: [debug, short]}}",
        ["cluster.partition=debug", "training.trainer.num_nodes=2"],
        ["cluster.partition=debug"],
        "job.nodes=8: this site allows at most 2 where cluster.partition='debug'",
    ),
    (
        "{key: job.nodes, maximum: 2, where: {cluster.partition: debug}}",
        ["cluster.partition=gpu"],
        ["cluster.partition='gpu,debug'"],
        "job.nodes=8",
    ),
    (
        "{key: job.nodes, maximum: 4}",
        ["training.trainer.num_nodes=4"],
        ["training.model.global_batch_size=256", "resilience.nodes={min: 1, max: 8}"],
        "job.nodes=8",
    ),
    (
        "{key: job.time_limit, maximum: '8:00:00'}",
        ["training.run.time_limit='04:00:00'"],
        ["training.run.time_limit='0'"],
        "job.time_limit='0': this site allows at most 8:00:00",
    ),
    (
        "{key: container_mounts, matches: '/(shared|home)/.*'}",
        ["container_mounts=[/shared/a,/home/me]"],
        ["container_mounts=[/shared/a,/etc]"],
        "container_mounts=['/shared/a', '/etc']: this site allows",
    ),
    (
        "{key: training.model.optim.lr, maximum: 0.01, message: 'mind the rate'}",
        [],
        ["training.model.optim.lr=1"],
        "training.model.optim.lr=1: mind the rate",
    ),
    ("{key: cluster.exclusive, allowed: [true]}", [], ["cluster.exclusive=False"], "cluster.exclusive=false"),
    (
        "{key: cluster.account, required: true}",
        ["cluster=local", "container=null"],
        [],
        "cluster.account=null",
    ),
    (
        "{key: cluster.account, required: true, where: {cluster.scheduler: local}}",
        [],
        ["cluster=local", "container=null"],
        "cluster.account=null",
    ),
    (
        "{key: cluster.scheduler, allowed: [slurm]}",
        [],
        ["cluster=local", "container=null"],
        "cluster.scheduler='local'",
    ),
    ("{key: cluster.qos, allowed: [long]}", [], ["cluster.qos=short"], "cluster.qos='short'"),
]


@pytest.mark.parametrize(("rule", "passing", "failing", "message"), CASES)
def test_a_rule_finds_what_breaks_it(
    rule: str, passing: list[str], failing: list[str], message: str, tmp_path: Path
) -> None:
    tree = tree_of(tmp_path, "# a comment", f"mine: {rule}")
    assert found(tree, *passing) == []
    (finding,) = found(tree, *failing)
    assert finding.message.startswith(message)
    assert (finding.id, finding.severity) == ("site.mine", "error")
    assert finding.fix is not None
    assert finding.fix.endswith(f"the site's rule: {tmp_path}/checks/ours.yaml:2")


@pytest.mark.parametrize("key", ["job.image", "container"])
@pytest.mark.parametrize(
    ("image", "is_allowed"),
    [
        ("images/nemo.sqsh", True),
        ("images//./nemo.sqsh", True),
        ("/images/nemo.sqsh", True),
        ("mine/../images/nemo.sqsh", True),
        ("mine/theirs.sqsh", True),  # a link to the site's image
        ("released/nemo.sqsh", True),  # a link of the site's, to another disk
        ("mine/own.sqsh", False),
        ("images/../mine/own.sqsh", False),
        ("images/elsewhere/../own.sqsh", False),  # where `elsewhere` leads to a directory of the user's
    ],
)
def test_an_image_is_the_same_by_any_of_its_paths(
    key: str, image: str, is_allowed: bool, tmp_path: Path
) -> None:
    for name in ("images", "mine/deep", "disk"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "released").symlink_to("disk")
    (tmp_path / "images/elsewhere").symlink_to("../mine/deep")
    (tmp_path / "mine/theirs.sqsh").symlink_to("../images/nemo.sqsh")
    tree = tree_of(tmp_path, f"mine: {{key: {key}, matches: '{tmp_path}/(images|released)/.*'}}")
    findings = found(tree, f"container={tmp_path}/{image}")
    assert (findings == []) is is_allowed


def test_each_stage_is_checked_with_its_own_cluster(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "mine: {key: cluster.partition, allowed: [cpu], where: {job.stage: evaluation}}")
    words = [*BASE, "stages=[training,evaluation]", "engine=megatron", "cluster.partition=gpu"]
    for more, count in (["evaluation.source=run"], 1), (["stage_cluster={evaluation: {partition: cpu}}"], 0):
        launches = drafts(Request([*words, *more], ["slipway"], config_dirs=(tree,)))
        assert [len(site_findings(launch, [])[1]) for launch in launches] == [0, count]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mine: {key: cluster.acount, required: true}",
            "mine: cluster.acount: no such key to check",
        ),
        ("mine: {key: job.node, maximum: 1}", "did you mean 'job.nodes'?"),
        ("mine: {key: account, required: true}", "mine: account: no such key to check"),
        (
            "mine: {key: job.nodes, maxium: 1}",
            "mine.maxium: there is no such key\n  from @:1\n  did you mean",
        ),
        ("mine: {key: job.nodes}", "mine: no condition"),
        ("mine: {required: true}", "mine.key: this key is needed"),
        ("mine: {key: job.nodes, maximum: many}", "mine.maximum='many': neither a number nor a time limit"),
        ("mine: {key: job.image, matches: '('}", "mine.matches='(': not a regular expression"),
        ("mine: {key: job.nodes, maximum: 1, severity: fatal}", "mine.severity='fatal': expected"),
        ("mine: {key: job.nodes, maximum: 1, where: {job.stag: x}}", "mine: job.stag: no such key"),
        ("my rule: {key: job.nodes, maximum: 1}", "'my rule': not the name of a check"),
        ("mine: yes", "mine=true: expected keys below it"),
        ("a: [", "not valid YAML"),
        ("a: &a [*a]", "not valid YAML: an alias of the node around it"),
    ],
)
def test_a_rule_with_a_mistake_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    tree = tree_of(tmp_path, text, "also: {key: job.nodes, maximum: 1}")
    with pytest.raises(UserError) as caught:
        read_rules((tree,))
    assert message.replace("@", f"{tmp_path}/checks/ours.yaml") in str(caught.value)
    assert f"{tmp_path}/checks/ours.yaml" in str(caught.value)


def test_all_mistakes_are_named_and_the_first_of_two_trees_decides(tmp_path: Path) -> None:
    site = tree_of(
        tmp_path / "site", "nodes: {key: job.nodes, maximum: 1}", "qos: {key: cluster.qos, required: yes}"
    )
    user = tree_of(tmp_path / "user", "nodes: {key: job.nodes, maximum: 64}", name="mine")
    assert [rule.place for rule in read_rules((user, site))] == [
        f"{user}/checks/mine.yaml:1",
        f"{site}/checks/ours.yaml:2",
    ]
    tree_of(site, "a: {}", "b: {}", name="wrong")
    with pytest.raises(UserError, match=r"(?s)a.key: this key is needed.*b.key: this key"):
        read_rules((site,))


def test_two_rules_of_one_tree_with_one_name_are_refused(tmp_path: Path, capsys: Capsys) -> None:
    tree = tree_of(tmp_path, "nodes: {key: job.nodes, maximum: 1}", name="a")
    tree_of(tree, "nodes: {key: job.nodes, maximum: 2}", name="b")
    places = f"  from {tree}/checks/b.yaml:1\n  the first: {tree}/checks/a.yaml:1"
    message = f"nodes: two rules of one name\n{places}"
    with pytest.raises(UserError, match=re.escape(message)):
        read_rules((tree,))
    assert main(["doctor", "cluster=local", f"--config-dir={tree}"]) == 2
    assert "nodes: two rules of one name" in capsys.readouterr().err


def test_check_and_launch_report_the_rules_of_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = tree_of(
        tmp_path / "site",
        "account: {key: cluster.account, required: true, remedy: 'cluster.account=PROJECT'}",
        "nodes: {key: job.nodes, maximum: 4, severity: warning}",
    )
    monkeypatch.setenv("SLIPWAY_CONFIG_PATH", str(tree))
    assert main(["launch", "--dry-run", *BASE]) == 2
    err = capsys.readouterr().err
    assert "cluster.account=null: this site requires a value [site.account]\n  from " in err
    assert "\n  cluster.account=PROJECT\n  the site's rule: site/checks/ours.yaml:1\n" in err
    assert "slipway: warning: job.nodes=8: this site allows at most 4 [site.nodes]" in err
    assert main(["launch", "--dry-run", *BASE, "--no-check=site.account", "--no-check=site.nodes"]) == 0
    assert "site." not in capsys.readouterr().err
    sweep = ["sweep", "--dry-run", *BASE, "training.trainer.num_nodes=2,8", "cluster.account=ml"]
    assert main(sweep) == 0
    assert "site.nodes" in capsys.readouterr().err
    assert main(["check", "--estimate", "--json", *BASE]) == 2
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"site.account", "site.nodes"} <= {finding["id"] for finding in findings}
    main(["check", "--estimate", *BASE, "cluster.account=ml", "training.trainer.num_nodes=2"])
    with_rules = capsys.readouterr().out.splitlines()[-1]
    monkeypatch.delenv("SLIPWAY_CONFIG_PATH")
    main(["check", "--estimate", *BASE, "cluster.account=ml", "training.trainer.num_nodes=2"])
    without = capsys.readouterr().out.splitlines()[-1]
    passed, total = (int(word) for word in without.split()[:3:2])
    assert with_rules.startswith(f"{passed + 2} of {total + 2} checks passed")
