"""Sites with a say in submissions: filters of a real Slurm, and programs before its sbatch and squeue."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.forked_slipway import run_forked
from tests.sandbox.fixtures import booted

# What the filter does is in the job's comment.
FILTER = """
function slurm_job_submit(job, partitions, uid)
  local asked = job.comment or ""
  if asked:find("route") then job.partition = "low"; slurm.log_user("routed to partition low") end
  if asked:find("cut") then job.time_limit = 2; slurm.log_user("your limit is 2 minutes now") end
  if asked:find("charge") then slurm.log_user("you will be charged for 64 CPUs") end
  if asked:find("outage") then
    slurm.log_user("no communication with our licences: timed out, mind the rate limit")
    return slurm.ERROR
  end
  if asked:find("named") and not (job.name or ""):find("^%w+%-%w+:") then
    slurm.log_user("names are project-part:*")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""

# An sbatch that wants a file, and submits a copy of it; a squeue as of 23.02, which tells no arguments.
COPYING = """#!/bin/bash
for word; do [[ $word == *.sh ]] && has_file=1; done
[[ $has_file ]] || { echo "sbatch: error: this wrapper needs a job script file" >&2; exit 1; }
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
copy=$(mktemp -p "${0%/*}")
{ head -1 "$1"; echo "#SBATCH --comment=audited"; tail -n +2 "$1"; } >"$copy"
exec /usr/bin/sbatch "${options[@]}" "$copy" "${@:2}"
"""
WITHOUT_ARGUMENTS = """#!/bin/bash
/usr/bin/squeue "$@" | sed -E 's/ ([0-9]+ )?[0-9]{8}-[0-9]{6}-[0-9a-f]{6}(\\x1f|$)/\\2/g'
"""


@dataclass
class Site:
    """A user's view of a site: `slipway` with one command as the stage."""

    directory: Path
    environment: dict[str, str]

    def slipway(self, verb: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_forked([verb, *words], cwd=self.directory, env=self.environment, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def stage(self, verb: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        stage = ["stages=[command]", "cluster=sandbox", "command.argv=[/bin/sleep,60]"]
        return self.slipway(verb, *stage, *more, code=code)

    def status(self, run: str) -> dict[str, Any]:
        (content,) = json.loads(self.slipway("status", "--json", run).stdout)
        return dict(content)


@pytest.fixture(scope="module")
def filtering_sandbox() -> Iterator[Sandbox]:
    with booted(nodes=2) as sandbox:
        environment, conf = sandbox.environment(), Path(sandbox.environment()["SLURM_CONF"])
        shown = subprocess.run(
            ["scontrol", "show", "config"], env={**os.environ, **environment}, capture_output=True, text=True
        ).stdout
        directory = next(line.split("=")[1].strip() for line in shown.splitlines() if "PluginDir" in line)
        if not Path(directory, "job_submit_lua.so").exists():
            pytest.skip("this Slurm has no filters in Lua")
        conf.with_name("job_submit.lua").write_text(FILTER)
        with conf.open("a") as lines:
            lines.write("JobSubmitPlugins=lua\n")
        subprocess.run(["scontrol", "reconfigure"], env={**os.environ, **environment}, check=True)
        yield sandbox


@pytest.fixture
def site(filtering_sandbox: Sandbox, tmp_path: Path) -> Iterator[Site]:
    environment = {**os.environ, **filtering_sandbox.environment()}
    for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        environment.pop(name, None)
    conf = {"SLIPWAY_SANDBOX_DIR": str(filtering_sandbox.directory)}
    yield Site(tmp_path, environment | conf)
    subprocess.run(["scancel", "--user=root"], env=environment, check=True)


def test_what_a_filter_says_and_changes_is_told_and_kept(site: Site) -> None:
    options = ["command.run.name=routed", "cluster.partition=gpu", "cluster.comment='route cut charge'"]
    done = site.stage("launch", *options)
    said = "routed to partition low; your limit is 2 minutes now; you will be charged for 64 CPUs"
    assert done.stderr.count(said) == 1
    granted = "partition low (gpu asked for), time limit 2:00 (01:00:00 asked for)"
    assert f"  granted    {granted}\n" in done.stdout
    log = site.directory / "results" / "routed" / "launcher.log"
    assert log.read_text().splitlines()[0] == said
    assert log.read_text().splitlines()[1].startswith("Submitted batch job ")
    status = site.status("routed")
    assert status["granted"]["partition"] == {"asked": "gpu", "granted": "low"}
    assert status["granted_limit"] == "2:00"
    assert granted in site.slipway("status", "routed").stdout


def test_a_check_tells_what_a_filter_says(site: Site) -> None:
    output = site.stage("check", "cluster.comment=charge").stdout
    assert "warning: sbatch says of this job: you will be charged for 64 CPUs [scheduler]" in output
    assert "sbatch says" not in site.stage("check").stdout


@pytest.mark.parametrize("verb", ["check", "launch"])
def test_a_refusal_that_reads_like_an_outage_is_a_refusal(site: Site, verb: str) -> None:
    done = site.stage(verb, "cluster.comment=outage", code=2)
    assert "Slurm would refuse this job: no communication with our licences" in done.stdout + done.stderr
    assert not (site.directory / "results").exists()


def test_a_site_may_ask_for_names_that_are_none_of_files(site: Site) -> None:
    named = ["cluster.comment=named", "command.run.name=run"]
    assert "names are project-part:*" in site.stage("launch", *named, code=2).stderr
    done = site.stage("launch", *named, "cluster.job_name_prefix=lab-llm:")
    assert "/log-lab-llm-run_" in done.stdout
    assert (site.directory / "results" / "run" / "launches" / "1" / "lab-llm-run_submission.sh").exists()
    job = site.status("run")["job_id"]
    shown = subprocess.run(
        ["squeue", "--noheader", "--format=%j", f"--jobs={job}"],
        env=site.environment,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "lab-llm:run\n"


def test_a_job_of_a_copied_script_is_the_launchs_own(site: Site) -> None:
    programs = site.directory / "bin"
    programs.mkdir()
    for name, text in (("sbatch", COPYING), ("squeue", WITHOUT_ARGUMENTS)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    site.environment["PATH"] = f"{programs}:{site.environment['PATH']}"
    site.stage("launch", "command.run.name=copied")
    until = time.monotonic() + 20
    while (status := site.status("copied"))["state"] == "PENDING" and time.monotonic() < until:
        time.sleep(0.2)
    assert (status["state"], status["reason"]) == ("RUNNING", None)
    assert "cancelled job" in site.slipway("cancel", "copied").stdout
    assert site.status("copied")["state"] in ("COMPLETING", "CANCELLED")


def test_a_shell_that_names_another_cluster_is_not_answered_with_this_one(site: Site) -> None:
    site.environment["SLURM_CLUSTERS"] = "other"
    done = site.stage("launch", "cluster.slurm_conf=null", code=2)
    assert "SLURM_CLUSTERS=other of your shell: jobs go to cluster sandbox" in done.stderr
    site.environment["SLURM_CLUSTERS"] = "sandbox"
    site.stage("check", "cluster.slurm_conf=null")
