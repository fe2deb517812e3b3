"""Files are written where their path leads: links are followed, and nothing but a regular file is replaced.

Earlier tests wrote only to new names in an empty folder, and once to a missing folder: no name that existed was anything
but a regular file.
"""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.analysis.report import save_report
from autotp.analysis.trace import save_trace
from autotp.cli.sweep_output import write_file
from benchmarks import tables
from costmodel.text.files import check_writable, move_atomically, regular_target, write_atomically

ROOT = Path(__file__).parents[2]
MODEL = "from torch import nn, zeros\n\ndef build():\n    return nn.Linear(4, 4), (zeros(4, 4),)\n"


@pytest.fixture
def device(tmp_path):
    """Makes device files like /dev/null (3) and /dev/full (7), as a failing test must not harm the machine's own."""

    def make(minor, kind=stat.S_IFCHR, major=1):
        path = tmp_path / f"device-{major}-{minor}"
        try:
            os.mknod(path, kind | 0o666, os.makedev(major, minor))
            if kind == stat.S_IFCHR:
                os.close(os.open(path, os.O_WRONLY))
        except PermissionError:
            pytest.skip("devices can be made and opened by root alone")
        return path

    return make


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_device_stays_one(device, tmp_path):
    null, full = device(3), device(7)
    write_atomically(null, "gone")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(full, "too much")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(full, "more than a buffer" * 100_000)
    (tmp_path / "link").symlink_to(full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "link", "too much")
    assert stat.S_ISCHR(os.lstat(null).st_mode) and stat.S_ISCHR(os.lstat(full).st_mode)
    assert names(tmp_path) == sorted([null.name, full.name, "link"]), "nothing else is left"


def writers(tmp_path):
    plan = autotp.plan(nn.Linear(4, 4), autotp.Topology.flat(2), (torch.zeros(4, 4),), strategy="data")
    return {
        "plan": plan.save,
        "trace": lambda path: save_trace(path, []),
        "report": lambda path: save_report(path, {"title": "t"}),
        "sweep": lambda path: write_file(path, "a,b\n"),
    }


@pytest.mark.parametrize("name", ["plan", "trace", "report", "sweep"])
def test_all_that_write_follow_links(name, tmp_path, device):
    write = writers(tmp_path)[name]
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "kept", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(Path("elsewhere") / "kept")
    write(link)
    assert link.is_symlink() and target.read_text() not in ("", "old")
    null = device(3)
    write(null)
    assert stat.S_ISCHR(os.lstat(null).st_mode)


def test_tables_are_written_where_a_link_leads(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    tables.write("images/new.md", "one\n")
    assert (tmp_path / "docs" / "images" / "new.md").read_text() == "one\n"
    (tmp_path / "kept.md").write_text("old")
    (tmp_path / "docs" / "linked.md").symlink_to(tmp_path / "kept.md")
    tables.write("linked.md", "two\n")
    assert (tmp_path / "docs" / "linked.md").is_symlink() and (tmp_path / "kept.md").read_text() == "two\n"


@pytest.mark.parametrize("command", ["plan --save", "plan --html", "sweep --csv", "reprice --save", "trace --output"])
def test_the_command_line_says_what_a_device_says(run_cli, command, tmp_path, capsys, device):
    (tmp_path / "model.py").write_text(MODEL)
    name, option = command.split()
    model, saved = ["--model", f"{tmp_path}/model.py:build"], tmp_path / "plan.json"
    made = ["plan", *model, "--topology", "cpu", "--devices", "2"]
    given = {
        "plan": made,
        "sweep": ["sweep", *model, "--topology", "cpu", "--devices", "2"],
        "reprice": ["reprice", str(saved), *model, "--topology", "cpu"],
        "trace": ["trace", *model, "--plan", str(saved)],
    }
    if name in ("reprice", "trace"):
        assert run_cli(*made, "--save", str(saved)) == 0
    full = device(7)
    assert run_cli(*given[name], option, str(full)) == 2
    said = capsys.readouterr().err
    assert f"error: {'' if name == 'sweep' or option == '--html' else option + ' '}{full}: " in said
    assert "No space left on device" in said
    assert stat.S_ISCHR(os.lstat(full).st_mode)


def test_a_dangling_link_makes_the_file_that_it_names(tmp_path):
    link, target = tmp_path / "link", tmp_path / "made"
    link.symlink_to("second")
    (tmp_path / "second").symlink_to(target)
    write_atomically(link, "new")
    assert target.read_text() == "new" and link.is_symlink() and (tmp_path / "second").is_symlink()
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere" / "made")
    for refused in (tmp_path / "lost", tmp_path / "nowhere" / "made"):
        with pytest.raises(FileNotFoundError):
            write_atomically(refused, "new")
        with pytest.raises(FileNotFoundError, match="there is no directory"):
            check_writable(refused)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "loop", "new")
    assert (tmp_path / "loop").is_symlink()


