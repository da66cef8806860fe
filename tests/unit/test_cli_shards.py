"""`relax-hpc shards` and `relax-hpc report` on a small run."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from click.testing import Result
from small_run import LAST_TRAINED, build
from typer.testing import CliRunner

import relax_hpc
from relax_hpc.cli import app as every_command
from relax_hpc.cli.errors import friendly
from relax_hpc.cli.report import report
from relax_hpc.cli.shards import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import making
from relax_hpc.records import Group, Prompt
from relax_hpc.spool.ledger import CHECKSUM, checksum
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard_writer import encode

COMMAND = [sys.executable, "-m", "relax_hpc"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("COLUMNS", "160")
    return build(tmp_path / "small")


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def lines_with(output: str, word: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if word in line]


def test_ls_shows_each_request_with_its_status(run: RunDir) -> None:
    result = call("ls", run.root)
    assert result.exit_code == 0
    [trained] = lines_with(result.stdout, "r000000-000 ")
    assert trained[:7] == ["r000000-000", "trained", "0", "0", "0", "4", "0.375"]
    [late] = lines_with(result.stdout, "r000001-001 ")
    assert late[1] == "dropped" and late[-1] == "stale"
    assert "1 of 2 groups failed" in result.stdout and "1 of 2 groups filtered" in result.stdout
    [quarantine] = lines_with(result.stdout, "quarantine/r000000-000.rollout-1")
    assert quarantine[1] == "unused"


@pytest.mark.parametrize(
    "damaged", ["outcome.json", "heartbeats/trainer-0.json", "recipe.toml", "ledger/0000/00000000.json"]
)
def test_a_damaged_file_of_a_run_is_named_by_every_command(run: RunDir, damaged: str) -> None:
    with run.recipe.open("a") as recipe:
        recipe.write('[model]\nname = "tiny"\n[[source]]\ntask = "chain_sum"\n')
    (run.root / damaged).parent.mkdir(parents=True, exist_ok=True)
    (run.root / damaged).write_text('{"half')
    for command in (
        ["status"],
        ["report", "-o", f"{run.root}/r.html"],
        ["trace", "-o", f"{run.root}/t.json"],
        ["shards", "ls"],
    ):
        name, *rest = command
        words = [name, *rest[:1], str(run.root)] if name == "shards" else [name, str(run.root), *rest]
        result = CliRunner().invoke(every_command, words)
        assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
        if result.exit_code:
            assert str(run.root / damaged) in result.stderr, (words, result.stderr)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "Permission denied; this user may not"), (errno.EROFS, "Read-only file system; it lies on"),
        (errno.ENOSPC, "No space left on device; the disk is full"), (errno.EDQUOT, "quota is used up"), (errno.EIO, "Input/output error"),
    ],
)  # fmt: skip
def test_what_the_file_system_refuses_is_said_with_the_file(
    number: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), friendly():
        raise OSError(number, os.strerror(number), "/theirs/run.json")
    said = capsys.readouterr().err
    assert said.startswith("error: '/theirs/run.json': ") and words in said


def test_what_a_user_wrote_is_not_taken_for_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = build(tmp_path / "[" / "bold]" / "x[")
    with run.recipe.open("a") as recipe:
        recipe.write('[model]\nname = "tiny"\n[rollout]\nstop = ["[/end]"]\n[[source]]\ntask = "chain_sum"\n')
    for command, wanted in (("recipe", '"[/end]"'), ("status", "[/bold]/x[")):
        target = run.recipe if command == "recipe" else run.root
        result = CliRunner().invoke(every_command, [command, str(target)])
        assert result.exit_code == 0 and wanted in result.stdout.replace("\n", ""), (
            command,
            result.output,
            result.exception,
        )
    (run.model / "tokenizer.json").unlink()
    shown = call("show", run.root, "r000000-000").stdout.replace("\n", "")
    assert "[/bold]/x[" in shown


def test_status_says_which_rows_are_left_out(run: RunDir) -> None:
    with run.recipe.open("a") as recipe:
        recipe.write('[model]\nname = "tiny"\n[[source]]\ntask = "chain_sum"\n')
    run.rows.write_text('{"source.0": {"rows": 1200, "too_long": 7, "no_answer": 0, "cut": 0}}')
    shown = CliRunner().invoke(every_command, ["status", str(run.root)]).stdout
    assert "source.0: of 1,200 rows 7 left out as too long" in shown


def test_ls_goes_by_request_whatever_the_files_times_are(run: RunDir) -> None:
    os.utime(run.shard("r000000-000"))  # as a copy, or another machine's clock, would
    rows = [
        line.split()[0]
        for line in call("ls", run.root, "--all").stdout.splitlines()
        if re.match(r" *(quarantine/)?[re]\d{6}", line)
    ]
    assert rows[0] == "e000000-000" and rows[-1] == "r000002-000"
    batches = [int(row.removeprefix("quarantine/")[1:7]) for row in rows]
    assert batches == sorted(batches) and len(rows) == 8


def test_watch_waits_for_a_run_that_is_being_made(tmp_path: Path) -> None:
    final = tmp_path / "later"
    draft = tmp_path / ".later.0123.new"
    build(draft)
    with (draft / "recipe.toml").open("a") as recipe:
        recipe.write('[model]\nname = "tiny"\n[[source]]\ntask = "chain_sum"\n')
    making.say(RunDir(draft), "reading the prompts")
    once = subprocess.run([*COMMAND, "status", str(final)], capture_output=True, text=True, check=True)
    assert "later is being made: reading the prompts; relax-hpc watch" in once.stdout
    with subprocess.Popen([*COMMAND, "watch", str(final)], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "is being made: reading the prompts" in watching.stdout.readline()
        making.say(RunDir(draft), "doing another thing")
        assert "is being made: doing another thing" in watching.stdout.readline()
        draft.rename(final)
        assert "done" in watching.stdout.read()
    assert watching.returncode == 0


def test_a_draft_of_a_command_that_died_is_no_run_that_is_being_made(tmp_path: Path) -> None:
    draft = RunDir(tmp_path / ".later.0123.new")
    draft.root.mkdir()
    died = f"import relax_hpc.launch.making as m, relax_hpc.files.run_dir as r\nm.say(r.RunDir({str(draft.root)!r}), 'this')"
    subprocess.run([sys.executable, "-c", died], check=True)
    assert draft.doing.exists() and making.being_made(tmp_path / "later") is None


def test_a_table_of_the_recipe_is_not_taken_for_markup() -> None:
    assert "its [[tracking]] tables" in " ".join(CliRunner().invoke(every_command, ["track", "--help"]).stdout.split())


def test_ls_shows_the_newest_and_counts_the_rest(run: RunDir) -> None:
    assert "… and 6 older ones: --all" in call("ls", run.root, "-n", 2).stdout
    assert "older" not in call("ls", run.root, "-n", 2, "--all").stdout


@pytest.mark.parametrize(
    ("status", "requests"),
    [
        ("dropped", ["r000001-001"]),
        ("failed", ["r000001-000"]),
        ("filtered", ["r000000-001"]),
        ("evaluation", ["e000000-000"]),
    ],
)
def test_ls_by_status(run: RunDir, status: str, requests: list[str]) -> None:
    rows = [line.split()[0] for line in call("ls", run.root, "--status", status).stdout.splitlines() if "00000" in line]
    assert rows == requests
    assert call("ls", run.root, "--step", 7).stdout.strip() == "no shards"


def test_show_prints_texts_rewards_and_reasons(run: RunDir) -> None:
    output = call("show", run.root, "r000001-000").stdout
    for wanted in (
        "4+1=",
        "<b>6",
        "reward -0.25 · raw 0",
        "versions 0–1",
        "age 1",
        "length",
        "group 1 failed",
        "took longer than 30 s",
    ):
        assert wanted in output, wanted
    only = call("show", run.root, LAST_TRAINED, "--group", 1).stdout
    assert "7+1=" in only and "6+1=" not in only and "format 0.5" in only
    one = call("show", run.root, f"{LAST_TRAINED}/3").stdout
    assert "script>alert<b>9" in one and "script>alert8" not in one
    assert "another attempt was published first" in call("show", run.root, "r000000-000.rollout-1").stdout


def test_show_without_a_tokenizer_prints_token_ids(run: RunDir) -> None:
    (run.model / "tokenizer.json").unlink()
    output = call("show", run.root, "r000001-000").stdout
    assert "token ids are shown" in output and "[7, 0]" in output  # "5" and the end token


def test_stats_count_everything(run: RunDir) -> None:
    output = call("stats", run.root).stdout
    rows = {
        row[0]: row[1:3]
        for row in map(str.split, output.splitlines())
        if row and row[0] in ("trained", "failed", "dropped", "unused")
    }
    assert rows == {"trained": ["6", "12"], "failed": ["1", "0"], "dropped": ["2", "4"], "unused": ["4", "8"]}
    assert "groups filtered: zero_std" in output and "evals" in output and "quarantine" in output


def flip(shard: Path) -> None:
    """A bit of the first token."""
    with h5py.File(shard, "r", locking=False) as file:
        where = file["tokens"].id.get_offset()
    image = bytearray(shard.read_bytes())
    image[where] ^= 1
    shard.write_bytes(image)


def test_validate_finds_the_broken_one(run: RunDir) -> None:
    assert call("validate", run.root).exit_code == 0
    victim = run.shard("r000000-001")
    flip(victim)
    result = call("validate", run.root)
    assert result.exit_code == 1
    assert f"'{victim}': column 'tokens': rows 0 to" in result.stdout and "7 of 8 shards are whole" in result.stdout


def test_validate_refuses_anothers_shard_under_a_requests_name(run: RunDir, tmp_path: Path) -> None:
    victim = run.shard("r000000-001")
    victim.write_bytes(run.shard("r000000-000").read_bytes())
    result = call("validate", run.root)
    assert result.exit_code == 1 and "7 of 8 shards are whole" in result.stdout
    assert f"'{victim}': it is of request 'r000000-000', its name says 'r000000-001'" in result.stdout
    groups = [Group(Prompt(0, 0, "", np.arange(3, dtype=np.int32)), [])]
    victim.write_bytes(b"".join(encode("r000000-001", groups, {"version": 0, "run": "another"})))
    run.identity.write_text(json.dumps({"name": "small", "id": "this"}))
    result = call("validate", run.root)
    assert f"'{victim}': it is of run 'another', its name says 'this'" in result.stdout


def test_damaged_files_are_left_out_of_an_export_when_it_is_said_and_named(run: RunDir, tmp_path: Path) -> None:
    """One shard torn, one with a flipped token, one entry of the ledger with another request: the samples of the others are all there."""
    output = tmp_path / "a.parquet"
    torn, flipped, entry = run.shard("r000000-001"), run.shard("r000002-000"), run.ledger_entry(1)
    torn.write_bytes(torn.read_bytes()[:900])
    assert "say --skip-damaged" in call("export", run.root, output).output and not output.exists()
    flip(flipped)
    content = json.loads(entry.read_text())
    content[CHECKSUM] = checksum(content)
    entry.write_text(json.dumps(content).replace("r000001-000", "r000003-000"))
    result = call("export", run.root, output, "--tokens", "--skip-damaged")
    assert result.exit_code == 0 and "3 damaged files left out" in result.stdout
    assert all(str(path) in result.stdout for path in (torn, flipped, entry))
    table = pq.read_table(output).to_pandas()
    kept = {
        ("r000000-000", "trained"),
        ("r000001-000", "unused"),
        ("r000001-001", "unused"),
        ("e000000-000", "evaluation"),
    }
    assert kept <= {*zip(table["request"], table["status"], strict=True)}
    assert not {"r000000-001", "r000002-000"} & {*table["request"]}
    with pytest.raises(RunError, match="00000001.json"):
        relax_hpc.open_run(run.root).trajectories()
    with pytest.warns(UserWarning, match="3 damaged files were left out.*r000000-001.*r000002-000"):
        assert len(relax_hpc.open_run(run.root).trajectories(skip_damaged=True)) == len(table)


def test_export_writes_parquet(run: RunDir, tmp_path: Path) -> None:
    output = tmp_path / "a.parquet"
    assert call("export", run.root, output, "--no-text", "--status", "trained").exit_code == 0
    table = pq.read_table(output)
    assert table.num_rows == 12 and "completion" not in table.column_names and "tokens" not in table.column_names
    assert call("export", run.root, output, "--tokens").exit_code == 0
    assert {"completion", "tokens", "logprobs"} <= set(pq.read_table(output).column_names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "/nowhere"], "not a run directory"),
        (["show", "RUN", "r000099-000"], "no shard of request 'r000099-000'"),
        (["show", "RUN", "r000000-000", "--group", "5"], "no group 5: they count from 0 to 1"),
        (["ls", "RUN", "--status", "lost"], "--status 'lost': use one of ['trained'"),
        (["export", "RUN", "/nowhere/a.parquet"], "no folder '/nowhere'"),
    ],
)
def test_mistakes_end_as_one_line(run: RunDir, arguments: list[str], said: str) -> None:
    result = call(*[run.root if a == "RUN" else a for a in arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and said in result.stderr and len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_friendly_lets_bugs_through() -> None:
    with pytest.raises(ZeroDivisionError), friendly():
        raise ZeroDivisionError
    with pytest.raises(typer.Exit), friendly():
        raise RunError("said")
    with pytest.raises(ModuleNotFoundError), friendly():
        raise ModuleNotFoundError("no", name="something_else")
    with pytest.raises(typer.Exit), friendly():
        raise ModuleNotFoundError("no", name="pandas")


def test_friendly_knows_the_recipes_error() -> None:
    from relax_hpc.recipe import RecipeError

    with pytest.raises(typer.Exit), friendly():
        raise RecipeError("said")


def test_report_writes_one_page(run: RunDir, tmp_path: Path) -> None:
    command = typer.Typer()
    command.command()(report)
    assert CliRunner().invoke(command, [str(run.root)]).stdout.strip() == str(run.root / "report.html")
    assert "<svg" in (run.root / "report.html").read_text()
    assert CliRunner().invoke(command, [str(run.root), "-o", str(tmp_path / "x.html")]).exit_code == 0
    assert (tmp_path / "x.html").is_file()


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; import relax_hpc.cli.shards, relax_hpc.cli.report; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pandas", "pyarrow", "matplotlib", "h5py", "jinja2", "tokenizers", "pydantic"} & set(
        loaded
    )


def test_show_says_where_a_request_without_a_shard_is(run: RunDir) -> None:
    RequestQueue(run).put([Request("r000003-000", ((0, 0),), 2, 0, 0)])
    assert "no shard of request 'r000003-000'" in (said := call("show", run.root, "r000003-000").stderr)
    assert "it is open; there are" in said
