"""The documentation: it builds strictly and alone, its code runs, and what it names is there."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys

import pages
import pytest
import shell
import travel
import vocabulary
import yaml
from pages import DOCS, PAGES, PROJECT, Block

from vllm_omni_session_state.base import settings
from vllm_omni_session_state.base.settings import ENV_FLAG, FLAG
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.omni.worker import rpc

BLOCKS = [block for page in PAGES for block in pages.blocks(page)]
ENABLING, MODELS, BUDGETS, ENDS = (DOCS / f"{name}.md" for name in ("enabling", "models", "budgets", "ends"))
KNOWN = {"bash", "python", "yaml", "text"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_builds_strictly_with_a_page_for_each_file(site):
    built = {page.stem for page in site.glob("*.html")} - {"404"}
    assert built == {page.stem for page in DOCS.glob("*.md")}


def test_the_built_pages_fetch_nothing_from_anywhere(site):
    fetched = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|@import|url\(['\"]?(?:https?:)?//"
    )
    linked = re.compile(r"<link\b[^>]*\bhref=\"?((?:https?:)?//[^\s\">]+)")
    for page in site.glob("*.html"):
        assert not fetched.search(page.read_text()), page.name
        assert not linked.findall(page.read_text()), page.name
    for sheet in site.rglob("*.css"):
        assert not fetched.search(sheet.read_text()), sheet.name


def test_every_block_is_of_a_kind_that_a_test_runs_or_checks():
    assert len(BLOCKS) > 20
    assert [str(block) for block in BLOCKS if block.language not in KNOWN] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_text_block_is_the_output_of_the_python_block_before_it(page):
    before = ""
    for block in pages.blocks(page):
        assert block.language != "text" or before == "python", f"{block}: whose output is this?"
        before = block.language


def python_pages():
    """Pages with Python, and whether it needs vLLM-Omni."""
    for page in PAGES:
        code = "".join(block.text for block in pages.blocks(page) if block.language == "python")
        if code:
            marks = [pytest.mark.host] if "omni_tiny" in code else []
            yield pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", python_pages())
def test_the_python_of_a_page_runs_and_says_what_the_page_says(page, tmp_path, monkeypatch):
    """A page's blocks share their names, in order; what they write, they write into a folder of their own."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    said = ""
    for block in pages.blocks(page):
        if block.language == "python":
            said = run_python(block, names)
        elif block.language == "text":
            assert said == block.text, f"{block}: the code says\n{said}"


def run_python(block: Block, names: dict[str, object]) -> str:
    output = io.StringIO()
    names["print"] = functools.partial(print, file=output)  # not what vLLM-Omni logs meanwhile
    exec(compile("\n" * block.line + block.text, str(block.page), "exec"), names)
    return output.getvalue()


def test_the_tables_of_models_show_the_figures_that_its_code_measured():
    text = "".join(block.text for block in pages.blocks(MODELS) if block.language == "text")
    measured = {line.split()[0]: line.split()[-1] for line in text.splitlines()}
    rows = [*pages.table(MODELS, "field"), *pages.table(MODELS, "value")]
    shown = {row[0].strip("`"): row[3] for row in rows}
    assert len(shown) == 15
    assert shown == {name: measured[name] for name in shown}
    kinds = {line.split()[0]: line.split()[1] for line in text.splitlines() if len(line.split()) == 3}
    for row in pages.table(MODELS, "field"):
        kind = kinds[row[0].strip("`")]
        wanted = f"`{kind}`" if kind in ("LatentBuffer", "PagedKV") else "attribute"
        assert row[1].split(",")[0] == wanted, row
    (outside,) = pages.table(MODELS, "what", "where")
    assert outside[3] == measured["outside"]


@pytest.mark.host
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_every_command_is_known_and_right(block):
    commands = shell.lines(block.text)
    assert commands
    for command in commands:
        shell.check(command)


def test_an_unknown_command_a_wrong_target_and_a_wrong_setting_are_caught():
    for line in (
        "rm -rf /",
        "make coffee",
        f"export {ENV_FLAG}=maybe",
        "pip install vllm",
        "vllm serve x",
        "python -m benchmarks.tiers --fast",
        "pip install '.[color]'",
        "vllm-omni-session-state doctor --fast",
    ):
        with pytest.raises(AssertionError):
            shell.check(line)


@pytest.fixture(scope="module")
def dreamzero(tmp_path_factory):
    """A DreamZero's folder without weights: all that vLLM-Omni's configuration reads."""
    from omni_tiny.checkpoint.dreamzero import _write_configs, _write_tokenizer

    folder = tmp_path_factory.mktemp("dreamzero")
    _write_configs(folder)
    _write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def cosmos3(tmp_path_factory):
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3

    return write_cosmos3(tmp_path_factory.mktemp("cosmos3"))


@pytest.mark.host
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_the_flag_in_a_yaml_arrives_in_the_workers_configuration(block, dreamzero, cosmos3, tmp_path):
    file = tmp_path / "deploy.yaml"
    model = dreamzero if yaml.safe_load(block.text)["pipeline"] == "dreamzero" else cosmos3
    file.write_text(block.text)
    arrived = travel.worker_config(model, deploy_config=str(file))
    assert getattr(arrived, FLAG) is True
    resolved, complaints = settings.resolve(None, {}, options=settings.options_of(arrived))
    assert complaints == ()
    assert (resolved == settings.Settings()) is ("session_state:" not in block.text)
    without = "".join(line for line in block.text.splitlines(keepends=True) if FLAG not in line)
    assert without != block.text
    file.write_text(without)
    assert getattr(travel.worker_config(model, deploy_config=str(file)), FLAG) is False