def test_a_file_keeps_its_permissions(tmp_path):
    kept, made = tmp_path / "kept", tmp_path / "made"
    kept.write_text("old")
    kept.chmod(0o600)
    write_atomically(kept, "new")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and kept.read_text() == "new"
    before = os.umask(0o027)
    try:
        write_atomically(made, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("old")
    os.chown(kept, 1234, 4321)
    kept.chmod(0o640)
    write_atomically(kept, "new")
    found = kept.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 4321, 0o640)


def test_a_pipe_is_written_to_where_it_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for use in (check_writable, lambda path: write_atomically(path, "lost")):
        with pytest.raises(OSError, match="a pipe without a reader"):
            use(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.lstat(pipe).st_mode)


def test_what_cannot_be_written_to_is_refused_and_stays(tmp_path, device, monkeypatch):
    folder, block = tmp_path / "folder", device(0, stat.S_IFBLK, 7)
    folder.mkdir()
    monkeypatch.chdir(tmp_path)  # the length of a socket's path is limited
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for path, said in ((folder, "a directory"), (block, "a block device"), (tmp_path / "socket", "a socket")):
            before = os.lstat(path)
            for use in (check_writable, lambda path: write_atomically(path, "lost")):
                with pytest.raises(OSError, match=said):
                    use(path)
            assert os.path.samestat(before, os.lstat(path))
    assert names(tmp_path) == sorted(["folder", block.name, "socket"])


@pytest.mark.parametrize("path", ["stdout", "/proc/self/fd/1", "out"])
def test_own_output_in_a_file_is_written_in_order(path, tmp_path):
    # A link like /dev/stdout, which code that replaces links would replace on this machine.
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    program = (
        f"from costmodel.text.files import write_atomically as w\nprint('before')\nw({path!r}, 'text\\n')\nprint('after')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdout=out, env=environment, check=True)
    assert (tmp_path / "out").read_text() == "before\ntext\nafter\n"
    assert (tmp_path / "stdout").is_symlink()


@pytest.mark.parametrize("root", [None, Path("/dev/shm")], ids=str)
def test_a_file_moves_to_where_a_link_leads(tmp_path, root, device):
    """Also to another file system, where a rename fails; never onto anything but a regular file."""
    if root is not None and not root.is_dir():
        pytest.skip(f"no {root}")
    link, made = tmp_path / "link", tmp_path / "made"
    with tempfile.TemporaryDirectory(dir=root or tmp_path) as folder:
        kept = Path(folder) / "kept"
        kept.write_text("old")
        link.symlink_to(kept)
        made.write_text("new")
        made.chmod(0o640)
        move_atomically(made, regular_target(link))
        assert link.is_symlink() and not made.exists() and names(Path(folder)) == ["kept"]
        assert kept.read_text() == "new" and stat.S_IMODE(kept.stat().st_mode) == 0o640
    for taken in (device(7), tmp_path):
        with pytest.raises(OSError, match="it is a d"):
            regular_target(taken)
    for nowhere in (tmp_path / "nowhere" / "made", link):
        with pytest.raises(FileNotFoundError, match="there is no directory"):
            regular_target(nowhere)
    with pytest.raises(OSError, match="the name is empty"):
        check_writable("")