ARRIVES, DROPPED, EFFECTLESS = "arrives", "**dropped without a word**", "**without effect**"
ON = f"{FLAG}: true"
STAGE_0 = {"0": {FLAG: True}}


def travelled(way: str, model, folder, *, deploy: bool) -> str:
    """Send the flag on its way; returns what the page calls what became of it."""
    top, stage, written = "", "", {}
    if way.startswith(f"`{ON}`"):
        top, stage = (ON, "") if "at the top" in way else ("", ON)
        if "`model_config`" in way:
            stage = f"model_config: {{{FLAG}: true}}"
    elif way.startswith("`vllm serve …"):
        arguments = way.strip("`").removeprefix("vllm serve … ").replace("'", "").split(" ", 2)
        try:
            written = travel.serve_arguments([str(model), *arguments])
        except travel.CommandRefusedError as refused:
            return (
                "refused: no such option"
                if "unrecognized arguments: --enable" in str(refused)
                else str(refused)
            )
        del written["model"]
    elif found := re.fullmatch(r"`Omni\(model, (\w+)=(.+)\)`", way):
        value = found[2].replace("True", "true")
        written = {found[1]: json.loads(value)}
    else:
        raise AssertionError(f"no test knows the way {way}")
    if deploy:
        written["deploy_config"] = str(travel.write_yaml(folder, top=top, stage=stage))
    try:
        arrived = getattr(travel.worker_config(model, **written), FLAG)
    except ValueError as error:
        return "refused: unknown field" if "Unknown diffusion config field" in str(error) else str(error)
    return ARRIVES if arrived else EFFECTLESS if "`model_config`" in way else DROPPED


@pytest.mark.host
@pytest.mark.parametrize("row", pages.table(ENABLING, "way"), ids=lambda row: row[0])
def test_the_flag_travels_as_the_page_says(row, dreamzero, cosmos3, tmp_path, monkeypatch):
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    way, with_deploy, without = row
    if "environment" in way:  # the worker process inherits it: test_worker_process.py
        assert (with_deploy, without) == (ARRIVES, ARRIVES)
        return
    if way == f"`OmniDiffusionConfig({FLAG}=True)`":
        assert getattr(OmniDiffusionConfig(model=str(cosmos3), **{FLAG: True}), FLAG) is True
        assert (with_deploy, without) == (ARRIVES, ARRIVES)
        return
    assert travelled(way, dreamzero, tmp_path, deploy=True) == with_deploy
    if without:
        assert travelled(way, cosmos3, tmp_path, deploy=False) == without
    else:
        assert "YAML" in way or "`model_config`" in way


@pytest.mark.host
def test_dreamzero_has_a_deploy_config_also_where_none_is_named(dreamzero):
    config = travel.worker_config(dreamzero, stage_overrides=STAGE_0)
    assert getattr(config, FLAG) is True
    assert config.model_config["default_robot_embodiment"] == "roboarena"


@pytest.mark.host
def test_the_host_refuses_nonsense_in_a_yaml_in_the_words_of_the_page(dreamzero, tmp_path):
    file = travel.write_yaml(tmp_path, stage=f"{FLAG}: maybe")
    with pytest.raises(ValueError, match="Input should be a valid boolean"):
        travel.worker_config(dreamzero, deploy_config=str(file))
    assert "`Input should be a valid boolean`" in ENABLING.read_text()


def test_every_setting_stands_in_a_table_with_its_kind_default_and_meaning():
    rows = [*pages.table(BUDGETS, "setting"), *pages.table(ENDS, "setting")]
    shown = {row[0].strip("`"): row[1:] for row in rows}
    assert shown.keys() == set(settings.OPTION_KEYS)
    values = {}
    for setting in settings.SETTINGS:
        if setting.option:
            kind, default, meaning = shown[setting.key]
            word = (
                "none" if setting.default is None else "off" if setting.default is False else setting.default
            )
            word = f"{word:g}" if isinstance(word, float) else str(word)
            assert re.split("[:`]", default.strip("`"))[0] == word, setting.key
            assert re.sub(r"`|\[([^]]*)\]\([^)]*\)", r"\1", meaning).startswith(setting.meaning), setting.key
            assert values.setdefault(setting.kind, kind) == kind, "one kind is described in the same words"
    assert len(set(values.values())) == len(values), "and no other kind in these"


def test_every_call_and_every_reason_in_the_tables_is_one():
    assert {row[0].strip("`") for row in pages.table(ENDS, "method")} == set(rpc.METHODS)
    reasons = {row[0].strip("`").removeprefix("lost:") for row in pages.table(BUDGETS, "figure of `stats()`")}
    assert reasons == {reason.value for reason in Reason}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    base = page.resolve().parent if page.name == "README.md" else DOCS
    for target in pages.links(page):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = base / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in pages.anchors(file), f"{page.name}: {target}"


@pytest.mark.host
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_in_backticks_exists(page):
    missing = {name: vocabulary.unknown(name) for name in pages.names(page) if vocabulary.unknown(name)}
    assert missing == {}


@pytest.mark.host
def test_a_name_that_does_not_exist_is_caught():
    for name in (
        "LatentBufer",
        "manager.pyx.py",
        "evict_all()",
        "vllm_omni_session_state.manager.manager.Manager",
        "tiers/tape.py",
        "tires/",
    ):
        assert vocabulary.unknown(name), name
